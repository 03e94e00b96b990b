"""The target answers every prompt: in this process (small targets), or through OpenAI-compatible servers.

Answers are appended to `answers.part.jsonl` as they come, and a restarted run goes on behind those that are there. When
all are in, they are written in the order of the prompts to `answers.jsonl`, and the manifest beside it says how they
were made. A row: {id, messages, finish: stop | length, answer_ids (where the tokens are known)}.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from tqdm import tqdm

from data_prep.config import DataConfig
from data_prep.files import write_json, write_text
from data_prep.prompts import prompt_of

WINDOW = 8  # batches that are sorted by length together
ANSWER_KEYS = ("messages", "answer_ids", "finish", "num_tokens")  # of a row that was answered before


def template_arguments(config: DataConfig) -> dict:
    """What the chat template is called with, besides the messages."""
    return {} if config.thinking is None else {"enable_thinking": config.thinking}


def stop_ids(eos: int | list[int] | None, tokenizer) -> set[int]:
    """The ids that end a turn: those that the target's generation config names, or else the tokenizer's."""
    eos = tokenizer.eos_token_id if eos is None else eos
    return set(eos) if isinstance(eos, list) else {eos}


def regenerate(rows: list[dict], config: DataConfig, load_target, target_name: str, folder: Path) -> Path:
    """Answer all rows; return `folder`/answers.jsonl. load_target() -> (model, tokenizer), unused with a server."""
    final, part = folder / "answers.jsonl", folder / "answers.part.jsonl"
    if final.exists():
        return final
    folder.mkdir(parents=True, exist_ok=True)
    done = {row["id"]: row for row in _complete_lines(part)}
    write_text(part, _lines(done.values()))
    todo = [row for row in rows if row["id"] not in done]
    if done:
        print(f"regenerate: {len(done)} of {len(rows)} answers are there, going on", flush=True)
    answers = _from_servers(todo, config, target_name) if config.server else _in_process(todo, config, load_target)
    start, num_tokens = time.perf_counter(), 0
    with part.open("a") as out, tqdm(total=len(todo), desc="regenerate", unit="row") as bar:
        for row, answer in answers:
            message = {"role": "assistant", "content": answer.pop("content")}
            kept = {key: value for key, value in row.items() if key not in ANSWER_KEYS}
            done[row["id"]] = {**kept, "messages": [*prompt_of(row), message], **answer}
            out.write(_lines([done[row["id"]]]))
            out.flush()
            num_tokens += answer["num_tokens"]
            bar.set_postfix_str(f"{num_tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
            bar.update()
    ordered = [done[row["id"]] for row in rows]
    manifest = _manifest(config, target_name, ordered)
    write_json(folder / "manifest.json", manifest)
    write_text(final, _lines(ordered))
    part.unlink()
    print(f"regenerate: {len(ordered)} answers, {manifest['answer_tokens']} tokens, finish {manifest['finish']}")
    return final


def _lines(rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def _complete_lines(path: Path) -> list[dict]:
    """The rows of a file that a killed run may have left with half a last line."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def _manifest(config: DataConfig, target_name: str, rows: list[dict]) -> dict:
    return {
        "target": target_name,
        "by": "server" if config.server else f"transformers in {config.dtype}, batches of {config.batch_size}",
        "temperature": 0.0,
        "thinking": config.thinking,
        "max_new_tokens": config.max_new_tokens,
        "rows": len(rows),
        "answer_tokens": sum(row["num_tokens"] for row in rows),
        "finish": {kind: sum(row["finish"] == kind for row in rows) for kind in ("stop", "length")},
    }


def _in_process(rows: list[dict], config: DataConfig, load_target):
    """Yield (row, answer): greedy, in left-padded batches, sorted by length within a window of batches."""
    if not rows:
        return
    model, tokenizer = load_target()
    stops = stop_ids(model.generation_config.eos_token_id, tokenizer)
    for start in range(0, len(rows), WINDOW * config.batch_size):
        window = rows[start : start + WINDOW * config.batch_size]
        prompts = [render_prompt(tokenizer, prompt_of(row), config) for row in window]
        order = sorted(range(len(window)), key=lambda i: len(prompts[i]))
        for first in range(0, len(order), config.batch_size):
            batch = order[first : first + config.batch_size]
            answers = greedy_answers(model, [prompts[i] for i in batch], config.max_new_tokens, stops)
            for i, ids in zip(batch, answers):
                text = tokenizer.decode([token for token in ids if token not in stops])
                finish = "stop" if ids[-1] in stops else "length"
                yield window[i], {"content": text, "finish": finish, "num_tokens": len(ids), "answer_ids": ids}


def render_prompt(tokenizer, messages: list[dict], config: DataConfig) -> list[int]:
    """Token ids of the conversation so far, up to where the answer starts."""
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **template_arguments(config)
    )


@torch.inference_mode()
def greedy_answers(model, prompts: list[list[int]], max_new_tokens: int, stops: set[int]) -> list[list[int]]:
    """Greedy answers of one batch, each up to and with its first stop token."""
    longest = max(map(len, prompts))
    pad = min(stops)
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    outputs = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False,
        eos_token_id=sorted(stops), pad_token_id=pad,
    )[:, longest:].tolist()  # fmt: skip
    ends = [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in outputs]
    return [row[:end] for row, end in zip(outputs, ends)]


def _from_servers(rows: list[dict], config: DataConfig, target_name: str, concurrency: int = 64, tries: int = 5):
    """Yield (row, answer) as servers give them, round robin over the base URLs."""
    import httpx

    def ask(number_and_row):
        number, row = number_and_row
        url = config.server[number % len(config.server)].rstrip("/")
        body = {
            "model": target_name, "messages": prompt_of(row), "temperature": 0.0, "max_tokens": config.max_new_tokens,
            "chat_template_kwargs": template_arguments(config),
        }  # fmt: skip
        for attempt in range(tries):
            try:
                reply = client.post(f"{url}/chat/completions", json=body)
                if 400 <= reply.status_code < 500 and reply.status_code != 429:  # asking again would not help
                    raise OSError(f"data.server: {url} refused row {row['id']}: {reply.text.strip()[:200]}")
                reply.raise_for_status()
                break
            except httpx.HTTPError as error:
                if attempt == tries - 1:
                    reason = str(error).splitlines()[0]
                    raise OSError(f"data.server: {url} failed {tries} times on row {row['id']}: {reason}") from None
                time.sleep(2**attempt)
        choice, usage = reply.json()["choices"][0], reply.json().get("usage") or {}
        answer = {"content": choice["message"]["content"], "finish": choice["finish_reason"]}
        if answer["content"] is None or answer["finish"] not in ("stop", "length"):
            raise OSError(
                f"data.server: {url} gave row {row['id']} {str(answer)[:120]}, expected a text and stop or length"
            )
        return row, {**answer, "num_tokens": usage.get("completion_tokens", 0)}

    with httpx.Client(timeout=600) as client, ThreadPoolExecutor(concurrency * len(config.server)) as pool:
        for future in as_completed([pool.submit(ask, item) for item in enumerate(rows)]):
            yield future.result()
