"""Rows {id, messages} from a JSONL file or a Hub data set."""

import json
from collections.abc import Iterator
from pathlib import Path

from data_prep.config import DataConfig

ROLES = ("system", "user", "assistant", "tool")


def read_rows(config: DataConfig) -> list[dict]:
    """All rows, in the order of the source. Raises ValueError that names the row for one that is not a conversation."""
    path = Path(config.path)
    if path.suffix in (".jsonl", ".json") or path.exists():
        if not path.exists():
            raise ValueError(f"data.path: {path} not found, expected a JSONL file of {{id, messages}}; check the path")
        source = _jsonl(path)
    else:
        source = _hub(config)
    rows, seen = [], set()
    for number, row in enumerate(source):
        if number == config.limit:
            break
        _check(row, f"{config.path}, row {number + 1}")
        row = {**row, "id": str(row.get("id", number))}
        if row["id"] in seen:
            raise ValueError(f"{config.path}, row {number + 1}: id {row['id']!r} stands twice, expected unique ids")
        seen.add(row["id"])
        rows.append(row)
    if not rows:
        raise ValueError(f"data.path: {config.path} has no rows")
    return rows


def prompt_of(row: dict) -> list[dict]:
    """The messages up to the first answer: what the target is asked."""
    messages = row["messages"]
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[:first]


def _jsonl(path: Path) -> Iterator[dict]:
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, row {number}: not JSON ({error}), expected one object a line") from None


def _hub(config: DataConfig) -> Iterator[dict]:
    from datasets import load_dataset

    try:
        yield from load_dataset(config.path, split=config.split, streaming=config.limit is not None)
    except (OSError, ConnectionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"data.path: {config.path} could not be loaded from the Hub ({reason}); name a local JSONL file"
        ) from None


def _check(row: dict, where: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: found {str(row)[:80]!r}, expected an object {{id, messages}}")
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: found keys {sorted(row)}, expected `messages`: a list of {{role, content}}")
    for message in messages:
        fits = isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)
        if not fits:
            raise ValueError(f"{where}: found message {str(message)[:80]!r}, expected a role of {ROLES} and a text")
    if not prompt_of(row) or prompt_of(row)[-1]["role"] == "system":
        raise ValueError(f"{where}: no user message before the first answer, expected a prompt")
