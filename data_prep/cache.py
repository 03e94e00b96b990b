"""The cache: the store of a target's features plus the recipe that determines it, named by the recipe's hash.

Capture runs the target over the encoded rows, shard by shard. A shard that is there is whole (see `store`), so a
restarted run goes on with the first one that is missing.
"""

import shutil
from pathlib import Path

import torch
from tqdm import tqdm

from data_prep.config import CacheConfig
from data_prep.files import write_json
from data_prep.store import Store, shard_path, write_shard
from dflash.target import features


def shard_bounds(lengths: list[int], shard_tokens: int) -> list[int]:
    """First row of each shard, then the number of rows: a shard closes once it holds `shard_tokens` tokens."""
    bounds, held = [0], 0
    for row, length in enumerate(lengths):
        if held >= shard_tokens:
            bounds.append(row)
            held = 0
        held += length
    return [*bounds, len(lengths)]


def length_batches(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Rows in batches of similar length: the longest times the count stays within `batch_tokens`, or one row alone."""
    batches = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or lengths[batches[-1][0]] * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def capture(rows: Store, folder: Path, recipe: dict, config: CacheConfig, load_target, taps: list[int]) -> Store:
    """Write the features of all encoded rows into `folder`; return the store. load_target() -> the target.

    recipe: what determines the content; it becomes part of the manifest. Raises OSError when the disk is too small.
    """
    if (folder / "manifest.json").exists():
        return Store(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for part in folder.glob("*.part*"):
        part.unlink()
    encoded = [rows.row(i, features=False) for i in range(len(rows))]
    lengths = [len(row.ids_T) for row in encoded]
    bounds = shard_bounds(lengths, config.shard_tokens)
    missing = [n for n in range(len(bounds) - 1) if not shard_path(folder, n).exists()]
    refuse_small_disk(folder, sum(sum(lengths[bounds[n] : bounds[n + 1]]) for n in missing) * recipe["bytes_per_token"])
    if len(missing) < len(bounds) - 1:
        print(f"capture: {len(bounds) - 1 - len(missing)} of {len(bounds) - 1} shards are there, going on", flush=True)
    target = load_target() if missing else None
    total = sum(lengths[row] for n in missing for row in range(bounds[n], bounds[n + 1]))
    with tqdm(total=total, desc="capture", unit="token", unit_scale=True) as bar:
        for number in missing:
            part = encoded[bounds[number] : bounds[number + 1]]
            taken = [None] * len(part)
            for batch in length_batches([len(row.ids_T) for row in part], config.batch_tokens):
                states = features(target, [part[i].ids_T.tolist() for i in batch], taps)
                for i, states_TF in zip(batch, states):
                    taken[i] = states_TF.cpu()
                bar.update(sum(len(states_TF) for states_TF in states))
            features_TF = torch.cat(taken)
            if not features_TF.isfinite().all():
                raise ValueError(f"capture: shard {number} has states that are not finite; is the target sound?")
            ids = [row.ids_T.tolist() for row in part]
            write_shard(shard_path(folder, number), ids, [row.loss_mask_T.tolist() for row in part], features_TF)
    shutil.copy(rows.folder / "row_ids.json", folder / "row_ids.json")
    write_json(folder / "manifest.json", {**recipe, "first_rows": bounds, "tokens": sum(lengths)})
    return Store(folder)


def refuse_small_disk(folder: Path, num_bytes: int) -> None:
    """Raise OSError where the disk does not hold `num_bytes` and a tenth more."""
    free = shutil.disk_usage(folder).free
    if num_bytes * 1.1 > free:
        raise OSError(
            f"cache.dir: {num_bytes / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free at {folder}; make room, name another"
            " cache.dir, or lower data.limit"
        )
