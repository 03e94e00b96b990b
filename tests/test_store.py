"""The store gives back what was written, the capture writes what the target computes whoever takes part in it, damage
is named, and a folder's name changes with everything that determines its content. References: the lists that were
written, one row at a time through Transformers with output_hidden_states, the codecs written again in numpy, and the
bytes of a run that was not disturbed.
"""

import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import run_helpers as helpers
import torch
from safetensors import safe_open
from tqdm import tqdm

from data_prep import cache, prepare
from data_prep.audit import check_cache, check_rows
from data_prep.cache import Claims, capture, end_to_end, length_batches, run_batches
from data_prep.codec import Codec, bytes_per_token, fit_codec
from data_prep.config import CacheConfig, CodecKind
from data_prep.encode import EncodedRow
from data_prep.files import STALE_SECONDS, digest, file_digest, read_json, write_json
from data_prep.prepare import Preparation
from data_prep.run import PrepConfig, main, run_main
from data_prep.store import CODEC, INDEX, MANIFEST, SCHEMA, Online, Store, shard_path, write_rows, write_shard
from dflash.model import DFlashDraftModel
from dflash.objective import block_loss
from dflash.target import features
from train.data import Steps
from train.trainer import read_through

TAPS = [0, 2, 4]
WIDTH = 3 * 128  # features
LENGTHS = (2, 31, 7, 90, 2, 55, 14, 14, 128, 3, 61, 40)


