"""The store: shards of safetensors with the target's features, and their lazy reader.

A shard holds a contiguous range of rows, end to end and unpadded: `features` [tokens, R] (see codec.py), `input_ids`
int32 [tokens], `loss_mask` uint8 [tokens], `offsets` int64 [rows + 1], and on request `last` [tokens, D]. Few large
tensors, whatever the number of rows (safetensors caps its header at 100 MB). Beside the shards lie

    index.safetensors    of each row: length, eligible anchors, source, hash of the prompt, id; the token ids that occur
    codec.safetensors    how features become what is stored
    manifest.json        what determines the content (the recipe), counts, size and checksum of every file

Row i of the data is row i of the store. Files are written under a temporary name, flushed and renamed, so that one that
is there is whole.
"""

import bisect
import functools
import json
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from data_prep.codec import Codec
from data_prep.files import file_digest, flush, part_path, read_json

SCHEMA = 2  # of the manifest and the tensors; a reader refuses another
INDEX, CODEC, MANIFEST = "index.safetensors", "codec.safetensors", "manifest.json"
INDEX_DTYPES = {"length": torch.int32, "eligible": torch.int32, "source": torch.int16, "split_key": torch.int64}
OPEN_SHARDS = 16


@dataclass
class Row:
    """One row as the trainer gets it."""

    index: int  # in the store, and in the data
    id: str
    ids_T: torch.Tensor  # int64
    loss_mask_T: torch.Tensor  # bool
    features_TF: torch.Tensor | None
    last_TD: torch.Tensor | None = None  # the target's last hidden state, where it was stored and is asked for


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], about: dict) -> dict:
    """Write a file under a temporary name, flush and rename it; returns its record {bytes, sha256}.

    about: stands in the header, as one key: safetensors writes several in random order. Raises OSError, one line, when
    the disk is full.
    """
    folder = part_path(path)  # the library has temporary files of its own, which a killed process leaves there
    part = folder / path.name
    try:
        folder.mkdir(exist_ok=True)
        save_file(tensors, part, {"meta": json.dumps(about, sort_keys=True)})
        part.chmod(0o644)  # the library leaves it to the owner alone
        flush(part)
        record = {"bytes": part.stat().st_size, "sha256": file_digest(part)}
        part.rename(path)
    except SafetensorError as error:  # how the library reports a full disk
        raise OSError(f"cache.dir: {path} could not be written ({error}); what is finished stays, run again") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return record


def write_shard(
    path: Path, first_row: int, ids: list, loss_masks: list, features_TR=None, recipe: str = "", last_TD=None
) -> dict:
    """Write one shard: per-row id and mask lists, and the stored features of all its tokens (None for ids alone).

    first_row and recipe (a hash) stand in its header, so that a shard in another's place shows. Returns its record.
    """
    tensors = {
        "input_ids": torch.tensor([token for row in ids for token in row], dtype=torch.int32),
        "loss_mask": torch.tensor([flag for row in loss_masks for flag in row], dtype=torch.uint8),
        "offsets": torch.tensor([0, *map(len, ids)]).cumsum(0),
    }
    for name, tensor in (("features", features_TR), ("last", last_TD)):
        if tensor is not None:
            assert len(tensor) == len(tensors["input_ids"])
            tensors[name] = tensor
    return write_tensors(path, tensors, {"first_row": first_row, "recipe": recipe})


def write_rows(folder: Path, rows: Iterable, shard_tokens: int) -> dict:
    """Write encoded rows (encode.EncodedRow) as shards without features, and their index; returns what a manifest says
    of them. A shard closes once it holds `shard_tokens` tokens."""
    index = {name: [] for name in ("length", "eligible", "source", "split_key")}
    names, seen, shards, first_rows, held = [], set(), [], [0], []

    def close() -> None:
        ids, masks = [row.ids for row in held], [row.loss_mask for row in held]
        shards.append(write_shard(shard_path(folder, len(shards)), first_rows[-1], ids, masks))
        first_rows.append(first_rows[-1] + len(held))
        held.clear()

    tokens = 0
    for row in rows:
        if tokens >= shard_tokens:
            close()
            tokens = 0
        held.append(row)
        tokens += len(row.ids)
        for name, value in zip(index, (len(row.ids), row.num_eligible(), row.source, row.split_key)):
            index[name].append(value)
        names.append(row.id.encode())
        seen.update(row.ids)
    close()
    occurs = torch.zeros(max(seen) + 1, dtype=torch.uint8)
    occurs[sorted(seen)] = 1
    tensors = {name: torch.tensor(values, dtype=INDEX_DTYPES[name]) for name, values in index.items()}
    tensors["id_bytes"] = torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8)
    tensors["id_ends"] = torch.tensor([0, *map(len, names)]).cumsum(0)
    write_tensors(folder / INDEX, {**tensors, "seen": occurs}, {})
    longest, total = max(index["length"]), sum(index["length"])
    return {"first_rows": first_rows, "shards": shards, "longest": longest, "tokens": total}


