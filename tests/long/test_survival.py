"""Training survives kill -9, lost ranks, bad shards and signals.

References: the run of 60 steps that nothing happened to, and checkpoints whose content is a function of their step.
"""

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_helpers as helpers
import torch
from safetensors.torch import load_file

from data_prep.codec import Codec
from train import checkpoint

COMMON = ["+model=tiny", "stage=train", "cache.dtype=float32", "engine.dtype=float32", "data.max_new_tokens=48"]
COMMON += ["optim.steps=60", "save_every=25", "evaluate.every=25", "evaluate.rows=2", "keep=5", "log.every=1"]


@pytest.fixture(scope="module")
def cache():
    return helpers.folder()


def command(cache, name, *overrides):
    return ["train/run.py", *COMMON, f"cache.dir={cache}", f"runs={cache}/runs", f"name={name}", *overrides]


def start(cache, name, *overrides):
    return subprocess.Popen(
        [sys.executable, *command(cache, name, *overrides)], cwd=helpers.ROOT, env=helpers.environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def end(process, timeout=60):
    """(stdout, stderr, exit code, seconds)."""
    began = time.perf_counter()
    try:
        out, err = process.communicate(timeout=timeout)
        return out, err, process.returncode, time.perf_counter() - began
    finally:
        kill_all(process)


def kill_all(process):
    for pid in [process.pid, *ranks(process)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def ranks(process) -> list[int]:
    """Process ids of the ranks that a launcher started, in order."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(path.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
            environ = path.joinpath("environ").read_text().split("\0")
        except (OSError, IndexError):
            continue
        if parent == process.pid and (rank := next((e for e in environ if e.startswith("RANK=")), None)):
            found[int(rank[5:])] = int(path.name)
    return [found[rank] for rank in sorted(found)]


def wait_for(process, text, timeout=120):
    """Read the console until a line holds `text`."""
    deadline = time.time() + timeout
    for line in process.stdout:
        if text in line:
            return
        if time.time() > deadline:
            break
    kill_all(process)
    raise AssertionError(f"no {text!r} on the console: {process.stderr.read()[-2000:]}")


def finish(cache, name, *overrides):
    done = helpers.run(*command(cache, name, *overrides))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def final(cache, name):
    return load_file(cache / f"runs/{name}/checkpoints/step-000060/state.safetensors")


def losses(cache, name) -> dict:
    values = [json.loads(line) for line in (cache / f"runs/{name}/log.jsonl").read_text().splitlines()]
    return {v["step"]: v["loss"] for v in values if "loss" in v}


@pytest.fixture(scope="module")
def whole(cache):
    finish(cache, "whole")
    return final(cache, "whole"), losses(cache, "whole")


def test_kill_9_and_resume_on_one_process_is_bit_equal(cache, whole):
    process = start(cache, "killed")
    wait_for(process, "step 29/60")
    kill_all(process)
    end(process)
    assert "resumed from" in finish(cache, "killed") and losses(cache, "killed") == whole[1]
    found = final(cache, "killed")
    assert found.keys() == whole[0].keys() and all(torch.equal(found[n], whole[0][n]) for n in found)


def test_25_steps_on_two_ranks_then_35_on_one_and_on_three(cache, whole):
    """Within 1e-5 of the whole run in weights and losses; equal losses mean the same rows and anchors."""
    process = start(cache, "two", "launch.ranks=2")
    wait_for(process, "step 29/60")
    kill_all(process)
    end(process)
    weights = {name: tensor for name, tensor in whole[0].items() if "/" not in name}
    for count in (1, 3):
        folder = cache / f"runs/then-{count}"
        folder.mkdir(parents=True)
        subprocess.run(["cp", "-r", cache / "runs/two/checkpoints", folder], check=True)
        for late in (folder / "checkpoints").glob("step-00002[6-9]"):
            subprocess.run(["rm", "-r", late], check=True)
        out = finish(cache, folder.name, f"launch.ranks={count}")
        assert "resumed from" in out and "step-000025" in out
        assert helpers.relative(final(cache, folder.name), weights) < 1e-5
        after = losses(cache, folder.name)
        assert sorted(after) == list(range(26, 61))
        assert all(abs(loss / whole[1][step] - 1) < 1e-5 for step, loss in after.items())


def test_a_rank_that_is_killed_ends_the_run_soon_and_by_name(cache, whole):
    process = start(cache, "lost", "launch.ranks=2")
    wait_for(process, "step 27/60")
    os.kill(ranks(process)[1], signal.SIGKILL)
    _, err, code, seconds = end(process)
    assert code == 1 and seconds < 30 and re.search(r"rank \d ended with code -9", err), err[-2000:]
    assert "step-000025" in finish(cache, "lost", "launch.ranks=2")
    weights = {name: tensor for name, tensor in whole[0].items() if "/" not in name}
    assert helpers.relative(final(cache, "lost"), weights) < 1e-5


def test_a_bad_shard_is_named_and_the_run_goes_on_when_it_is_mended(cache, whole):
    (features,) = cache.glob("features-*")
    shard = features / "shard-00000.safetensors"
    sound = shard.read_bytes()
    shard.write_bytes(sound[: len(sound) // 2])
    try:
        _, err, code, seconds = end(start(cache, "bad", "launch.ranks=2"))
        assert code == 1 and seconds < 30 and "shard 0" in err and "bytes found" in err
    finally:
        shard.write_bytes(sound)


def test_sigterm_to_the_launcher_saves_and_leaves(cache, whole):
    process = start(cache, "stopped", "launch.ranks=2", "launch.grace=30")
    wait_for(process, "step 31/60")
    process.send_signal(signal.SIGTERM)
    _, err, code, seconds = end(process)
    step = int(re.search(r"stopped by a signal at step (\d+) of 60", err)[1])
    assert code == 143 and seconds < 30 and 31 <= step < 60
    assert checkpoint.latest(cache / "runs/stopped/checkpoints").name == f"step-{step:06d}"
    finish(cache, "stopped", "launch.ranks=2")
    weights = {name: tensor for name, tensor in whole[0].items() if "/" not in name}
    assert helpers.relative(final(cache, "stopped"), weights) < 1e-5


def write_checkpoints(folder: Path, config, writing) -> None:
    """Checkpoints without end, each a function of its step; what stands there already is counted on."""
    writing.set()
    latest = checkpoint.latest(folder)
    step = int(latest.name[5:]) if latest else 0
    while True:
        step += 1
        state = {f"w{i}": torch.full((50_000,), float(step)) for i in range(8)}
        trainer = {"step": step, "tau": 1.0 + step % 7, "config": {}, "training": {}}
        checkpoint.save(folder, state, config, trainer, Codec(torch.float32))
        checkpoint.prune(folder, 3)


def test_twenty_kills_while_checkpoints_are_written(tmp_path):
    rng, last, halves = random.Random(7), 0, 0
    config = helpers.new_drafter().config
    clean = multiprocessing.get_context("forkserver")  # a fork of this process hangs once torch has its threads
    clean.set_forkserver_preload(["train.checkpoint"])
    for _ in range(20):
        writing = clean.Event()
        child = clean.Process(target=write_checkpoints, args=(tmp_path, config, writing))
        child.start()
        assert writing.wait(60), "the writer did not start"
        time.sleep(rng.uniform(0, 0.5))
        child.kill()
        child.join()
        found = checkpoint.complete(tmp_path)
        halves += len(list(tmp_path.iterdir())) > len(found)
        for path in found:
            state, trainer = checkpoint.load(path)
            step = int(path.name[5:])
            assert trainer["step"] == step and len(state) == 8
            assert all(bool((tensor == step).all()) for tensor in state.values())
        newest = int(found[-1].name[5:]) if found else 0
        assert newest >= last, "a checkpoint was lost"
        last = newest
    assert halves >= 5, "hardly any kill fell into a write: a weak test"
    assert last > 20
