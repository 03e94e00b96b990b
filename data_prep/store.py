"""The store: shards of safetensors with the target's features, and their lazy reader.

A shard holds a contiguous range of rows, end to end and unpadded: `features` [tokens, F], `input_ids` int32 [tokens],
`loss_mask` uint8 [tokens], `offsets` int64 [rows + 1]. Few large tensors, whatever the number of rows (safetensors
caps its header at 100 MB). `manifest.json` tells what determines the content; row i of the data is row i of the store.
A shard is written under a temporary name, flushed and renamed, so that a shard that is there is whole.
"""

import bisect
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from data_prep.files import read_json


@dataclass
class Row:
    """One row as the trainer gets it."""

    index: int  # in the store, and in the data
    id: str
    ids_T: torch.Tensor  # int64
    loss_mask_T: torch.Tensor  # bool
    features_TF: torch.Tensor | None


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def write_shard(path: Path, ids: list, loss_masks: list, features_TF: torch.Tensor | None = None) -> None:
    """Write one shard: per-row id and mask lists, and the features of all its tokens (None for ids alone)."""
    lengths = torch.tensor([0, *map(len, ids)])
    tensors = {
        "input_ids": torch.tensor([token for row in ids for token in row], dtype=torch.int32),
        "loss_mask": torch.tensor([flag for row in loss_masks for flag in row], dtype=torch.uint8),
        "offsets": lengths.cumsum(0),
    }
    if features_TF is not None:
        assert len(features_TF) == len(tensors["input_ids"])
        tensors["features"] = features_TF
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    save_file(tensors, part)
    with part.open("rb") as written:
        os.fsync(written.fileno())
    part.rename(path)


class Store:
    """Lazy reader: maps shards, reads the rows that are asked for.

    Raises ValueError where the folder has no complete manifest or a shard is missing.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        if not (self.folder / "manifest.json").exists():
            raise ValueError(f"cache: {folder} is not complete, expected a manifest.json; run the stage that writes it")
        self.manifest = read_json(self.folder / "manifest.json")
        self.row_ids = read_json(self.folder / "row_ids.json")
        self.first_rows = self.manifest["first_rows"]  # of each shard, then the number of rows
        self.open_shards = {}

    def __len__(self) -> int:
        return self.first_rows[-1]

    def _shard(self, number: int):
        if number not in self.open_shards:
            shard = safe_open(shard_path(self.folder, number), framework="pt")
            self.open_shards[number] = shard, shard.get_tensor("offsets").tolist()
        return self.open_shards[number]

    def _span(self, index: int):
        number = bisect.bisect_right(self.first_rows, index) - 1
        shard, offsets = self._shard(number)
        local = index - self.first_rows[number]
        return shard, offsets[local], offsets[local + 1]

    def row(self, index: int, features: bool = True) -> Row:
        """Row `index`, with its features [tokens, F] unless told otherwise."""
        shard, start, end = self._span(index)
        read = {name: shard.get_slice(name)[start:end] for name in ("input_ids", "loss_mask")}
        taps_TF = shard.get_slice("features")[start:end] if features else None
        return Row(index, self.row_ids[index], read["input_ids"].long(), read["loss_mask"].bool(), taps_TF)