@pytest.mark.parametrize("num_rows", [1, 7, 32])
@pytest.mark.parametrize("shard_tokens", [1, 100, 10**9])
def test_rows_come_back_as_they_were_written(tmp_path, num_rows, shard_tokens):
    rng, generator = random.Random(num_rows), torch.Generator().manual_seed(1)
    lengths = [2, *(rng.randint(2, 40) for _ in range(num_rows - 1))]
    ids = [[rng.randrange(2**17) for _ in range(n)] for n in lengths]  # beyond 16 bits
    masks = [[rng.randrange(2) for _ in range(n)] for n in lengths]
    keys = [rng.randrange(2**48) for _ in lengths]
    values = [torch.randn(n, 6, generator=generator).bfloat16() for n in lengths]
    rows = [EncodedRow(f"é{i}/x", i % 3, *rest) for i, rest in enumerate(zip(ids, masks, keys))]
    about = write_rows(tmp_path, rows, shard_tokens)
    bounds = about["first_rows"]
    assert bounds[0] == 0 and bounds[-1] == num_rows and bounds == sorted(set(bounds))
    held = [lengths[a:b] for a, b in pairwise(bounds)]  # a shard closes with the row that fills it
    assert all(sum(part) >= shard_tokens for part in held[:-1]) and all(sum(p[:-1]) < shard_tokens for p in held)
    assert (about["longest"], about["tokens"]) == (max(lengths), sum(lengths))
    for number, (first, last) in enumerate(pairwise(bounds)):
        record = about["shards"][number]
        path = shard_path(tmp_path, number)
        assert record == {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        write_shard(path, first, ids[first:last], masks[first:last], torch.cat(values[first:last]))
    Codec(torch.bfloat16).save(tmp_path / CODEC)
    write_json(tmp_path / MANIFEST, {"schema": SCHEMA, **about})
    assert not list(tmp_path.glob("*.part*"))
    store = Store(tmp_path)
    assert len(store) == num_rows and store.index["length"].tolist() == lengths
    assert store.index["source"].tolist() == [i % 3 for i in range(num_rows)]
    assert store.index["eligible"].tolist() == [sum(a and b for a, b in pairwise(mask)) for mask in masks]
    assert store.index["seen"].nonzero()[:, 0].tolist() == sorted({token for row in ids for token in row})
    for share in (0.02, 0.5):
        assert store.heldout(share).tolist() == [key < int(share * 2**48) for key in keys]
    for i in rng.sample(range(num_rows), num_rows):
        row = store.row(i)
        assert (row.index, row.id) == (i, f"é{i}/x") and row.ids_T.tolist() == ids[i]
        assert row.loss_mask_T.dtype == torch.bool and row.loss_mask_T.int().tolist() == masks[i]
        assert row.ids_T.dtype == torch.int64 and torch.equal(row.features_TF, values[i])
        assert store.row(i, features=False).features_TF is None
    assert [row.id for row in store.rows_of(0)] == [f"é{i}/x" for i in range(bounds[1])]


MANY = """
import sys, time
import torch
from data_prep.files import write_json
from data_prep.store import INDEX, MANIFEST, SCHEMA, Path, Store, write_tensors
folder, rows = Path(sys.argv[1]), 10**6
names = b"".join(b"conversation-%07d" % i for i in range(rows))
tensors = {name: torch.full((rows,), 400, dtype=torch.int32) for name in ("length", "eligible")}
tensors |= {"source": torch.zeros(rows, dtype=torch.int16), "split_key": torch.arange(rows) * 2**28}
tensors |= {"id_bytes": torch.frombuffer(bytearray(names), dtype=torch.uint8), "id_ends": torch.arange(rows + 1) * 20}
write_tensors(folder / INDEX, tensors | {"seen": torch.ones(150_000, dtype=torch.uint8)}, {})
first = [*range(0, rows, 65), rows]  # 32768 tokens a shard
shards = [{"bytes": 33_554_432, "sha256": "0" * 64}] * (len(first) - 1)
manifest = {"schema": SCHEMA, "first_rows": first, "shards": shards, "longest": 400, "tokens": 400 * rows}
write_json(folder / MANIFEST, manifest | {"recipe": {}, "report": {}})
"""
OPENS = """
import sys, time
import torch
from data_prep.store import Path, Store
memory = lambda: int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) / 1024
before, start = memory(), time.perf_counter()
store = Store(Path(sys.argv[1]))
seconds = time.perf_counter() - start
assert (len(store), store.row_id(10**6 - 1), int(store.heldout(0.02).sum())) == (10**6, "conversation-0999999", 20972)
print(seconds, memory() - before)
"""


def test_a_million_rows_open_at_once(tmp_path):
    """In a process of its own: seconds, and MiB of memory that no file backs."""
    for script in (MANY, OPENS):
        done = helpers.run("-c", script, tmp_path, env=helpers.environment(PYTHONPATH=str(helpers.ROOT)))
        assert done.returncode == 0, done.stderr
    seconds, mebibytes = map(float, done.stdout.split())
    assert seconds < 1 and mebibytes < 200


# Capture: what is written.


@pytest.fixture(scope="module")
def rows():
    """Twelve rows of random bytes in five shards, one of them twice as long as the small batches below allow."""
    return helpers.make_store(helpers.folder() / "rows", [[0] + [1] * (n - 1) for n in LENGTHS], shard_tokens=60)


def one_by_one(rows, dtype=torch.float32, pad_to=1):
    """Each row alone through Transformers: hidden_states[i + 1] is the output of layer i. pad_to: in bf16, the shape of
    a batch decides about last bits."""
    found = []
    for i in range(len(rows)):
        ids = rows.row(i, features=False).ids_T
        padded = torch.nn.functional.pad(ids, (0, -len(ids) % pad_to))[None]
        states = helpers.target(dtype)(input_ids=padded, output_hidden_states=True).hidden_states
        found.append(torch.cat([states[tap + 1][0, : len(ids)] for tap in TAPS], dim=-1).detach())
    return found


@pytest.fixture(scope="module")
def alone(rows):
    return one_by_one(rows)


def runs(change=lambda states: states, dtype=torch.float32, last=False):
    """`start` of a capture: the target's features; `change` may alter or refuse each batch's."""

    @contextlib.contextmanager
    def start():
        yield lambda ids: change(features(helpers.target(dtype), ids, TAPS, last))

    return start


def not_again():
    pytest.fail("loaded the target again")


def run_capture(rows, folder, start=None, about=(), **changes):
    config = CacheConfig(**{"dtype": "float32", "threads": 1, **changes})
    recipe = {
        "taps": TAPS,
        "bytes_per_token": bytes_per_token(config, WIDTH),
        "codec": config.codec.value,
        **dict(about),
    }
    return capture(rows, folder, recipe, digest(recipe), config, start or runs())


def check(store, recipe=None, deep=True):
    recipe = recipe or store.manifest["recipe"]
    check_cache(store, recipe, digest(recipe), deep)


def fork(job):
    """A process that starts as a copy of this one, but shares no thread and no lock with it or its other copies."""

    def run():
        os.setpgrp()
        torch.set_num_threads(1)
        tqdm.set_lock(threading.RLock())  # else a semaphore of all copies, held for good by one that is killed
        job()

    return multiprocessing.get_context("fork").Process(target=run)


def in_processes(*jobs, timeout=120):
    """Run the jobs in forks of this process, at once; none outlives the call."""
    forks = [fork(job) for job in jobs]
    try:
        for process in forks:
            process.start()
        for process in forks:
            process.join(timeout)
        assert [process.exitcode for process in forks] == [0] * len(forks)
    finally:
        for process in forks:
            process.kill()


def check_grid(folder, num_rows, rows_a_batch, workers, longest=48):
    """Rows in are rows out, and each row is that of the fp32 reference."""
    rng = random.Random(7)
    lengths = [(2, longest)[i] if i < 2 else rng.randint(2, longest) for i in range(num_rows)]
    rows = helpers.make_store(folder / "rows", [[0] + [1] * (n - 1) for n in lengths], shard_tokens=200)
    job = lambda: run_capture(rows, folder / "features", batch_tokens=rows_a_batch * longest)  # noqa: E731
    in_processes(*[job] * workers)
    store = Store(folder / "features")
    check(store)
    assert len(store) == num_rows
    for i, expected in enumerate(one_by_one(rows)):
        row, source = store.row(i), rows.row(i, features=False)
        assert row.id == f"row-{i}" and torch.equal(row.ids_T, source.ids_T)
        assert torch.equal(row.loss_mask_T, source.loss_mask_T)
        assert row.features_TF.dtype == torch.float32 and row.features_TF.shape == expected.shape
        assert float((row.features_TF - expected).abs().max()) < 1e-4


COVER = [(1, 1, 2), (7, 32, 1), (7, 8, 3), (10, 1, 3), (10, 8, 2), (32, 32, 3), (32, 1, 1), (257, 8, 1), (257, 32, 2)]


@pytest.mark.parametrize("num_rows, rows_a_batch, workers", COVER)
def test_captured_rows_equal_each_row_alone(tmp_path, num_rows, rows_a_batch, workers):
    """A covering set; tests/long has the whole grid."""
    check_grid(tmp_path, num_rows, rows_a_batch, workers)


@pytest.mark.parametrize("batch_tokens", [1, 64, 4096])
def test_rows_longer_than_a_batch_are_captured_too(rows, alone, tmp_path, batch_tokens):
    store = run_capture(rows, tmp_path / "features", batch_tokens=batch_tokens)
    assert max(float((store.row(i).features_TF - alone[i]).abs().max()) for i in range(len(rows))) < 1e-4


def test_batches_hold_every_row_once():
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.randint(2, 99) for _ in range(rng.randint(1, 40))]
        batches = length_batches(lengths, 120)
        assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        assert all(len(b) == 1 or max(lengths[i] for i in b) * len(b) <= 120 for b in batches)
        ids = [[i] * n for i, n in enumerate(lengths)]
        run = lambda some: [(torch.tensor(row), 2 * torch.tensor(row)) for row in some]  # noqa: E731
        once, twice = end_to_end(lengths, run_batches(run, ids, 120))
        assert once.tolist() == [i for row in ids for i in row] and twice.tolist() == [
            2 * i for row in ids for i in row
        ]


