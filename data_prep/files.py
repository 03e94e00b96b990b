"""Small files written whole or not at all, and names that are hashes of what determines the content."""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

STALE_SECONDS = 600  # without a sign of life, the owner of a temporary file or a claim is taken for dead


def part_path(path: Path) -> Path:
    """The name under which this process writes a file before it renames it."""
    return path.with_name(f"{path.name}.part@{socket.gethostname()}@{os.getpid()}")


def is_abandoned(path: Path) -> bool:
    """Whether the process that a temporary file or a claim is named after is dead, or silent for STALE_SECONDS."""
    *_, host, pid = path.name.split("@")
    try:
        if host == socket.gethostname():
            with contextlib.suppress(PermissionError):  # another user's process: only its silence tells
                os.kill(int(pid), 0)
        return time.time() - path.stat().st_mtime > STALE_SECONDS
    except ProcessLookupError:
        return True
    except FileNotFoundError:  # gone meanwhile
        return False


def remove_abandoned(folder: Path) -> None:
    for path in folder.glob("*@*@*"):
        if is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a written file is on the disk."""
    with path.open("rb") as written:
        os.fsync(written.fileno())


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name, flush to disk, rename."""
    part = part_path(path)
    try:
        part.write_text(text)
        flush(part)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, value: dict) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> dict:
    """Raises ValueError, one line, for a file that is cut or none of ours."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); move it away, and what it stands for is made anew") from None


class JsonLines:
    """The objects of a JSONL file, read one at a time, as often as asked. Raises ValueError for a line that is none."""

    def __init__(self, path: Path):
        self.path = path

    def __iter__(self) -> Iterator[dict]:
        with self.path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    if line.strip():
                        yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"{self.path}, row {number}: not JSON ({error}), expected one object a line"
                    ) from None


def json_line(value: dict) -> str:
    return json.dumps(value, ensure_ascii=False, default=str) + "\n"


def digest(value) -> str:
    """Twelve hex digits of the hash of a JSON value: the name of what it determines."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def file_digest(path: Path) -> str:
    """The SHA-256 of a whole file."""
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def sampled_digest(path: Path, samples: int = 256, size: int = 65536) -> str:
    """The hash of a file's length and of pieces spread over it: tells large weight files apart without reading all."""
    total = path.stat().st_size
    found = hashlib.sha256(str(total).encode())
    with path.open("rb") as data:
        for sample in range(samples):
            data.seek(max(total - size, 0) * sample // (samples - 1))
            found.update(data.read(size))
    return found.hexdigest()[:12]
