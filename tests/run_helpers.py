"""What the tests of data_prep/ and train/ share: the tiny target, made-up stores, one short training, processes.

Nothing here computes an expected value: references stand in the test that uses them.
"""

import atexit
import copy
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

from data_prep.codec import Codec
from data_prep.encode import EncodedRow
from data_prep.files import write_json
from data_prep.prepare import Preparation
from data_prep.run import load_config
from data_prep.store import CODEC, MANIFEST, SCHEMA, Store, shard_path, write_rows, write_shard
from dflash.model import DFlashDraftModel
from dflash.target import load_ends, load_target
from train.config import RunConfig
from train.trainer import fit

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests/assets/tiny"
PROMPTS = ROOT / "tests/assets/prompts.jsonl"
BOS, END, USER, ASSISTANT, MASK, PAD = range(256, 262)  # ids of the tiny target; every other id is a byte
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache/torch_extensions"))


def folder() -> Path:
    """A folder that lasts as long as this process."""
    path = Path(tempfile.mkdtemp(prefix="dflash-test-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def config(cache, *overrides) -> RunConfig:
    """The run config of `+model=tiny` with overrides; everything that is written lies under `cache`."""
    paths = [f"model.target={TINY}", f"data.path={PROMPTS}", f"cache.dir={cache}/cache", f"runs={cache}/runs"]
    made = load_config("train", RunConfig, ["+model=tiny", *paths, "name=tiny", *overrides])
    made.evaluate.sets = [str(PROMPTS)]
    return made


def tokenizer(template=None):
    loaded = AutoTokenizer.from_pretrained(TINY)
    if template is not None:
        loaded.chat_template = template
    return loaded


@functools.cache
def target(dtype=torch.float32):
    return load_target(str(TINY), dtype=dtype)


def ends(drafter_config, dtype=torch.float32):
    return load_ends(str(TINY), drafter_config, dtype=dtype)


def encoded(masks: list[list[int]], heldout=(), seed=0) -> list[EncodedRow]:
    """Rows with the given loss masks and random ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 256, (len(mask),), generator=generator).tolist() for mask in masks]
    keys = [0 if i in heldout else 2**48 - 1 for i in range(len(masks))]
    return [EncodedRow(f"row-{i}", 0, ids[i], list(masks[i]), keys[i]) for i in range(len(masks))]


def make_store(path: Path, masks: list[list[int]], num_features=0, heldout=(), seed=0, shard_tokens=10**9) -> Store:
    """Such rows as a store; feature 0 tells the row, feature 1 the position in it."""
    path.mkdir(parents=True, exist_ok=True)
    rows = encoded(masks, heldout, seed)
    manifest = write_rows(path, rows, shard_tokens)
    if num_features:
        features = torch.randn(sum(map(len, masks)), num_features, generator=torch.Generator().manual_seed(seed))
        features[:, 0] = torch.tensor([float(row) for row, mask in enumerate(masks) for _ in mask])
        features[:, 1] = torch.tensor([float(at) for mask in masks for at in range(len(mask))])
        write_shard(shard_path(path, 0), 0, [row.ids for row in rows], masks, features)
        Codec(torch.float32).save(path / CODEC)
    write_json(path / MANIFEST, {**manifest, "schema": SCHEMA, "recipe": {"seed": seed}, "report": {}})
    return Store(path)


def uneven_masks() -> list[list[int]]:
    """Rows whose numbers of supervised tokens lie far apart, one of them with a gap, one with two supervised tokens."""
    prompt_and_answer = [(5, 60), (30, 2), (9, 33), (3, 4), (20, 90), (7, 3), (4, 40), (12, 9)]
    return [[0] * p + [1] * a for p, a in prompt_and_answer] + [[0] * 6 + [1] * 9 + [0] * 5 + [1] * 7]


@functools.cache
def tiny_run():
    """(config, store of the tiny target's fp32 features of its own greedy answers, preparation)."""
    made = config(folder(), "cache.dtype=float32", "engine.dtype=float32", "data.max_new_tokens=48")
    preparation = Preparation(made.model, made.data, made.cache)
    return made, preparation.features(), preparation


def new_drafter(seed=0) -> DFlashDraftModel:
    torch.manual_seed(seed)
    return DFlashDraftModel(tiny_run()[2].drafter)


@functools.cache
def trained_drafter() -> DFlashDraftModel:
    """The drafter after 120 steps on `tiny_run`'s rows, some 8 seconds: right often enough to tell drafters apart."""
    made, store, prepared = copy.deepcopy(tiny_run()[0]), *tiny_run()[1:]
    made.optim.steps, made.optim.lr, made.log.every, made.evaluate.every, made.name = 120, 4e-3, 60, 1000, "shared"
    drafter = new_drafter()
    fit(made, store, drafter, ends(prepared.drafter), torch.device("cpu"), prepared.provenance(store))
    return drafter.eval()


def relative(found: dict, expected: dict) -> float:
    """Norm of the difference over norm of the expected value, over all tensors of `expected` together."""
    difference = sum(float((found[k].double() - expected[k].double()).square().sum()) for k in expected)
    return (difference / sum(float(v.double().square().sum()) for v in expected.values())) ** 0.5


def environment(**extra) -> dict:
    """Of a child process: one thread, no network, the prepared DeepSpeed extension, the venv's compiler tools."""
    bin_folder = str(Path(sys.executable).parent)
    drop = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"}
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    kept |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    return kept | extra


def run(*arguments, timeout=240, **options) -> subprocess.CompletedProcess:
    """Run this Python with the arguments from the root; its whole process group dies with a timeout."""
    env = options.pop("env", None) or environment()
    with subprocess.Popen(
        [sys.executable, *map(str, arguments)], cwd=options.pop("cwd", ROOT), env=env, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_ranks(script: Path, world: int, *arguments, timeout=240) -> list[str]:
    """Run `script` in `world` processes that find each other on the loopback; returns their outputs.

    The first rank that fails ends the others; its message is the assertion's.
    """
    port, processes = str(free_port()), []
    try:
        for rank in range(world):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
            env = environment(
                MASTER_ADDR="127.0.0.1", PYTHONPATH=f"{ROOT}:{ROOT}/tests", **{k: str(v) for k, v in names.items()}
            )
            command = [sys.executable, str(script), *map(str, arguments)]
            piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=env, **piped))
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    failed = [output[-2000:] for process, output in zip(processes, outputs) if process.returncode]
    assert not failed, "\n\n".join(failed)
    return outputs
