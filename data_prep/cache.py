"""The cache: the store of a target's features plus the recipe that determines it, named by the recipe's hash.

Capture runs the target over the encoded rows, shard by shard. Any number of processes, on any nodes that share the file
system, claim shards; they may come, leave or die. A claim only spares work: what a shard holds depends on the rows and
the recipe alone, shards are renamed into place whole, and one that is written twice is the same.

    shard-00007.claim@HOST@PID    somebody works on it; void when the process is dead or long silent
    shard-00007.safetensors       written, flushed, renamed
    shard-00007.json              its size and checksum: now it counts
    manifest.json                 written last, with all records
"""

import contextlib
import ctypes
import os
import shutil
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from tqdm import tqdm

from data_prep.codec import Codec, fit_codec
from data_prep.config import CacheConfig, CodecKind
from data_prep.files import (
    file_digest,
    flush,
    is_abandoned,
    part_path,
    read_json,
    remove_abandoned,
    write_json,
)
from data_prep.store import CODEC, INDEX, MANIFEST, SCHEMA, Row, Store, shard_path, write_shard


def length_batches(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Rows in batches of similar length: the longest times the count stays within `batch_tokens`, or one row alone."""
    batches = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or lengths[batches[-1][0]] * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def run_batches(run, ids: list[list[int]], batch_tokens: int):
    """Yield (rows of a batch, their tuples of tensors [T, ...]) over all rows, length by length, so not in order.

    run(rows of ids) -> one tuple a row.
    """
    for batch in length_batches(list(map(len, ids)), batch_tokens):
        yield batch, run([ids[i] for i in batch])


def ids_of(rows: Iterable[Row]) -> list[list[int]]:
    return [row.ids_T.tolist() for row in rows]


def end_to_end(lengths: Iterable[int], batches) -> tuple[torch.Tensor, ...]:
    """The tensors [tokens, ...] of all rows in order, filled batch by batch; batches: as of `run_batches`."""
    starts, whole = [0, *accumulate(lengths)], None
    for batch, rows in batches:
        for i, tensors in zip(batch, rows, strict=True):
            whole = whole or tuple(tensor.new_empty(starts[-1], *tensor.shape[1:]) for tensor in tensors)
            for kept, tensor in zip(whole, tensors):
                kept[starts[i] : starts[i + 1]] = tensor
    return whole


@contextlib.contextmanager
def fixed_threads(count: int):
    """A fixed number of CPU threads: the order of sums, and so the bytes, depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Claims:
    """Who works on which shard of a folder."""

    def __init__(self, folder: Path):
        self.folder, self.mine = folder, None

    def take(self, todo: list[int]) -> int | None:
        """Claim the first shard of `todo` that is neither recorded nor held by a living process."""
        names = os.listdir(self.folder)
        held = {name.split(".claim@")[0] for name in names if ".claim@" in name and self._lives(name)}
        for number in todo:
            path = shard_path(self.folder, number)
            if path.stem in held or path.with_suffix(".json").name in names:
                continue
            self.mine = self.folder / f"{path.stem}.claim@{socket.gethostname()}@{os.getpid()}"
            self.mine.touch()
            first = min(self.folder.glob(f"{path.stem}.claim@*"), key=lambda claim: claim.name, default=self.mine)
            if first == self.mine and not path.with_suffix(".json").exists():  # else another was faster, or has it done
                return number
            self.mine.unlink()
        return None

    def release(self) -> None:
        """Let go of all shards of this process."""
        for path in self.folder.glob(f"*.claim@{socket.gethostname()}@{os.getpid()}"):
            path.unlink(missing_ok=True)

    def _lives(self, name: str) -> bool:
        path = self.folder / name
        if is_abandoned(path):
            path.unlink(missing_ok=True)
            return False
        return True


def records(folder: Path, num_shards: int) -> dict[int, dict]:
    """Size and checksum of the shards that count: recorded, and there with that size."""
    paths, found = [shard_path(folder, number) for number in range(num_shards)], {}
    for number, path in enumerate(paths):
        with contextlib.suppress(FileNotFoundError):
            found[number] = read_json(path.with_suffix(".json"))
    if (folder / MANIFEST).exists():  # looked at last: who writes it removes the single records behind it
        found = dict(enumerate(read_json(folder / MANIFEST)["shards"])) | found
    there = lambda path, record: path.exists() and path.stat().st_size == record["bytes"]  # noqa: E731
    return {number: record for number, record in found.items() if there(paths[number], record)}


def capture(rows: Store, folder: Path, recipe: dict, name: str, config: CacheConfig, start) -> Store:
    """Write the features of all encoded rows into `folder`; return the store.

    recipe: what determines the content; name: its hash. start() -> a context manager of run, which gives for rows of
    ids their tuples of (features [T, F],) or (features, last state [T, D]); entered only where a shard is missing.
    Raises OSError when the disk is too small, ValueError for states that no sound target gives.
    """
    num_shards = len(rows.first_rows) - 1
    if (folder / MANIFEST).exists():
        copy_index(rows, folder)  # where it was lost or damaged
        Store(folder).require(recipe)
        if len(records(folder, num_shards)) == num_shards:
            tidy(folder)
            return Store(folder)
    folder.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder)
    done = set(records(folder, num_shards))
    remove_void_records(folder, set(range(num_shards)) - done)
    tokens = [int(rows.index["length"][a:b].sum()) for a, b in pairwise(rows.first_rows)]
    left = sum(count for number, count in enumerate(tokens) if number not in done)
    refuse_small_disk(folder, left * recipe["bytes_per_token"])
    if done:
        print(f"capture: {len(done)} of {num_shards} shards are there, going on", flush=True)
    claims, run, codec, pending = Claims(folder), None, None, None
    with (
        contextlib.ExitStack() as stack, fixed_threads(config.threads), ThreadPoolExecutor(1) as writer,
        tqdm(total=left, desc="capture", unit="token", unit_scale=True) as bar,
    ):  # fmt: skip
        stack.callback(claims.release)
        while len(done) < num_shards:
            if (folder / MANIFEST).exists():  # written meanwhile: the single records are gone
                done |= set(records(folder, num_shards))
            number = claims.take([n for n in range(num_shards) if n not in done])
            if number is None:  # the others are at work
                if pending is not None:
                    pending.result()
                if (now := set(records(folder, num_shards))) <= done:
                    time.sleep(0.5)
                done = now
                continue
            if run is None:
                run = stack.enter_context(start())
                codec = the_codec(rows, folder, config, run)
            part, claim = rows.rows_of(number), claims.mine
            batches = run_batches(run, ids := ids_of(part), config.batch_tokens)
            packed = check_and_pack(codec, recipe["taps"], number, claim, bar, batches)
            tensors = end_to_end(map(len, ids), packed)
            if pending is not None:
                pending.result()
            pending = writer.submit(_finish, folder, number, claim, part, name, *tensors)
            done.add(number)
        if pending is not None:
            pending.result()
    complete(rows, folder, recipe)
    return Store(folder)


