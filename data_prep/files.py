"""Small files written whole or not at all, and names that are hashes of what determines the content."""

import hashlib
import json
import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name, flush to disk, rename."""
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    with part.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    part.rename(path)


def write_json(path: Path, value: dict) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def digest(value) -> str:
    """Twelve hex digits of the hash of a JSON value: the name of what it determines."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def sampled_digest(path: Path, samples: int = 256, size: int = 65536) -> str:
    """The hash of a file's length and of pieces spread over it: tells large weight files apart without reading all."""
    total = path.stat().st_size
    found = hashlib.sha256(str(total).encode())
    with path.open("rb") as data:
        for sample in range(samples):
            data.seek(max(total - size, 0) * sample // (samples - 1))
            found.update(data.read(size))
    return found.hexdigest()[:12]
