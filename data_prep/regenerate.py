"""The target answers every prompt: in this process (small targets), or through OpenAI-compatible servers.

A server gets the token ids of the prompt, so that it answers exactly what is trained on: its own template, tokenizer
and reasoning parser play no part. Answers are appended to `answers.part.jsonl` as they come, and a restarted run goes
on behind those that are there. When all are in, they are written in the order of the prompts to `answers.jsonl`, and
the manifest beside it says how they were made. A row: the prompt's own, with `messages` up to the answer, and finish
(stop | length), num_tokens, answer_ids.
"""

import fcntl
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path

import jinja2
import torch
from tqdm import tqdm

from data_prep.config import DataConfig
from data_prep.files import JsonLines, digest, json_line, part_path, write_json
from data_prep.prompts import prompt_of

WINDOW = 8  # batches that are sorted by length together
TRIES = 5  # of a request, with pauses of 1, 2, 4, 8 seconds, on one server after the other
GIVE_UP = 100  # rows in a row that no server answers
ANSWER_KEYS = ("messages", "answer_ids", "finish", "num_tokens", "tokenised_here")  # of a row that was answered before


def template_arguments(config: DataConfig) -> dict:
    """What the chat template is called with, besides messages and tools."""
    return {} if config.thinking is None else {"enable_thinking": config.thinking}


def render(tokenizer, messages: list[dict], config: DataConfig, tools=None, prompt: bool = True) -> list[int]:
    """Token ids of a conversation; prompt: up to where the answer starts. Raises ValueError, one line, on refusal."""
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=prompt, return_dict=False, **template_arguments(config)
        )
    except (jinja2.TemplateError, TypeError) as error:
        roles = [message["role"] for message in messages]
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"the target's chat template refuses a conversation of {roles}: {reason}") from None


def stop_ids(eos: int | list[int] | None, tokenizer) -> set[int]:
    """The ids that end a turn: those that the target's generation config names, or else the tokenizer's."""
    eos = tokenizer.eos_token_id if eos is None else eos
    return set(eos) if isinstance(eos, list) else {eos}


def regenerate(
    rows: Iterable[dict], config: DataConfig, tokenizer, stops: set[int], load_target, target_name: str, folder: Path
) -> JsonLines:
    """Answer all rows; return those of `folder`/answers.jsonl. rows can be read again and again.

    load_target() -> the model, unused with a server. Raises OSError where rows got no answer; the others stay, and the
    next run asks for the rest.
    """
    final, part = folder / "answers.jsonl", folder / "answers.part.jsonl"
    if final.exists():
        return JsonLines(final)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process answers, the others wait for it
        if final.exists():
            return JsonLines(final)
        at = _offsets(part)
        ids = [row["id"] for row in rows]
        if at:
            print(f"regenerate: {len(at)} of {len(ids)} answers are there, going on", flush=True)
        with part.open("ab") as out:
            if config.server:
                answers = _from_servers(rows, at, config, tokenizer, stops, target_name)
            else:
                answers = _in_process(rows, at, config, tokenizer, stops, load_target)
            with tqdm(total=len(ids), initial=len(at), desc="regenerate", unit="row") as bar:
                failures = _append(answers, out, at, bar)
        if failures:
            raise OSError(
                f"data.server: {failures.total()} of {len(ids)} rows got no answer ({failures.most_common(1)[0][0]});"
                " the others are kept; run again to ask for the rest"
            )
        counts = _write_in_order(ids, at, part, final)
        about = {**_how(config, target_name), **counts}
        write_json(folder / "manifest.json", about)
        part.unlink()
    print(f"regenerate: {about['rows']} answers, {about['answer_tokens']} tokens, finish {about['finish']}", flush=True)
    return JsonLines(final)


def _offsets(part: Path) -> dict[str, int]:
    """Where each row starts in the file that a killed run left; half a last line is cut off."""
    at, end = {}, 0
    if part.exists():
        with part.open("rb+") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    at[json.loads(line)["id"]] = end
                    end += len(line)
            lines.truncate(end)
    return at