def test_last_states_are_those_behind_the_final_norm(rows, tmp_path):
    store = run_capture(rows, tmp_path / "features", runs(last=True), last=True)
    with safe_open(shard_path(store.folder, 1), framework="pt") as shard:
        found = shard.get_tensor("last")
    for i in range(*store.first_rows[1:3]):
        ids = rows.row(i, features=False).ids_T[None]
        expected = helpers.target()(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
        mine, found = found[: len(expected)], found[len(expected) :]
        assert mine.dtype == torch.bfloat16 and torch.allclose(mine.float(), expected, rtol=0.01, atol=1e-3)
    assert not len(found)


@pytest.mark.parametrize("fault, words", [(float("nan"), "not finite"), (0.0, "all zero"), (1.0, "the same for all")])
def test_states_that_no_sound_target_gives_are_refused(rows, tmp_path, fault, words):
    def broken(states):
        for (features_TF,) in states:
            features_TF[0 if fault != fault else slice(None), 128:256] = fault
        return states

    with pytest.raises(ValueError, match=rf"^capture: shard 0, tap 2: states are {words}") as error:
        run_capture(rows, tmp_path / "features", runs(broken))
    assert "\n" not in str(error.value) and not list((tmp_path / "features").glob("*@*"))


# Codecs.


def made_up(num_tokens=1500, num_features=40, seed=0):
    """Features of very different sizes and means that lie near a few directions."""
    generator = np.random.default_rng(seed)
    mix = generator.normal(size=(num_features, num_features)) * 0.85 ** np.arange(num_features)
    x = generator.normal(size=(num_tokens, num_features)) @ mix.T + 2 * generator.normal(size=num_features)
    return torch.from_numpy(x * 10.0 ** generator.uniform(-2, 3, num_features)).float()


def fitted(x, codec, **changes):
    return fit_codec(CacheConfig(codec=codec, dtype="float32", **changes), x)


def balanced(x):
    """Tokens of one length, and the sizes of channels that this length is measured by; in numpy, float64."""
    x = x.double().numpy()
    size = np.ones(x.shape[1])
    for _ in range(4):
        size = np.sqrt(((x.T / np.sqrt(((x / size) ** 2).mean(axis=1))) ** 2).mean(axis=1))
    return (x.T / np.sqrt(((x / size) ** 2).mean(axis=1))).T, size


def reference_codec(x, rank):
    """P [F, R], what takes it back [R, F], and the energy lost, channels and tokens brought to one size; likewise."""
    x, size = balanced(x)
    values, vectors = np.linalg.eigh((x / size).T @ (x / size) / len(x))
    q = vectors[:, np.argsort(-values)[:rank]]
    return q / size[:, None], q.T * size, 1 - np.sort(values)[::-1][:rank].sum() / values.sum()


def test_bf16_is_exact(rows, tmp_path):
    """Each row in a batch of its own: the very bits of the target."""
    store = run_capture(rows, tmp_path / "f", runs(dtype=torch.bfloat16), dtype="bfloat16", batch_tokens=1)
    assert store.codec.rank is None and store.codec.error == 0
    for i, expected in enumerate(one_by_one(rows, torch.bfloat16, pad_to=16)):
        assert expected.dtype == torch.bfloat16 and torch.equal(store.row(i).features_TF, expected)


def test_int8_is_within_half_a_step(rows, alone, tmp_path):
    x = made_up()
    x[:, 3] = 0.0
    x[7, 3] = 100.0  # saturates: a channel that is silent elsewhere
    codec, (even, _) = fitted(x, CodecKind.int8), balanced(x)
    step = torch.from_numpy(np.minimum(np.abs(even).max(axis=0), 16 * np.sqrt((even**2).mean(axis=0))) / 127).float()
    even = torch.from_numpy(even)
    assert torch.allclose(codec.scale_R, step, rtol=1e-5) and codec.encode(x).dtype == torch.int8
    inside = even.abs() <= 127.001 * step
    error = (codec.decode(codec.encode(x)) - even).abs()
    assert bool((error <= step * 0.5001)[inside].all()) and (~inside).nonzero().tolist() == [[7, 3]]
    assert float(codec.decode(codec.encode(x))[7, 3]) == pytest.approx(float(127 * step[3]))
    store = run_capture(rows, tmp_path / "features", codec=CodecKind.int8)
    with safe_open(shard_path(store.folder, 0), framework="pt") as shard:
        assert shard.get_tensor("features").dtype == torch.int8
    expected = torch.from_numpy(balanced(torch.cat(alone))[0])
    found = torch.cat([store.row(i).features_TF for i in range(len(rows))])
    assert bool(((found - expected).abs() <= store.codec.scale_R * 0.501 + 1e-4).all())


@pytest.mark.parametrize("kind", [CodecKind.int8, CodecKind.lowrank])
def test_a_tokens_length_is_free_and_a_heavy_one_costs_the_others_nothing(kind):
    """As first tokens are: thousands of times the energy, in a few channels."""
    x = made_up()
    codec = fitted(x, kind)
    assert torch.equal(codec.encode(x * 1000.0), codec.encode(x))
    heavy = x.clone()
    heavy[::100, :2] *= 1000.0
    assert fitted(heavy, kind).error < 2 * codec.error + 1e-5


def test_lowrank_of_full_rank_loses_only_the_rounding():
    x = made_up()
    codec = fitted(x, CodecKind.lowrank, rank=x.shape[1])
    x = torch.from_numpy(balanced(x)[0]).float()
    z = x.double() @ codec.map_FR.double()
    assert float((z @ codec.lift_FR.double().T - x).abs().max() / x.abs().max()) < 1e-5
    bound = (codec.lift_FR.abs() * codec.scale_R).sum(dim=1) * 0.51 + 1e-5 * x.abs().amax(dim=0)
    assert bool(((codec.lift(codec.decode(codec.encode(x))) - x).abs() <= bound).all()) and 0 < codec.error < 1e-3


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_lowrank_is_the_leading_part_of_the_scaled_second_moments(rank):
    """Compared by what goes in and comes out again: signs, and turns within equal directions, do not show there."""
    x = made_up()
    codec = fitted(x, CodecKind.lowrank, rank=rank)
    map_FR, lift_RF, lost = reference_codec(x, rank)
    even, size = map(torch.from_numpy, balanced(x))
    x = even.float()
    expected = torch.from_numpy(x.double().numpy() @ map_FR @ lift_RF)
    found = x.double() @ codec.map_FR.double() @ codec.lift_FR.double().T
    assert codec.rank == rank and float(((found - expected) / size).abs().max()) < 1e-4
    assert lost <= codec.error <= lost + 1e-3 and lost > 0.01
    assert float(((codec.lift(codec.decode(codec.encode(x))) - x) / size).square().mean()) == pytest.approx(codec.error)


def test_a_low_rank_store_holds_the_packed_features(rows, alone, tmp_path):
    store = run_capture(rows, tmp_path / "features", codec=CodecKind.lowrank, rank=24)
    assert store.manifest["recipe"]["bytes_per_token"] == 24 and store.manifest["codec_error"] == store.codec.error
    x = torch.cat(alone)  # fewer tokens than cache.fit_tokens: fitted on all of them
    map_FR, lift_RF, _ = reference_codec(x, 24)
    expected = torch.from_numpy(balanced(x)[0] @ map_FR @ lift_RF)
    found = torch.cat([store.row(i).features_TF for i in range(len(rows))])
    assert found.shape == (len(x), 24)
    rounding = (store.codec.lift_FR.abs() * store.codec.scale_R).sum(dim=1) * 0.51
    assert bool(((store.codec.lift(found) - expected).abs() <= rounding + 1e-3).all())


def test_folded_weights_read_features_as_the_trained_ones_read_codes(chats):
    """`fc` on codes is the folded `fc` on features, for the map alone and through a whole drafter."""
    x = made_up(num_features=WIDTH, num_tokens=600)
    codec, full = (fitted(x, CodecKind.lowrank, rank=rank) for rank in (30, WIDTH))
    weight_DR, weight_DF = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    z = x.double() @ codec.map_FR.double()
    folded = codec.fold(weight_DR[:, :30])
    assert folded.shape == (16, WIDTH) and folded.dtype == weight_DR.dtype
    assert torch.allclose(x.double() @ folded.T, z @ weight_DR[:, :30].T, rtol=1e-9)
    size_F = x.square().mean(dim=0).sqrt()
    assert float(((full.fold(full.unfold(weight_DF)) - weight_DF) * size_F).abs().max() / size_F.max()) < 1e-5
    inside = x.double() @ codec.map_FR.double() @ codec.lift_FR.double().T  # all that the map keeps
    nearest = codec.fold(codec.unfold(weight_DF))
    assert torch.allclose(inside @ nearest.T, inside @ weight_DF.T, rtol=1e-3, atol=1e-4 * float(size_F.max()))
    drafter = fresh_drafter(chats)
    plain = drafter.fc.weight.detach().clone()
    read_through(drafter, codec)
    assert drafter.fc.weight.shape == (128, 30)
    embeds, positions = torch.randn(1, 8, 128, generator=torch.Generator().manual_seed(1)), torch.arange(28)[None]
    packed = drafter(embeds, (x @ codec.map_FR)[None, :20], positions)
    drafter.fc = torch.nn.Linear(WIDTH, 128, bias=False)
    drafter.fc.weight = torch.nn.Parameter(codec.fold(codec.unfold(plain)))
    assert torch.allclose(drafter(embeds, x[None, :20], positions), packed, atol=1e-4)


def test_codecs_without_a_map_leave_fc_alone():
    codec, weight = fitted(made_up(), CodecKind.int8), torch.randn(4, 40)
    assert torch.equal(codec.fold(weight), weight) and torch.equal(codec.unfold(weight), weight)


def test_the_first_workers_codec_stays(tmp_path):
    codecs = [fitted(made_up(seed=seed), CodecKind.lowrank, rank=4) for seed in (0, 1)]
    for codec in codecs:
        codec.save(tmp_path / CODEC)
        found = Codec.load(tmp_path / CODEC)
        assert all(
            torch.equal(getattr(found, n), getattr(codecs[0], n)) for n in ("size_F", "scale_R", "map_FR", "lift_FR")
        )
        assert (found.dtype, found.error) == (torch.float32, codecs[0].error)
    assert [path.name for path in tmp_path.iterdir()] == [CODEC]


def test_codecs_follow_the_features_to_their_device():
    """The codec is read on the CPU, the target's states lie on a GPU; played by torch's device without data."""
    codec = fitted(made_up(), CodecKind.lowrank, rank=4)
    assert codec.encode(torch.empty(3, 40, device="meta")).device.type == "meta"


# Workers, interruptions.


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def captured(rows):
    """The folder of one undisturbed worker, never changed."""
    return run_capture(rows, helpers.folder() / "features", batch_tokens=64).folder


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_folder_is_the_same_for_every_number_of_workers(rows, captured, tmp_path, workers):
    def slowly(states):
        (tmp_path / str(os.getpid())).touch()
        time.sleep(0.03)
        return states

    job = lambda: run_capture(rows, tmp_path / "features", runs(slowly), batch_tokens=64)  # noqa: E731
    in_processes(*[job] * workers)
    assert files(tmp_path / "features") == files(captured)
    assert len(list(tmp_path.iterdir())) == 1 + workers  # all of them worked


def test_claims_of_the_living_are_left_and_those_of_the_dead_are_void(tmp_path):
    claims, host = Claims(tmp_path), socket.gethostname()
    living = fork(lambda: time.sleep(60))
    living.start()
    try:
        held = tmp_path / f"shard-00000.claim@{host}@{living.pid}"
        held.touch()
        assert claims.take([0, 1, 2]) == 1 and claims.take([0, 1, 2]) == 2 and claims.take([0, 1]) is None
        claims.release()
        assert [path.name for path in tmp_path.iterdir()] == [held.name]
        os.utime(held, (time.time() - STALE_SECONDS - 5,) * 2)  # alive but silent for long
        assert claims.take([0, 1]) == 0 and not held.exists()
        claims.release()
        held.touch()
    finally:
        living.kill()
        living.join()
    assert claims.take([0]) == 0 and not held.exists()
    other = tmp_path / f"shard-00001.claim@elsewhere@{os.getpid()}"
    other.touch()
    assert claims.take([1]) is None
    os.utime(other, (time.time() - STALE_SECONDS - 5,) * 2)
    assert claims.take([1]) == 1 and not other.exists()
    write_json(tmp_path / "shard-00002.json", {"bytes": 1, "sha256": ""})
    assert claims.take([2]) is None  # recorded: done
    claims.release()
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00002.json"]


def test_a_worker_gives_signs_of_life(rows, tmp_path):
    ages = []

    def look(states):
        *_, claim = sorted((tmp_path / "features").glob("*.claim@*"))  # the writer may still hold the one before
        ages.append(time.time() - claim.stat().st_mtime)
        os.utime(claim, (time.time() - 100,) * 2)
        return states

    run_capture(rows, tmp_path / "features", runs(look), batch_tokens=64)
    assert len(ages) >= 9 and max(ages) < 60  # since the last batch, not since the claim


def test_a_shard_that_two_write_is_the_same(rows, captured, tmp_path):
    folder, calls = tmp_path / "features", []

    def taken_for_dead(states):
        calls.append(1)
        if len(calls) == 2:
            for claim in folder.glob("*.claim@*"):
                claim.unlink()
            in_processes(lambda: run_capture(rows, folder, batch_tokens=64))
        return states

    run_capture(rows, folder, runs(taken_for_dead), batch_tokens=64)
    assert files(folder) == files(captured) and len(calls) < 9  # what the other wrote was not computed again


def test_no_reader_sees_half_a_file_while_another_worker_ends(rows, captured, tmp_path):
    """The last workers end together: each may write the index and the manifest over those of the others."""
    folder = tmp_path / "features"
    shutil.copytree(captured, folder)
    recipe, expected = read_json(folder / MANIFEST)["recipe"], (captured / INDEX).read_bytes()
    stop = time.time() + 2

    def end_again():
        while time.time() < stop:
            cache.complete(rows, folder, recipe)

    def read():
        while time.time() < stop:
            assert (folder / INDEX).read_bytes() == expected
            check(Store(folder), deep=False)

    in_processes(end_again, read)


def test_resume_writes_only_what_is_missing_and_the_same_bytes(rows, captured, tmp_path, monkeypatch):
    folder, written = tmp_path / "features", []
    shutil.copytree(captured, folder)
    expected = files(folder)
    for number, record in enumerate(read_json(folder / MANIFEST)["shards"]):
        write_json(shard_path(folder, number).with_suffix(".json"), record)
    (folder / MANIFEST).unlink()
    shard_path(folder, 1).unlink()
    (folder / f"shard-00001.safetensors.part@{socket.gethostname()}@999999999").write_bytes(b"half")
    cut(shard_path(folder, 2))
    shard_path(folder, 3).with_suffix(".json").unlink()  # renamed, but its record did not come to be
    real = cache.write_shard
    monkeypatch.setattr(cache, "write_shard", lambda path, *rest: (written.append(path.name), real(path, *rest))[1])
    monkeypatch.setattr(cache.time, "sleep", lambda _: pytest.fail("waits for nobody"))
    run_capture(rows, folder, batch_tokens=64)
    assert written == [shard_path(folder, number).name for number in (1, 2, 3)] and files(folder) == expected
    run_capture(rows, folder, not_again, batch_tokens=64)
    assert files(folder) == expected


def test_a_worker_killed_in_the_midst_of_a_file_leaves_nothing(rows, captured, tmp_path):
    """By the kernel, behind a limit of file sizes, while the library writes to a temporary file of its own."""
    folder = tmp_path / "features"

    def dies():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        run_capture(rows, folder, batch_tokens=64)

    process = fork(dies)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGXFSZ and not (folder / MANIFEST).exists()
    run_capture(rows, folder, batch_tokens=64)
    assert files(folder) == files(captured)


def test_a_shard_that_comes_while_a_worker_starts_is_kept(rows, captured, tmp_path, monkeypatch):
    """Another worker writes a shard and its record just after this one has looked: the record stays, as that worker
    relies on it."""
    folder, written, looked = tmp_path / "features", [], []
    folder.mkdir()
    shutil.copy(captured / CODEC, folder / CODEC)
    records, write = cache.records, cache.write_shard

    def look(*arguments):
        found = records(*arguments)
        if not looked:
            shutil.copy(shard_path(captured, 0), shard_path(folder, 0))
            record = read_json(captured / MANIFEST)["shards"][0]
            write_json(shard_path(folder, 0).with_suffix(".json"), record)
        looked.append(found)
        return found

    monkeypatch.setattr(cache, "records", look)
    monkeypatch.setattr(cache, "write_shard", lambda path, *rest: (written.append(path.name), write(path, *rest))[1])
    run_capture(rows, folder, batch_tokens=64)
    assert looked[0] == {} and written == [shard_path(folder, number).name for number in range(1, 5)]
    assert files(folder) == files(captured)


def test_a_worker_that_died_at_its_very_end_leaves_nothing(rows, captured, tmp_path):
    folder = tmp_path / "features"
    shutil.copytree(captured, folder)
    write_json(shard_path(folder, 1).with_suffix(".json"), read_json(folder / MANIFEST)["shards"][1])
    (folder / f"{MANIFEST}.part@{socket.gethostname()}@999999999").write_bytes(b"half")
    run_capture(rows, folder, not_again, batch_tokens=64)
    assert files(folder) == files(captured)


def test_a_capture_that_dies_leaves_no_half_shard(rows, captured, tmp_path):
    folder, calls = tmp_path / "features", []

    def dying(states):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return states

    with pytest.raises(KeyboardInterrupt):
        run_capture(rows, folder, runs(dying), batch_tokens=64)
    with pytest.raises(ValueError, match="is not complete"):
        Store(folder)
    assert not list(folder.glob("*@*"))
    run_capture(rows, folder, batch_tokens=64)
    assert files(folder) == files(captured)


# Disks.


def test_too_small_a_disk_is_refused_before_the_target_loads(rows, tmp_path, monkeypatch):
    needed = sum(LENGTHS) * 4 * WIDTH
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=needed))
    with pytest.raises(OSError, match=r"^cache\.dir: .* GB needed, .* GB free") as error:
        run_capture(rows, tmp_path / "features", not_again)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=int(needed * 1.2)))
    run_capture(rows, tmp_path / "features")