def trim_memory() -> None:
    """Let glibc return what it keeps: batches of ever new shapes leave holes in its heap, which grow with the data."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def check_and_pack(codec: Codec, taps: list[int], number: int, claim: Path, bar, batches):
    """Yield the batches of shard `number` as they are stored, packed on the target's device; also a sign of life."""
    for batch, states in batches:
        refuse_unsound(torch.cat([features_TF for features_TF, *_ in states]), taps, number)
        claim.touch()
        bar.update(sum(len(features_TF) for features_TF, *_ in states))
        yield batch, [(codec.encode(x).cpu(), *(y.to(torch.bfloat16).cpu() for y in last)) for x, *last in states]
        del states
        trim_memory()


def remove_void_records(folder: Path, numbers: set[int]) -> None:
    """Remove records whose shard is not there; each is looked at again, as it may just have come."""
    for path in (shard_path(folder, number) for number in numbers):
        with contextlib.suppress(FileNotFoundError):
            if not path.exists() or path.stat().st_size != read_json(path.with_suffix(".json"))["bytes"]:
                path.with_suffix(".json").unlink()


def _finish(folder: Path, number: int, claim: Path, part: list[Row], name: str, features_TR, last_TD=None) -> None:
    """Write a shard and its record, then let go of it."""
    path, ids, masks = shard_path(folder, number), ids_of(part), [r.loss_mask_T for r in part]
    record = write_shard(path, part[0].index, ids, [m.tolist() for m in masks], features_TR, name, last_TD)
    write_json(path.with_suffix(".json"), record)
    claim.unlink(missing_ok=True)


