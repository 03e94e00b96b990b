"""Rows from JSONL, Parquet, Arrow or the Hub, in one form: {id, messages, ...} or {id, input_ids, loss_mask}, and where
there are several data sets the number of theirs. What is left out is counted by reason.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from data_prep.config import DataConfig, Source
from data_prep.files import JsonLines, digest, file_digest, json_line, part_path, read_json, write_json

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function_response": "tool", "observation": "tool"}


def read_rows(config: DataConfig, report: Counter | None = None) -> Iterator[dict]:
    """All rows, in the order of the sources. report: gets their counts, and those of dropped ones by reason.

    Raises ValueError that names the row for one that is no conversation, and where no row is left.
    """
    report = Counter() if report is None else report
    ids, prompts, several = set(), set(), len(config.sources) > 1
    for number, source in enumerate(config.sources):
        for at, raw in enumerate(open_source(source)):
            if at == source.limit or report["conversations"] == config.limit:
                break
            where = f"{source.path}, row {at + 1}"
            report["conversations read"] += 1
            row = _normal(raw, where)
            row["id"] = f"{number}:{row.get('id', at)}" if several else str(row.get("id", at))
            if several:
                row["source_number"] = number
            if row["id"] in ids:
                raise ValueError(f"{where}: id {row['id']!r} stands twice, expected unique ids")
            ids.add(row["id"])
            prompt = prompt_of(row)
            if not prompt or (not isinstance(prompt[-1], int) and prompt[-1]["role"] in ("system", "developer")):
                report["conversations dropped, no user message before the first answer"] += 1
                continue
            key = digest([prompt, row.get("tools")])
            if config.dedup and key in prompts:
                report["conversations dropped, same prompt as an earlier one"] += 1
                continue
            prompts.add(key)
            report["conversations"] += 1
            yield row
    if not report["conversations"]:
        raise ValueError(f"data.path: {[s.path for s in config.sources]} has no rows that can be used: {dict(report)}")


def prompt_of(row: dict) -> list:
    """The messages up to the first answer: what the target is asked. Of ready ids: those before the first answer."""
    if "input_ids" in row:
        return row["input_ids"][: row["loss_mask"].index(1) if 1 in row["loss_mask"] else None]
    messages = row["messages"]
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[:first]


def source_identity(source: Source, cache_dir: Path) -> list:
    """What names the content of a source: the hash of its files, or the commit of a Hub data set, which becomes its
    `revision`. A commit that was looked up is kept in the cache: nodes without network then mean the same."""
    path, settings = local_path(source), [source.split, source.subset, source.limit]
    if path.exists():
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        return [*settings, *([str(file.relative_to(path)), file_digest(file)] for file in files)]
    from huggingface_hub import HfApi

    known_path = cache_dir / "hub_commits.json"
    known = read_json(known_path) if known_path.exists() else {}
    if source.revision is None and source.path not in known:
        try:
            known[source.path] = HfApi().dataset_info(source.path).sha
        except Exception as error:  # of many kinds, by the hub's version
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"data.path: {source.path} is no file, and the Hub does not tell its commit ({reason}); name a file, or"
                " give data.sources with a revision"
            ) from None
        cache_dir.mkdir(parents=True, exist_ok=True)
        write_json(known_path, known)
    source.revision = source.revision or known[source.path]
    return [*settings, source.path, source.revision]


def collect(config: DataConfig, folder: Path) -> tuple[JsonLines, dict]:
    """All rows in `folder`/rows.jsonl, and the report beside it; done once."""
    path = folder / "rows.jsonl"
    if not (folder / "report.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        report, part = Counter(), part_path(path)
        try:
            with part.open("w") as out:
                for row in read_rows(config, report):
                    out.write(json_line(row))
            part.rename(path)
        except UnicodeEncodeError as error:
            raise ValueError(f"data.path: {row['id']} is not Unicode text ({error}); mend the row") from None
        finally:
            part.unlink(missing_ok=True)
        write_json(folder / "report.json", report)
    return JsonLines(path), read_json(folder / "report.json")


def local_path(source: Source) -> Path:
    """The source's path, which need not exist: it may be a name on the Hub, unless it is spelt as a file."""
    path = Path(source.path)
    if not path.exists() and path.suffix in (".jsonl", ".json", ".parquet", ".arrow"):
        raise ValueError(f"data.path: {path} not found, expected a file of rows {{id, messages}}; check the path")
    return path


def open_source(source: Source) -> Iterator[dict]:
    path = local_path(source)
    if path.suffix in (".jsonl", ".json"):
        return iter(JsonLines(path))
    return iter(_dataset(source))


def _dataset(source: Source):
    import datasets

    path = Path(source.path)
    try:
        if path.suffix in (".parquet", ".arrow"):
            kind = path.suffix.removeprefix(".")
            return datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            found = datasets.load_from_disk(str(path))
            return found[source.split] if isinstance(found, datasets.DatasetDict) else found
        return datasets.load_dataset(
            source.path, source.subset, split=source.split, streaming=source.streaming, revision=source.revision
        )
    except (OSError, ConnectionError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"data.path: {source.path} could not be loaded ({reason}); name a local file") from None


def _normal(row: dict, where: str) -> dict:
    """The row with `messages`, or with input_ids and loss_mask. Raises ValueError for what is neither."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: found {str(row)[:80]!r}, expected an object {{id, messages}}")
    row = _without_none(row)
    if not row.get("tools"):
        row.pop("tools", None)
    if "input_ids" in row:
        ids, mask = row["input_ids"], row.get("loss_mask")
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise ValueError(f"{where}: input_ids {str(ids)[:60]} found, expected a list of token ids; mend the row")
        if not isinstance(mask, list) or len(mask) != len(ids) or not set(mask) <= {0, 1}:
            raise ValueError(f"{where}: input_ids without a loss_mask of 0 and 1 for each; give both")
        return row
    if isinstance(row.get("conversations"), list):  # ShareGPT
        row["messages"] = [
            {"role": SHAREGPT_ROLES.get(turn.get("from"), turn.get("from")), "content": turn.get("value", "")}
            if isinstance(turn, dict) and "from" in turn
            else turn
            for turn in row.pop("conversations")
        ]
    elif "messages" not in row and "prompt" in row:
        prompt = row.pop("prompt")
        row["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{where}: found keys {sorted(row)}, expected `messages` (a list of {{role, content}}), `conversations`,"
            " `prompt`, or `input_ids` with `loss_mask`"
        )
    for message in messages:
        fits = isinstance(message, dict) and message.get("role") in ROLES
        if fits and message.get("tool_calls"):
            message.setdefault("content", "")
            for call in message["tool_calls"]:
                if not isinstance(call, dict):
                    raise ValueError(f"{where}: tool call {str(call)[:60]!r} found, expected an object with a function")
                _parse_arguments(call.get("function", call), where)
        elif fits:
            message.pop("tool_calls", None)  # an empty list: templates ask whether the key is there
        if not fits or not isinstance(message.get("content"), str):
            raise ValueError(f"{where}: found message {str(message)[:80]!r}, expected a role of {ROLES} and a text")
    return row


def _parse_arguments(function: dict, where: str) -> None:
    """Turn a call's arguments from a text, as the API spells them, into what templates expect; servers do the same."""
    if isinstance(text := function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(text or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: arguments of a tool call are not JSON ({error}): {text[:80]!r}") from None


def _without_none(value):
    """Parquet and Arrow fill the fields that a record lacks with None; templates would print it."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
