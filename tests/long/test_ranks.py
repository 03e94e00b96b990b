"""One optimiser step is the same for every number of ranks, ZeRO stage, budget and objective.

Reference: one process of plain torch with one bin. Rows have 2 to 220 supervised tokens. Run as a script this file is
one rank; rank 0 writes the gradient, recovered from AdamW's first moment.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import run_helpers as helpers
import torch
from safetensors.torch import load_file, save_file

from data_prep.prepare import Preparation
from data_prep.store import Store
from dflash.model import DFlashDraftModel
from dflash.objective import Objective
from train.config import BatchConfig, EngineConfig, OptimConfig
from train.data import Steps
from train.engine import DeepSpeedEngine, TorchEngine, start_process_group
from train.trainer import train_step

CPU = torch.device("cpu")
OBJECTIVES = (Objective.decay, Objective.dpace)
BUDGETS = {"one bin": (1024, 1024), "several": (256, 40), "many": (240, 20)}  # tokens, anchors
MASKS = [*helpers.uneven_masks(), [0] * 4 + [1] * 220]


def gradient(engine, config, store, ends, objective, budgets, rank=0, world=1) -> dict:
    config.batch.bin_tokens, config.batch.bin_anchors = budgets
    rows = list(range(len(store)))
    steps = Steps(store, rows, config.model, config.batch, 5, rank, world, objective=objective)
    train_step(engine, steps[0], ends, BatchConfig(chunk_slots=64), 1e-3, objective)
    return {k.removesuffix("/exp_avg"): v / 0.1 for k, v in engine.state().items() if k.endswith("/exp_avg")}


def parts(cache):
    config = helpers.config(cache, "batch.rows_per_step=10", "batch.anchors_per_row=20")
    prepared = Preparation(config.model, config.data, config.cache)
    torch.manual_seed(3)
    return config, DFlashDraftModel(prepared.drafter), helpers.ends(prepared.drafter)


def run(cache, make, objective, budgets, rank=0, world=1) -> dict:
    config, drafter, ends = parts(cache)
    return gradient(make(drafter), config, Store(cache / "store"), ends, objective, budgets, rank, world)


def torch_engine(drafter):
    return TorchEngine(drafter, OptimConfig(clip=1e9), EngineConfig(dtype="float32"), CPU)


@pytest.fixture(scope="module")
def cache():
    path = helpers.folder()
    helpers.make_store(path / "store", MASKS, num_features=3 * 128)
    return path


@pytest.fixture(scope="module")
def reference(cache):
    return {objective: run(cache, torch_engine, objective, BUDGETS["one bin"]) for objective in OBJECTIVES}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("budgets", ["several", "many"])
def test_torch_with_other_budgets(cache, reference, objective, budgets):
    found = run(cache, torch_engine, objective, BUDGETS[budgets])
    assert helpers.relative(found, reference[objective]) < 1e-5


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_deepspeed_on_so_many_ranks(cache, reference, world):
    helpers.run_ranks(Path(__file__), world, cache, timeout=300)
    bins = json.loads((cache / f"bins-{world}.json").read_text())
    assert len(set(bins["several"])) == 1 and bins["several"][0] * world >= bins["of all"]["several"]
    if world == 3:
        assert sum(bins["empty"].values()) > 0, "no rank had an empty bin: a weak test"
    for objective in OBJECTIVES:
        for stage in (0, 1, 2):
            for budgets in ("several", "many"):
                found = load_file(cache / f"{world}-{objective.value}-{stage}-{budgets}.safetensors")
                error = helpers.relative(found, reference[objective])
                assert error < 1e-5, (world, objective, stage, budgets, error)


def rank_main(cache: Path) -> None:
    start_process_group(CPU, deepspeed=True)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for objective in OBJECTIVES:
        for stage in (0, 1, 2):
            for name in ("several", "many"):
                make = lambda drafter, stage=stage: DeepSpeedEngine(  # noqa: E731
                    drafter, OptimConfig(clip=1e9), EngineConfig(zero_stage=stage, dtype="float32"), CPU
                )
                found = run(cache, make, objective, BUDGETS[name], rank, world)
                if rank == 0:
                    save_file(found, cache / f"{world}-{objective.value}-{stage}-{name}.safetensors")
    if rank == 0:
        (cache / f"bins-{world}.json").write_text(json.dumps(count_bins(cache, world)))
    torch.distributed.barrier()  # a rank that leaves earlier takes gloo's threads with it
    torch.distributed.destroy_process_group()


def count_bins(cache: Path, world: int) -> dict:
    """Bins of each rank, and of all, and how many of them are empty."""
    config, _, _ = parts(cache)
    counts = {"of all": {}, "empty": {}}
    for name in ("several", "many"):
        config.batch.bin_tokens, config.batch.bin_anchors = BUDGETS[name]
        store = Store(cache / "store")
        loads = lambda w, r: Steps(store, list(range(len(store))), config.model, config.batch, 5, r, w)[0].batches  # noqa: E731, B023
        counts[name] = [len(loads(world, rank)) for rank in range(world)]
        counts["of all"][name] = len(loads(1, 0))
        counts["empty"][name] = sum(len(b.weighted_N) == 0 for rank in range(world) for b in loads(world, rank))
    return counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank_main(Path(sys.argv[1]))