@pytest.fixture
def disk(tmp_path):
    """A file system of 1.2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a test's disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("room", [0, 4, 8, 60, 152, 160, 300, 460])
def test_a_disk_that_fills_up_costs_nothing_that_is_finished(rows, captured, disk, room):
    """In the third batch somebody else takes all but `room` kB."""
    folder, filler, calls = disk / "features", disk / "filler", []

    def filling(states):
        calls.append(1)
        if len(calls) == 3:
            filler.write_bytes(bytes(shutil.disk_usage(disk).free - room * 1024))
        return states

    with pytest.raises(OSError) as error:
        run_capture(rows, folder, runs(filling), batch_tokens=64)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    assert not list(folder.glob("*@*"))
    finished = {path: path.stat().st_ino for path in folder.glob("*.safetensors")}
    for path in finished:
        assert path.read_bytes() == (captured / path.name).read_bytes()
    filler.unlink()
    run_capture(rows, folder, batch_tokens=64)
    assert files(folder) == files(captured) and all(path.stat().st_ino == node for path, node in finished.items())


def test_a_full_disk_refuses_the_codec_in_one_line(disk):
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free))
    with pytest.raises(OSError) as error:
        fitted(made_up(num_features=WIDTH), CodecKind.lowrank, rank=100).save(disk / CODEC)
    assert "\n" not in str(error.value) and not list(disk.glob("*@*"))


def test_a_read_only_disk_is_refused_in_one_line(rows, disk):
    with pytest.raises(KeyboardInterrupt):
        run_capture(rows, disk / "started", runs(lambda _: (_ for _ in ()).throw(KeyboardInterrupt)))
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for name in ("started", "new"):
        with pytest.raises(OSError) as error:
            run_capture(rows, disk / name)
        assert "\n" not in str(error.value) and str(disk / name) in str(error.value)


# Damage.

ALIKE = [[0] + [1] * (n - 1) for n in (20, 30) * 5]


@pytest.fixture(scope="module")
def alike():
    """Rows whose five shards have the same size, and their features."""
    path = helpers.folder()
    rows = helpers.make_store(path / "rows", ALIKE, shard_tokens=50)
    return rows, run_capture(rows, path / "features", about={"target": "a", "rows": "r"}).folder


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def cut(path):
    os.truncate(path, path.stat().st_size - 1000)


def swap(one, other):
    data = one.read_bytes()
    shutil.copy(other, one)
    other.write_bytes(data)


def from_another_cache(folder, rows):
    run_capture(rows, folder.parent / "other", about={"target": "a", "rows": "s"})
    shutil.copy(shard_path(folder.parent / "other", 2), shard_path(folder, 2))


def with_nan(folder, rows):
    """The checksum fits: it was taken of the broken states."""
    manifest, part = read_json(folder / MANIFEST), rows.rows_of(2)
    x = torch.cat([Store(folder).row(row.index).features_TF for row in part])
    x[3, 5] = float("nan")
    ids, masks = [row.ids_T.tolist() for row in part], [row.loss_mask_T.int().tolist() for row in part]
    record = write_shard(shard_path(folder, 2), part[0].index, ids, masks, x, digest(manifest["recipe"]))
    manifest["shards"][2] = record
    write_json(folder / MANIFEST, manifest)


def with_recipe(folder, **changes):
    manifest = read_json(folder / MANIFEST)
    manifest["recipe"] |= changes
    write_json(folder / MANIFEST, manifest)


# Damage of a folder: how, whether the cheap check sees it, what the first line to see it says, which shards are lost.
DAMAGES = {
    "a cut shard": (lambda f, _: cut(shard_path(f, 2)), True, ["shard 2", "bytes found"], {2}),
    "a flipped bit": (lambda f, _: flip(shard_path(f, 2), -99), False, ["shard 2", "sha256"], {2}),
    "swapped shards": (
        lambda f, _: swap(shard_path(f, 1), shard_path(f, 3)), True, ["shard 1", "shard 3", "first_row 2 "], {1, 3},
    ),
    "a shard of another cache": (from_another_cache, True, ["shard 2", "recipe"], {2}),
    "states that are not finite": (with_nan, False, ["shard 2", "not finite"], {2}),
    "a missing shard": (lambda f, _: shard_path(f, 2).unlink(), True, ["shard 2", "missing"], {2}),
    "no header": (lambda f, _: flip(shard_path(f, 2), 9), True, ["shard 2"], {2}),
    "other taps": (lambda f, _: with_recipe(f, taps=[1, 2, 4]), True, ["taps", "[1, 2, 4]", "[0, 2, 4]"], None),
    "another template": (lambda f, _: with_recipe(f, target="b"), True, ["target=b", "a"], None),
    "a flipped bit of the index": (lambda f, _: flip(f / INDEX, -9), True, [INDEX], set()),
    "a cut index": (lambda f, _: os.truncate(f / INDEX, 300), True, [INDEX], set()),
    "a missing index": (lambda f, _: (f / INDEX).unlink(), True, [INDEX], set()),
    "a cut codec": (lambda f, _: os.truncate(f / CODEC, 20), True, [CODEC], None),
    "a missing codec": (lambda f, _: (f / CODEC).unlink(), True, [CODEC], None),
    "a cut manifest": (lambda f, _: os.truncate(f / MANIFEST, 500), True, [MANIFEST], None),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_made_good(alike, tmp_path, name):
    """In one line, by the check before training or by the deep one, which puts it aside; the next capture makes it anew
    and keeps all else. None: another recipe, or what all shards depend on; that folder is for the user to judge."""
    (rows, sound), folder = alike, tmp_path / "features"
    damage, cheap, words, lost = DAMAGES[name]
    shutil.copytree(sound, folder)
    recipe, before = read_json(folder / MANIFEST)["recipe"], files(folder)
    damage(folder, rows)
    for deep in (False, True):
        if not deep and not cheap:
            check(Store(folder), recipe, deep)
            continue
        with pytest.raises((ValueError, OSError)) as error:
            check(Store(folder), recipe, deep)
        line = str(error.value)
        said = words[: 1 if deep and cheap else None]
        assert "\n" not in line and str(folder) in line and all(word in line for word in said), line
    if lost is None:
        return
    stay = [shard_path(folder, number) for number in range(5) if number not in lost]
    nodes = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in stay]
    run_capture(rows, folder, about={"target": "a", "rows": "r"})
    check(Store(folder), recipe)
    assert nodes == [(path.stat().st_ino, path.stat().st_mtime_ns) for path in stay]
    assert {name: data for name, data in files(folder).items() if not name.endswith(".damaged")} == before


def test_a_bit_of_any_byte_of_a_header_may_flip(alike, tmp_path):
    """The check before training passes or names the shard, and never breaks; the deep one always names it."""
    folder, rng = tmp_path / "features", random.Random(0)
    shutil.copytree(alike[1], folder)
    path, sound = shard_path(folder, 2), shard_path(alike[1], 2).read_bytes()
    for at in range(int.from_bytes(sound[:8], "little") + 8):
        flipped = bytearray(sound)
        flipped[at] ^= 1 << rng.randrange(7)
        path.write_bytes(flipped)
        with contextlib.suppress(ValueError):
            check(Store(folder), deep=False)
        if at % 20 == 0:
            with pytest.raises(ValueError, match=r"shard 2: "):
                check(Store(folder))
            path.with_suffix(".damaged").unlink()


def test_rows_are_compared_with_the_target(alike):
    store = Store(alike[1])
    with runs()() as run:
        assert check_rows(store, run, CodecKind.bf16, count=10) < 1e-5
    with runs(lambda states: [(x * 1.1,) for (x,) in states])() as run, pytest.raises(ValueError, match="row row-"):
        check_rows(store, run, CodecKind.bf16, count=10)


def test_a_folder_without_manifest_is_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"manifest\.json") as error:
        Store(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


# Online.


def test_rows_computed_at_each_use_equal_captured_ones(rows, tmp_path):
    store = run_capture(rows, tmp_path / "features")
    with runs()() as run:
        online = Online(rows.folder, run)
        assert len(online) == len(store) and online.codec.rank is None
        for i in range(len(store)):
            one, other = online.row(i), store.row(i)
            assert (one.index, one.id) == (other.index, other.id) and torch.equal(one.ids_T, other.ids_T)
            assert torch.equal(one.loss_mask_T, other.loss_mask_T)
            assert float((one.features_TF - other.features_TF).abs().max()) < 1e-5
            assert online.row(i, features=False).features_TF is None


def test_a_steps_loss_is_that_of_captured_rows(chats, tmp_path):
    """In bf16 both; batches of other shapes round otherwise, by 5e-5 of the loss where features one token off cost
    2e-3. Weights are large, so that the features matter."""
    prepared = preparation(chats, tmp_path)
    drafter, losses = fresh_drafter(chats), []
    for parameter in drafter.parameters():
        parameter.data *= 5 if parameter.ndim > 1 else 1
    with prepared.running_target() as run:
        for store in (prepared.features(), Online(prepared.rows_folder, run)):
            config = helpers.config(tmp_path, "batch.bin_tokens=4096", "batch.bin_anchors=512")
            (batch,) = Steps(store, list(range(len(store))), config.model, config.batch, seed=0)[0].batches
            assert batch.features_TF.dtype == torch.bfloat16
            batch.features_TF = batch.features_TF.float()
            losses.append(float(block_loss(drafter, batch, helpers.ends(prepared.drafter), 64).loss.detach()))
    assert losses[0] > 0 and losses[1] == pytest.approx(losses[0], rel=5e-4)


# The whole way, and the folders' names.


def test_the_whole_way_gives_the_targets_states(chats, tmp_path):
    """From a file of chats to features; taps that are not the test's own, ids by the template."""
    prepared = preparation(chats, tmp_path, "cache.dtype=float32", "cache.shard_tokens=300", "model.taps=[0,3]")
    store = prepared.features()
    texts = [json.loads(line)["messages"] for line in (chats / "chats.jsonl").read_text().splitlines()]
    for i, (asked, answered) in enumerate(texts):
        row, prompt = store.row(i), [helpers.BOS, helpers.USER, *asked["content"].encode(), helpers.ASSISTANT]
        ids = [*prompt, *answered["content"].encode(), helpers.END]
        assert row.ids_T.tolist() == ids and row.loss_mask_T.tolist() == [at >= len(prompt) for at in range(len(ids))]
        states = helpers.target()(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        assert float((row.features_TF - torch.cat((states[1], states[4]), dim=-1)[0]).abs().max()) < 1e-4


@pytest.fixture(scope="module")
def chats():
    """A file of answered chats, and a copy of the tiny target that a test may change."""
    path = helpers.folder()
    rows = [json.loads(line) for line in helpers.PROMPTS.read_text().splitlines()][:24]
    for row in rows:
        row["messages"].append({"role": "assistant", "content": f"return {row['id']}"})
    (path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(helpers.TINY, path / "tiny")
    return path


def own(chats):
    return [f"model.target={chats}/tiny", f"data.path={chats}/chats.jsonl", "data.answers=data"]


def preparation(chats, cache_dir, *overrides):
    config = helpers.config(cache_dir, *own(chats), *overrides)
    return Preparation(config.model, config.data, config.cache)


def fresh_drafter(chats):
    torch.manual_seed(0)
    return DFlashDraftModel(preparation(chats, chats).drafter)


def folder_name(chats, cache_dir, *overrides):
    return preparation(chats, cache_dir, *overrides).features_folder.name


def command_line(monkeypatch, capsys, *arguments):
    """(exit code, lines on stderr) of data_prep/run.py."""
    monkeypatch.setattr(sys, "argv", ["run.py", "+model=tiny", *arguments])
    code = 0
    try:
        run_main(main, "data_prep", PrepConfig)
    except SystemExit as exit:
        code = exit.code
    return code, [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]


def test_the_command_line_names_damage_and_mends_it(chats, tmp_path, monkeypatch, capsys):
    """Two shards at once, by the audit and by the check before training."""
    arguments = [*own(chats), f"cache.dir={tmp_path}", "cache.shard_tokens=300", "cache.threads=1"]
    assert command_line(monkeypatch, capsys, *arguments, "stage=capture") == (0, [])
    (folder,) = tmp_path.glob("features-*")
    before = files(folder)
    assert len(before) >= 3 + 4 and command_line(monkeypatch, capsys, *arguments, "stage=audit") == (0, [])
    cut(shard_path(folder, 0))
    flip(shard_path(folder, 2), -99)
    with pytest.raises(ValueError, match=r"shard 0: .*stage=audit"):
        preparation(chats, tmp_path, *arguments[3:]).features()
    code, (line,) = command_line(monkeypatch, capsys, *arguments, "stage=audit")
    assert code == 1 and "shard 0: " in line and "shard 2: sha256" in line and str(folder) in line
    assert command_line(monkeypatch, capsys, *arguments, "stage=capture") == (0, [])
    assert {name: data for name, data in files(folder).items() if not name.endswith(".damaged")} == before
    assert command_line(monkeypatch, capsys, *arguments, "stage=audit") == (0, [])


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


OTHER_FOLDER = ["data.max_length=200", "model.taps=[1,2,4]", "model.revision=abc", "cache.dtype=float32"]
OTHER_FOLDER += ["data.thinking=false", "data.limit=20", "data.cut_answers=drop", "data.dedup=false"]
OTHER_FOLDER += ["cache.codec=int8", "cache.codec=lowrank", "cache.last=true", "cache.shard_tokens=999"]
OTHER_FOLDER += ["cache.batch_tokens=99", "cache.threads=1", "cache.dtype=float16"]
SAME_FOLDER = ["batch.bin_tokens=600", "batch.rows_per_step=4", "log.every=3", "optim.lr=1e-4", "seed=5"]
SAME_FOLDER += ["model.num_layers=2", "model.block_size=4", "engine.zero_stage=2", "evaluate.every=7", "name=other"]
SAME_FOLDER += ["data.heldout=0.3", "model.mask_token_id=300", "data.num_proc=2", "cache.check_rows=0", "cache.rank=9"]


def test_all_that_determines_the_content_changes_the_folder(chats, tmp_path):
    names = [folder_name(chats, tmp_path)] + [folder_name(chats, tmp_path, change) for change in OTHER_FOLDER]
    lowrank = [f"cache.codec=lowrank cache.{more}".split() for more in ("rank=7", "fit_tokens=99")]
    names += [folder_name(chats, tmp_path, *change) for change in lowrank]
    assert len(set(names)) == len(names) and names[0] == folder_name(chats, tmp_path)


@pytest.mark.parametrize(
    "file, old, new",
    [
        ("chats.jsonl", "return py-003", "return py-33"),
        ("chats.jsonl", '"id": "py-002"', '"id": "py-2"'),
        ("tiny/tokenizer_config.json", "<|user|>' + m", "<|user|> ' + m"),
        ("tiny/generation_config.json", '"eos_token_id": 257', '"eos_token_id": [257, 10]'),
        ("tiny/config.json", '"rope_theta": 10000.0', '"rope_theta": 20000.0'),
    ],
)
def test_content_behind_the_same_path_changes_the_folder(chats, tmp_path, file, old, new):
    before = folder_name(chats, tmp_path)
    edit(chats / file, old, new)
    after = folder_name(chats, tmp_path)
    edit(chats / file, new, old)
    assert after != before and folder_name(chats, tmp_path) == before


def test_other_weights_behind_the_same_path_change_the_folder(chats, tmp_path):
    """A local target that was trained on: its old features are not its own any more."""
    before, path = folder_name(chats, tmp_path), chats / "tiny/model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-2] + bytes([data[-2] ^ 1, data[-1]]))
    after = folder_name(chats, tmp_path)
    path.write_bytes(data)
    assert after != before


def test_what_does_not_determine_the_content_keeps_the_folder(chats, tmp_path):
    assert folder_name(chats, tmp_path, *SAME_FOLDER) == folder_name(chats, tmp_path)


def test_a_stage_whose_result_is_there_is_not_done_again(chats, tmp_path, monkeypatch):
    first = preparation(chats, tmp_path).features()
    for name in ("encode_rows", "capture", "regenerate", "collect"):
        monkeypatch.setattr(prepare, name, lambda *_: pytest.fail("done again"))
    again = preparation(chats, tmp_path).features()
    assert again.folder == first.folder and len(again) == 24
    sources = Counter(again.index["source"].tolist())
    assert sources == {0: 24}