class Store:
    """Lazy reader: maps shards, reads the rows that are asked for.

    Raises ValueError where the folder has no complete manifest, or one of another schema.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).exists():
            raise ValueError(f"cache: {folder} is not complete, expected a manifest.json; run the stage that writes it")
        self.manifest = read_json(self.folder / MANIFEST)
        if (found := self.manifest.get("schema")) != SCHEMA:
            raise ValueError(f"cache: {folder} has schema {found}, expected {SCHEMA}; prepare it anew")
        self.first_rows = self.manifest["first_rows"]  # of each shard, then the number of rows
        try:
            with safe_open(self.folder / INDEX, framework="pt") as index:
                self.index = {name: index.get_tensor(name) for name in index.keys()}
            self.codec = Codec.load(self.folder / CODEC) if (self.folder / CODEC).exists() else None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cache: {INDEX} or {CODEC} of {folder} cannot be read ({error}); move it away") from None
        self.reads_last = False  # whether rows come with `last_TD`
        self.shard = functools.lru_cache(OPEN_SHARDS)(self._open)

    def __len__(self) -> int:
        return self.first_rows[-1]

    def row_id(self, index: int) -> str:
        start, end = self.index["id_ends"][index : index + 2].tolist()
        return bytes(self.index["id_bytes"][start:end].tolist()).decode()

    def heldout(self, share: float) -> torch.Tensor:
        """bool [rows]: by a hash of the prompt, the same whatever the order or size of the data."""
        return self.index["split_key"] < int(share * 2**48)

    def _open(self, number: int):
        try:
            shard = safe_open(shard_path(self.folder, number), framework="pt")
            return shard, shard.get_tensor("offsets").tolist()
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"cache: shard {number} of {self.folder} cannot be read ({error}); run data_prep/run.py stage=audit"
            ) from None

    def rows_of(self, number: int) -> list[Row]:
        """All rows of a shard, without features."""
        return [self.row(i, features=False) for i in range(*self.first_rows[number : number + 2])]

    def row(self, index: int, features: bool = True) -> Row:
        """Row `index`, with what its codec gives [tokens, R] unless told otherwise."""
        number = bisect.bisect_right(self.first_rows, index) - 1
        shard, offsets = self.shard(number)
        at = index - self.first_rows[number]
        start, end = offsets[at], offsets[at + 1]
        read = {name: shard.get_slice(name)[start:end] for name in ("input_ids", "loss_mask")}
        taps_TF = self.codec.decode(shard.get_slice("features")[start:end]) if features else None
        last_TD = shard.get_slice("last")[start:end] if features and self.reads_last else None
        return Row(index, self.row_id(index), read["input_ids"].long(), read["loss_mask"].bool(), taps_TF, last_TD)

    def require(self, recipe: dict) -> None:
        """Raise ValueError, one line for the first field, where the store was not made by this recipe."""
        found = self.manifest["recipe"]
        for name in sorted({*recipe, *found}):
            if recipe.get(name) != found.get(name):
                raise ValueError(
                    f"cache: {self.folder} was made with {name}={found.get(name)}, expected {recipe.get(name)};"
                    " move it away, and it is made anew"
                )


class Online(Store):
    """Encoded rows whose features are computed at every use; nothing of them is stored. run: see `cache.capture`."""

    def __init__(self, folder: Path, run):
        super().__init__(folder)
        self.run, self.codec, self.lock = run, Codec(torch.float32), threading.Lock()

    def row(self, index: int, features: bool = True) -> Row:
        row = super().row(index, features=False)
        if features:
            with self.lock:  # the reading thread and a measure may ask at once, and the target's hooks serve one
                row.features_TF, *last = self.run([row.ids_T.tolist()])[0]
            row.last_TD = last[0] if self.reads_last else None
        return row
