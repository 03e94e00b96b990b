"""Conversations to token ids and loss mask, through the target's own chat template.

Supervised are exactly the tokens that a server would generate: an answer and its end-of-turn token, nothing behind.
They are found by rendering the prompt alone, so that a template needs no marks for them. A template that rewrites
history (Qwen3 drops earlier reasoning) breaks the prefix property between turns; such a conversation gives one row a
turn.
"""

import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from data_prep.config import CutAnswers, DataConfig
from data_prep.files import digest
from data_prep.prompts import prompt_of
from data_prep.regenerate import render


@dataclass
class EncodedRow:
    """Token ids of one row, and which of them are supervised."""

    id: str
    source: int = 0  # number of its data set
    ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    split_key: int = 0  # 48 bits of its prompt's hash: which side of the held-out split it is on

    def num_eligible(self) -> int:
        return sum(a and b for a, b in zip(self.loss_mask, self.loss_mask[1:]))


def encode_row(row: dict, tokenizer, stops: set[int], config: DataConfig) -> list[EncodedRow]:
    """The rows of one conversation: one where each prompt continues the last turn, else one a turn."""
    about = {"source": row.get("source_number", 0), "split_key": int(digest(prompt_of(row)), 16)}
    if "input_ids" in row:
        return [EncodedRow(row["id"], ids=row["input_ids"], loss_mask=row["loss_mask"], **about)]
    messages, out = row["messages"], []
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for turn, i in enumerate(answers):
        prompt = _render(row, i, tokenizer, config)
        if row.get("answer_ids") is not None and len(answers) == 1:
            answer = row["answer_ids"]  # the tokens that the target wrote, never tokenised again
        else:
            answer = _answer_ids(row, i, prompt, tokenizer, stops, config)
        if not (out and prompt[: len(out[-1].ids)] == out[-1].ids):
            out.append(EncodedRow(row["id"] if turn == 0 else f"{row['id']}/{turn}", **about))
        last = out[-1]
        last.loss_mask += [0] * (len(prompt) - len(last.ids)) + [1] * len(answer)
        last.ids = prompt + answer
    return out


def _render(row: dict, end: int, tokenizer, config: DataConfig, prompt: bool = True) -> list[int]:
    try:
        return render(tokenizer, row["messages"][:end], config, row.get("tools"), prompt)
    except ValueError as error:
        raise ValueError(f"row {row['id']}: {error}") from None


def _answer_ids(row: dict, at: int, prompt: list[int], tokenizer, stops: set[int], config: DataConfig) -> list[int]:
    """The tokens of the answer in message `at`, by the template, up to and with its first stop token."""
    full = _render(row, at + 1, tokenizer, config, prompt=False)
    message = row["messages"][at]
    if message.get("tool_calls"):
        silent = {key: value for key, value in message.items() if key != "tool_calls"}
        silent["content"] = message.get("content") or ""
        if full == _render(
            {**row, "messages": [*row["messages"][:at], silent]}, at + 1, tokenizer, config, prompt=False
        ):
            raise ValueError(f"row {row['id']}: the target's chat template does not render tool_calls; drop the row")
    if full[: len(prompt)] != prompt and at > 1:  # the answer changed how the turns before it are written (gpt-oss)
        before = _render(row, at - 1, tokenizer, config, prompt=False)
        tail = prompt[len(before) :] if prompt[: len(before)] == before else prompt
        starts = [i for i in range(len(full) - len(tail) + 1) if full[i : i + len(tail)] == tail]
        full = prompt + full[starts[-1] + len(tail) :] if starts else full
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
    if row.get("finish") == "length" and at + 1 == len(row["messages"]):  # the target wrote no end behind it
        end -= 1
    return answer[: end + 1]


def encode_rows(
    rows: Iterable[dict], tokenizer, stops: set[int], config: DataConfig, report: Counter
) -> Iterator[EncodedRow]:
    """Encode all rows, in their order, on data.num_proc processes. report: gets counts, and drops by reason.

    Raises ValueError when nothing, or all, is supervised.
    """
    longest = ("", 0)
    for row, encoded in _each(rows, tokenizer, stops, config):
        if config.cut_answers == CutAnswers.drop and row.get("finish") == "length":
            report["rows dropped, answer cut at data.max_new_tokens"] += len(encoded)
            continue
        for new in encoded:
            report["rows"] += 1
            if len(new.ids) > config.max_length:
                report["rows cut at data.max_length"] += 1
                longest = max(longest, (new.id, len(new.ids)), key=lambda item: item[1])
                new.ids, new.loss_mask = new.ids[: config.max_length], new.loss_mask[: config.max_length]
            if not new.num_eligible():
                report["rows dropped, without two supervised tokens in a row"] += 1
                continue
            report["rows kept"] += 1
            report["tokens"] += len(new.ids)
            report["supervised tokens"] += sum(new.loss_mask)
            report[f"rows of up to {1 << max(len(new.ids) - 1, 1).bit_length()} tokens"] += 1
            yield new
    if longest[1]:
        print(
            f"data.max_length: row {longest[0]} has {longest[1]} tokens, {config.max_length} allowed;"
            f" {report['rows cut at data.max_length']} rows were cut; raise it to keep them whole"
        )
    if report["supervised tokens"] in (0, report["tokens"]):
        raise ValueError(
            f"data.path: {report['supervised tokens']} of {report['tokens']} tokens are supervised, expected a part;"
            f" do the rows have answers? {dict(report)}"
        )


def describe_report(report: dict) -> str:
    """The report as lines for a reader: rows in and out, share of supervised tokens, lengths, drops by reason."""
    lengths = {int(name.split()[4]): count for name, count in report.items() if name.startswith("rows of up to")}
    lines = [
        f"{report['conversations read']} conversations in, {report['rows kept']} rows out, {report['tokens']} tokens,"
        f" {report['supervised tokens'] / report['tokens']:.0%} of them supervised",
        "rows by length: " + ", ".join(f"up to {most}: {count}" for most, count in sorted(lengths.items())),
        *(f"{count} {name}" for name, count in report.items() if "dropped" in name or "cut" in name),
    ]
    return "\n  ".join(lines)


def _each(rows, tokenizer, stops, config) -> Iterator[tuple[dict, list[EncodedRow]]]:
    """(row, what it becomes), in order, whatever the number of processes."""
    if config.num_proc == 1:
        yield from ((row, encode_row(row, tokenizer, stops, config)) for row in rows)
        return
    _Worker.job = tokenizer, stops, config  # forked, not pickled
    source = iter(rows)
    with multiprocessing.get_context("fork").Pool(config.num_proc) as pool:
        while window := list(islice(source, 512 * config.num_proc)):
            yield from zip(window, pool.map(_Worker.run, window, chunksize=64))


class _Worker:
    """What a forked process needs to encode."""

    job = None

    @staticmethod
    def run(row: dict) -> list[EncodedRow]:
        return encode_row(row, *_Worker.job)
