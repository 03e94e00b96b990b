"""Is a cache what it says? The cheap part before every training, all of it by `stage=audit`."""

import random

import torch
from safetensors import safe_open

from data_prep.config import CodecKind
from data_prep.files import file_digest
from data_prep.store import CODEC, INDEX, MANIFEST, Store, shard_path

# Relative error of a row that is computed again, in another batch: rounding of bf16, and of int8 on top of it.
TOLERANCE = {CodecKind.bf16: 0.03, CodecKind.int8: 0.1, CodecKind.lowrank: 0.1}


def check_shard(store: Store, number: int, name: str, deep: bool) -> str | None:
    """What is wrong with a shard, or None. name: the recipe's hash. deep: read all of it."""
    path, record = shard_path(store.folder, number), store.manifest["shards"][number]
    if not path.exists():
        return "missing"
    if (size := path.stat().st_size) != record["bytes"]:
        return f"{size} bytes found, {record['bytes']} expected"
    if deep and (found := file_digest(path)) != record["sha256"]:
        return f"sha256 {found[:12]} found, {record['sha256'][:12]} expected"
    first, last = store.first_rows[number : number + 2]
    try:
        with safe_open(path, framework="pt") as shard:
            about = shard.metadata()["meta"]
            if f'"first_row": {first},' not in about:
                return f"header {about} found, first_row {first} expected: it is another shard"
            if f'"recipe": "{name}"' not in about:
                return f"header {about} found, recipe {name} expected: it is of another cache"
            num_tokens = int(store.index["length"][first:last].sum())
            rows, tokens = (shard.get_slice(n).get_shape()[0] for n in ("offsets", "features"))
            if (rows, tokens) != (last - first + 1, num_tokens):
                return f"{rows - 1} rows and {tokens} tokens found, {last - first} and {num_tokens} expected"
            if deep:
                values = store.codec.decode(shard.get_tensor("features"))
                if not values.isfinite().all():
                    return "features that are not finite"
                if not values.any() or (len(values) > 1 and (values == values[:1]).all()):
                    return "features that are the same for all tokens"
    except Exception as error:  # a flipped bit of the header can be anything
        return f"it cannot be read ({type(error).__name__}: {error})"
    return None


def check_cache(store: Store, recipe: dict, name: str, deep: bool = False) -> None:
    """Raise ValueError, one line a fault, where the cache is not what its manifest and the recipe say.

    deep: read every byte, and put damaged shards aside, so that the next capture makes them anew and keeps the rest.
    """
    store.require(recipe)
    faults = []
    for file in (INDEX, CODEC):
        if (record := store.manifest["files"][file]) != file_digest(store.folder / file):
            more = "" if file == INDEX else " (all shards depend on it: move the folder away)"
            faults.append(f"{file}: its sha256 is not {record[:12]}, as in {MANIFEST}{more}")
            if deep and file == INDEX:
                (store.folder / file).rename(store.folder / f"{file}.damaged")
    for number in range(len(store.first_rows) - 1):
        if fault := check_shard(store, number, name, deep):
            faults.append(f"shard {number}: {fault}")
            path = shard_path(store.folder, number)
            if deep and path.exists():
                path.rename(path.with_suffix(".damaged"))
    if faults:
        what = "put aside; run stage=capture to make them anew" if deep else "run data_prep/run.py stage=audit"
        raise ValueError(f"cache: {store.folder}: {'; '.join(faults)}: {what}")


@torch.no_grad()
def check_rows(store: Store, run, codec: CodecKind, count: int, seed: int = 0) -> float:
    """Run random rows through the target again; returns the largest relative error. Raises ValueError above tolerance.

    run: see `cache.capture`.
    """
    worst = 0.0
    for index in random.Random(seed).sample(range(len(store)), min(count, len(store))):
        row = store.row(index)
        fresh_TR = store.codec.decode(store.codec.encode(run([row.ids_T.tolist()])[0][0]).cpu()).float()
        error = float((row.features_TF.float() - fresh_TR).norm() / fresh_TR.norm())
        worst = max(worst, error)
        if not error <= TOLERANCE[codec]:
            raise ValueError(
                f"cache: {store.folder}, row {store.row_id(index)}: features differ by {error:.3f} of their norm from"
                f" those of the target, at most {TOLERANCE[codec]} expected; is it the target of the capture?"
            )
    return worst
