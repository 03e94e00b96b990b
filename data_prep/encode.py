"""Conversations to token ids and loss mask, through the target's own chat template.

Supervised are exactly the tokens that a server would generate: an answer and its end-of-turn token, nothing behind. A
template that rewrites history (Qwen3 drops earlier reasoning) breaks the prefix property between turns; such a
conversation gives one row a turn.
"""

from collections import Counter
from dataclasses import dataclass, field

from data_prep.config import DataConfig
from data_prep.regenerate import render_prompt, template_arguments


@dataclass
class EncodedRow:
    """Token ids of one row, and which of them are supervised."""

    id: str
    source: str  # id of the conversation
    ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)


def encode_row(row: dict, tokenizer, stops: set[int], config: DataConfig) -> list[EncodedRow]:
    """The rows of one conversation: one where each prompt continues the last turn, else one a turn."""
    messages, out = row["messages"], []
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for turn, i in enumerate(answers):
        prompt = render_prompt(tokenizer, messages[:i], config)
        if row.get("answer_ids") is not None and len(answers) == 1:
            answer = row["answer_ids"]  # the tokens that the target wrote, never tokenised again
        else:
            answer = _answer_ids(row, messages[: i + 1], prompt, tokenizer, stops, config)
        if not (out and prompt[: len(out[-1].ids)] == out[-1].ids):
            out.append(EncodedRow(row["id"] if turn == 0 else f"{row['id']}/{turn}", row["id"]))
        last = out[-1]
        last.loss_mask += [0] * (len(prompt) - len(last.ids)) + [1] * len(answer)
        last.ids = prompt + answer
    return out


def _answer_ids(row, messages, prompt, tokenizer, stops, config) -> list[int]:
    full = tokenizer.apply_chat_template(messages, return_dict=False, **template_arguments(config))
    if full[: len(prompt)] != prompt:
        raise ValueError(
            f"row {row['id']}: the template's prompt is not how its full conversation starts; this template cannot be"
            " supervised from text, let the target answer (data.answers=target)"
        )
    answer = full[len(prompt) :]
    end = next((i for i, token in enumerate(answer) if token in stops), None)
    if end is None:
        raise ValueError(
            f"row {row['id']}: no end-of-turn token of {sorted(stops)} behind the answer in the template's output;"
            " check the target's generation config"
        )
    if row.get("finish") == "length" and len(messages) == len(row["messages"]):  # the target wrote no end behind it
        end -= 1
    return answer[: end + 1]


def encode_rows(rows: list[dict], tokenizer, stops: set[int], config: DataConfig) -> tuple[list[EncodedRow], dict]:
    """Encode all rows; return them and a report of counts. Raises ValueError when nothing, or all, is supervised."""
    encoded, counts, longest = [], Counter(conversations=len(rows)), None
    for row in rows:
        for new in encode_row(row, tokenizer, stops, config):
            counts["rows"] += 1
            if len(new.ids) > config.max_length:
                counts["rows cut at data.max_length"] += 1
                longest = max(longest or new, new, key=lambda item: len(item.ids))
                new = EncodedRow(new.id, new.source, new.ids[: config.max_length], new.loss_mask[: config.max_length])
            if not any(a and b for a, b in zip(new.loss_mask, new.loss_mask[1:])):
                counts["rows dropped, without two supervised tokens in a row"] += 1
                continue
            encoded.append(new)
            counts["tokens"] += len(new.ids)
            counts["supervised tokens"] += sum(new.loss_mask)
    if longest is not None:
        print(
            f"data.max_length: row {longest.id} has {len(longest.ids)} tokens, {config.max_length} allowed;"
            f" {counts['rows cut at data.max_length']} rows were cut; raise it to keep them whole"
        )
    if counts["supervised tokens"] in (0, counts["tokens"]):
        raise ValueError(
            f"data.path: {counts['supervised tokens']} of {counts['tokens']} tokens are supervised, expected a part;"
            " do the rows have answers?"
        )
    counts["rows kept"] = len(encoded)
    return encoded, dict(counts)