def copy_index(rows: Store, folder: Path) -> None:
    """The rows' index beside the shards, unless it is there; whole at any moment, as others may read it."""
    if not (folder / INDEX).exists() or file_digest(folder / INDEX) != file_digest(rows.folder / INDEX):
        part = part_path(folder / INDEX)
        shutil.copy(rows.folder / INDEX, part)
        flush(part)
        part.rename(folder / INDEX)


def complete(rows: Store, folder: Path, recipe: dict) -> None:
    """Write the manifest over all recorded shards; what stood for them while they came is removed."""
    num_shards = len(rows.first_rows) - 1
    done = records(folder, num_shards)
    copy_index(rows, folder)
    codec = Codec.load(folder / CODEC)
    manifest = {name: rows.manifest[name] for name in ("first_rows", "longest", "report", "tokens")}
    manifest |= {"schema": SCHEMA, "recipe": recipe, "shards": [done[n] for n in range(num_shards)]}
    manifest |= {"files": {file: file_digest(folder / file) for file in (INDEX, CODEC)}}
    write_json(folder / MANIFEST, manifest | {"codec_error": codec.error})
    tidy(folder)
    how = f"{recipe['codec']}, {codec.error:.2%} of the energy lost" if codec.scale_R is not None else recipe["codec"]
    print(f"capture: {manifest['tokens']} tokens of {recipe['bytes_per_token']} bytes ({how}) in {folder}", flush=True)


def tidy(folder: Path) -> None:
    """Remove what stood for the manifest while it was not there."""
    for record in folder.glob("shard-*.json"):
        record.unlink(missing_ok=True)
    remove_abandoned(folder)


def the_codec(rows: Store, folder: Path, config: CacheConfig, run) -> Codec:
    """The folder's codec; fitted by the first worker, on rows spread evenly over the data."""
    if not (folder / CODEC).exists():
        step, sample_TF = max(1, round(rows.manifest["tokens"] / config.fit_tokens)), None
        if config.codec != CodecKind.bf16:
            ids = ids_of(rows.row(i, features=False) for i in range(0, len(rows), step))
            batches = run_batches(run, ids, config.batch_tokens)
            features = ((batch, [(x.cpu(),) for x, *_ in states]) for batch, states in batches)
            (sample_TF,) = end_to_end(map(len, ids), features)
        fit_codec(config, sample_TF).save(folder / CODEC)
    return Codec.load(folder / CODEC)


def refuse_unsound(features_TF: torch.Tensor, taps: list[int], shard: int) -> None:
    """Raise ValueError where a tap is not finite, all zero, or the same for all tokens (vLLM #46301)."""
    for tap, states_TD in zip(taps, features_TF.chunk(len(taps), dim=-1)):
        broken = {
            "not finite": not bool(states_TD.isfinite().all()),
            "all zero": not bool(states_TD.any()),
            "the same for all tokens": len(states_TD) > 1 and bool((states_TD == states_TD[:1]).all()),
        }
        if what := [name for name, is_so in broken.items() if is_so]:
            raise ValueError(f"capture: shard {shard}, tap {tap}: states are {what[0]}; is the target sound?")


def refuse_small_disk(folder: Path, num_bytes: int) -> None:
    """Raise OSError where the disk does not hold `num_bytes` and a tenth more."""
    free = shutil.disk_usage(folder).free
    if num_bytes * 1.1 > free:
        raise OSError(
            f"cache.dir: {num_bytes / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free at {folder}; make room, name another"
            " cache.dir, a smaller cache.codec, or lower data.limit"
        )