def _append(answers, out, at: dict[str, int], bar) -> Counter:
    """Write the answers as they come; returns the failures by reason."""
    start, num_tokens, failures, in_a_row = time.perf_counter(), 0, Counter(), 0
    for row, answer in answers:
        if isinstance(answer, str):  # why there is none
            failures[answer] += 1
            in_a_row += 1
            if in_a_row == GIVE_UP:
                raise OSError(f"data.server: {GIVE_UP} rows in a row got no answer; the last: {answer}")
            continue
        in_a_row = 0
        message = {"role": "assistant", "content": answer.pop("content")}
        kept = {key: value for key, value in row.items() if key not in ANSWER_KEYS}
        at[row["id"]] = out.tell()
        out.write(json_line({**kept, "messages": [*prompt_of(row), message], **answer}).encode())
        out.flush()
        num_tokens += answer["num_tokens"]
        bar.set_postfix_str(f"{num_tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
        bar.update()
    return failures


def _write_in_order(ids: list[str], at: dict[str, int], part: Path, final: Path) -> dict:
    """The answers in the order of the prompts; returns their counts."""
    finish, num_tokens, made_here, temporary = Counter(stop=0, length=0), 0, 0, part_path(final)
    with part.open("rb") as source, temporary.open("wb") as out:
        for name in ids:
            source.seek(at[name])
            line = source.readline()
            row = json.loads(line)
            finish[row["finish"]] += 1
            num_tokens += row["num_tokens"]
            made_here += row.get("tokenised_here", False)
            out.write(line)
    temporary.rename(final)
    if made_here:
        print(f"regenerate: {made_here} answers came as text alone; their tokens were made here, and may be others")
    return {"rows": len(ids), "answer_tokens": num_tokens, "finish": dict(finish), "tokenised_here": made_here}


def _how(config: DataConfig, target_name: str) -> dict:
    sampled = {"top_p": config.top_p, "top_k": config.top_k, "seed": config.seed} if config.temperature else {}
    return {
        "target": target_name,
        "by": [server_version(url) for url in config.server]
        or f"transformers in {config.dtype}, batches of {config.batch_size}",
        "temperature": config.temperature,
        "thinking": config.thinking,
        "max_new_tokens": config.max_new_tokens,
        **sampled,
    }


def server_version(url: str) -> str:
    """The version that a server gives at its root (vLLM /version, SGLang /get_server_info)."""
    import httpx

    for path in ("version", "get_server_info"):
        try:
            return httpx.get(f"{url.rstrip('/').removesuffix('/v1')}/{path}", timeout=10).json()["version"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            continue
    return "a server that does not tell its version"


def _in_process(rows: Iterable[dict], done, config: DataConfig, tokenizer, stops: set[int], load_target) -> Iterator:
    """Yield (row, answer), in left-padded batches, sorted by length within a window of batches.

    The batches are those of all rows, whatever is done already: rounding depends on a batch's make-up.
    """
    model, source = None, iter(rows)
    while window := list(islice(source, WINDOW * config.batch_size)):
        prompts = [render(tokenizer, prompt_of(row), config, row.get("tools")) for row in window]
        order = sorted(range(len(window)), key=lambda i: len(prompts[i]))
        for first in range(0, len(order), config.batch_size):
            batch = order[first : first + config.batch_size]
            if all(window[i]["id"] in done for i in batch):
                continue
            model = model or load_target()
            torch.manual_seed(int(digest([config.seed, window[batch[0]]["id"]]), 16))
            for i, ids in zip(batch, answer_batch(model, [prompts[i] for i in batch], config, stops)):
                if window[i]["id"] not in done:
                    yield window[i], _answer(tokenizer, ids, stops)


def _answer(tokenizer, ids: list[int], stops: set[int]) -> dict:
    text = tokenizer.decode([token for token in ids if token not in stops])
    finish = "stop" if ids and ids[-1] in stops else "length"
    return {"content": text, "finish": finish, "num_tokens": len(ids), "answer_ids": ids}


@torch.inference_mode()
def answer_batch(model, prompts: list[list[int]], config: DataConfig, stops: set[int]) -> list[list[int]]:
    """The answers of one batch, each up to and with its first stop token."""
    longest = max(map(len, prompts))
    pad = min(stops)
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    sampled = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
    outputs = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=config.max_new_tokens, do_sample=config.temperature > 0,
        eos_token_id=sorted(stops), pad_token_id=pad, **(sampled if config.temperature else {}),
    )[:, longest:].tolist()  # fmt: skip
    ends = [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in outputs]
    return [row[:end] for row, end in zip(outputs, ends)]


def _from_servers(rows: Iterable[dict], done, config: DataConfig, tokenizer, stops: set[int], name: str) -> Iterator:
    """Yield (row, answer), or (row, why there is none), as servers give them."""
    import httpx

    def read(reply: dict) -> dict:
        return served(reply["choices"][0], tokenizer, stops)

    def ask(number: int, row: dict):
        prompt, seed = render(tokenizer, prompt_of(row), config, row.get("tools")), digest([config.seed, row["id"]])
        body, at = completion_body(name, prompt, config, stops, int(seed, 16)), number % len(config.server)
        answer = complete(client, [*config.server[at:], *config.server[:at]], body, read)
        return row, f"row {row['id']}: {answer}" if isinstance(answer, str) else answer

    workers = config.concurrency * len(config.server)
    todo = ((number, row) for number, row in enumerate(rows) if row["id"] not in done)
    limits = httpx.Limits(max_connections=workers)
    with httpx.Client(timeout=600, limits=limits) as client, ThreadPoolExecutor(workers) as pool:
        waiting = {pool.submit(ask, *item) for item in islice(todo, 2 * workers)}
        while waiting:
            ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            waiting |= {pool.submit(ask, *item) for item in islice(todo, len(ready))}
            for future in ready:
                yield future.result()


def completion_body(name: str, prompt: list[int], config, stops: set[int], seed: int) -> dict:
    """What /completions is asked. config: has max_new_tokens, temperature, top_p and top_k."""
    body = {
        "model": name, "prompt": prompt, "max_tokens": config.max_new_tokens, "temperature": config.temperature,
        "stop_token_ids": sorted(stops), "skip_special_tokens": False, "return_token_ids": True,
    }  # fmt: skip
    if config.temperature:
        body |= {"top_p": config.top_p, "seed": seed % 2**31}
        body |= {"top_k": config.top_k} if config.top_k else {}
    return body


def complete(client, servers: list[str], body: dict, read, tries: int = TRIES) -> dict | str:
    """What `read` makes of the reply of one of the servers, tried in turn; or why there is none, in one line."""
    import httpx

    for attempt in range(tries):
        url = servers[attempt % len(servers)].rstrip("/")
        try:
            reply = client.post(f"{url}/completions", json=body)
            if 400 <= reply.status_code < 500 and reply.status_code != 429:  # asking again would not help
                return f"{url} refused: {' '.join(reply.text.split())[:200]}"
            reply.raise_for_status()
            return read(reply.json())
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            reason = f"{url} failed: {(str(error) or type(error).__name__).splitlines()[0]}"
            if attempt < tries - 1:
                time.sleep(2**attempt)
    return reason


def served(choice: dict, tokenizer, stops: set[int]) -> dict:
    """A server's choice as an answer; its text becomes tokens here where it does not give them.

    Raises ValueError for a choice that is neither complete nor cut by length.
    """
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"finish_reason {choice['finish_reason']!r} found, expected stop or length")
    ids = choice.get("token_ids")
    made_here = ids is None
    if made_here:
        ids = tokenizer(choice["text"], add_special_tokens=False).input_ids
    if choice["finish_reason"] == "stop" and (not ids or ids[-1] not in stops):
        reason = choice.get("stop_reason")
        ids = [*ids, reason if reason in stops else _end(tokenizer, stops)]
    answer = _answer(tokenizer, ids, stops) | {"finish": choice["finish_reason"]}
    return answer | ({"tokenised_here": True} if made_here else {})


def _end(tokenizer, stops: set[int]) -> int:
    return tokenizer.eos_token_id if tokenizer.eos_token_id in stops else min(stops)
