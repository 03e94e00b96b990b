"""The optimiser step is the same whatever computes it: budgets, processes, ZeRO stages, and a change of engine between
steps. References: the gradient summed row by row over one denominator, AdamW written out in float64, and one process of
plain torch. Run as a script this file is one rank of the two DeepSpeed processes; it writes what the tests compare.
"""

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
from dflash.objective import block_loss
from train.config import BatchConfig, EngineConfig, OptimConfig
from train.data import Steps, make_batch
from train.engine import DeepSpeedEngine, TorchEngine, make_engine, param_groups, start_process_group
from train.trainer import train_step

CPU = torch.device("cpu")
RATES = (1e-3, 2e-3, 1e-3)
ONE_BIN, MANY_BINS = (512, 256), (128, 24)  # tokens, anchors
NO_CLIP, CLIP = 1e9, 0.05
CASES = [(stage, dtype, NO_CLIP) for stage in (0, 1, 2) for dtype in ("float32", "bfloat16")]
CASES += [(stage, "float32", CLIP) for stage in (0, 1, 2)]


def optim(**changes):
    return OptimConfig(**{"clip": NO_CLIP, "weight_decay": 0.1, **changes})


def parts(cache):
    """Config, drafter and the target's ends, the same at every call."""
    config = helpers.config(cache, "batch.rows_per_step=9")
    prepared = Preparation(config.model, config.data, config.cache)
    torch.manual_seed(3)
    drafter = DFlashDraftModel(prepared.drafter)
    with torch.no_grad():  # norms that are not one, so that their gradients and decay show
        for parameter in drafter.parameters():
            if parameter.ndim < 2:
                parameter += 0.3 * torch.randn_like(parameter)
    return config, drafter, helpers.ends(prepared.drafter)


def steps(config, store, budgets, rank=0, world=1):
    config.batch.bin_tokens, config.batch.bin_anchors = budgets
    return Steps(store, list(range(len(store))), config.model, config.batch, seed=5, rank=rank, world=world)


def gradient(state, beta1=0.9):
    """After one step from zero moments, AdamW's first moment is the gradient times (1 - beta1)."""
    return {k.removesuffix("/exp_avg"): v / (1 - beta1) for k, v in state.items() if k.endswith("/exp_avg")}


def weights(state):
    return {name: tensor for name, tensor in state.items() if "/" not in name}


def torch_states(cache, store, budgets, dtype="float32", count=3, **changes):
    """[state before, after step 1, ...] of plain torch."""
    config, drafter, ends = parts(cache)
    engine = TorchEngine(drafter, optim(**changes), EngineConfig(dtype=dtype), CPU)
    states, loader = [engine.state()], steps(config, store, budgets)
    for number in range(count):
        train_step(engine, loader[number], ends, BatchConfig(chunk_slots=64), RATES[number])
        states.append(engine.state())
    return states


@pytest.fixture(scope="module")
def cache():
    return helpers.folder()


@pytest.fixture(scope="module")
def store(cache):
    return helpers.make_store(cache / "store", helpers.uneven_masks(), num_features=3 * 128)


@pytest.fixture(scope="module")
def reference(cache, store):
    return torch_states(cache, store, ONE_BIN)


@pytest.fixture(scope="module")
def deepspeed(cache, store, reference):
    """What two processes wrote: case -> {when: {parameter or moment: tensor}}."""
    save_file(reference[2], cache / "torch-2.safetensors")
    helpers.run_ranks(Path(__file__), 2, cache, timeout=150)
    out = {case: {} for case in CASES}
    for case, states in out.items():
        for key, tensor in load_file(cache / file_name(*case)).items():
            when, name = key.split(":")
            states.setdefault(when, {})[name] = tensor
    return out


def file_name(stage, dtype, clip):
    return f"{stage}-{dtype}-{clip}.safetensors"


def test_gradient_is_the_sum_over_rows_over_one_denominator(cache, store, reference):
    config, drafter, ends = parts(cache)
    step = steps(config, store, ONE_BIN)[0]
    by_row, total = {}, 0.0
    for batch in step.batches:
        for row, at in batch.features_TF[batch.blocks.anchor_A][:, :2].long().tolist():
            by_row.setdefault(row, []).append(at)
    loss = 0.0
    for row, anchors in by_row.items():
        batch = make_batch([store.row(row)], [torch.tensor(sorted(anchors))], config.model)
        loss = loss + block_loss(drafter, batch, ends, 7).loss
        mask = store.row(row).loss_mask_T.tolist()
        for anchor in anchors:
            for slot in range(1, 8):
                if not all(mask[anchor + 1 : anchor + slot + 1]) or anchor + slot >= len(mask):
                    break
                total += 2.718281828459045 ** (-(slot - 1) / 4.0)
    assert sorted(by_row) == list(range(9)) and abs(step.weight / total - 1) < 1e-6
    names, parameters = zip(*drafter.named_parameters())
    expected = dict(zip(names, torch.autograd.grad(loss / total, parameters)))
    assert helpers.relative(gradient(reference[1]), expected) < 1e-5


@pytest.mark.parametrize("budgets", [MANY_BINS, (200, 64)])
def test_gradient_and_weights_do_not_depend_on_budgets(cache, store, reference, budgets):
    states = torch_states(cache, store, budgets)
    assert helpers.relative(gradient(states[1]), gradient(reference[1])) < 1e-5
    assert helpers.relative(weights(states[3]), weights(reference[3])) < 1e-6
    assert helpers.relative(update(states), update(reference)) < 1e-5


def test_recomputed_layers_give_the_same_gradient(cache, store, reference):
    """And they are recomputed: each layer runs twice a bin."""
    config, drafter, ends = parts(cache)
    engine = make_engine(drafter, optim(), EngineConfig(dtype="float32", checkpoint=True), CPU)
    calls = []
    drafter.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    step = steps(config, store, ONE_BIN)[0]
    train_step(engine, step, ends, BatchConfig(chunk_slots=64), RATES[0])
    assert len(calls) == 2 * len(step.batches)
    assert helpers.relative(gradient(engine.state()), gradient(reference[1])) < 1e-6


def update(states):
    return {name: states[-1][name] - states[0][name] for name in weights(states[0])}


def test_three_steps_are_adamw_with_clipping_and_no_decay_of_norms(cache, store):
    clip, decay, betas = CLIP, 0.5, (0.8, 0.7)
    config, drafter, ends = parts(cache)
    moments = {"weight_decay": decay, "beta1": betas[0], "beta2": betas[1]}
    states = torch_states(cache, store, ONE_BIN, clip=clip, **moments)
    value = {name: p.detach().double() for name, p in drafter.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in value.items()}
    second = {name: torch.zeros_like(p) for name, p in value.items()}
    loader = steps(config, store, ONE_BIN)
    for number, rate in enumerate(RATES):
        for name, parameter in drafter.named_parameters():
            parameter.data.copy_(value[name])
        (batch,) = loader[number].batches
        loss = block_loss(drafter, batch, ends, 512).loss / loader[number].weight
        grads = dict(zip(value, torch.autograd.grad(loss, list(drafter.parameters()))))
        assert norm(grads) > 2 * clip
        for name, grad in grads.items():
            grad = grad.double() * clip / norm(grads)
            first[name] = betas[0] * first[name] + (1 - betas[0]) * grad
            second[name] = betas[1] * second[name] + (1 - betas[1]) * grad**2
            unbiased = first[name] / (1 - betas[0] ** (number + 1))
            spread = (second[name] / (1 - betas[1] ** (number + 1))).sqrt() + 1e-8
            shrunk = value[name] * (1 - rate * decay) if value[name].ndim > 1 else value[name]
            value[name] = shrunk - rate * unbiased / spread
    assert helpers.relative(states[3], value) < 1e-5


def test_optimiser_holds_exactly_the_drafters_parameters(cache):
    _, drafter, ends = parts(cache)
    groups = param_groups(drafter, optim(weight_decay=0.1))
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in drafter.parameters())
    assert {p.ndim > 1: group["weight_decay"] for group in groups for p in group["params"]} == {True: 0.1, False: 0.0}
    assert not ends.embed_VD.requires_grad and not ends.head_VD.requires_grad


def test_torch_training_leaves_the_targets_tables_alone(cache, store):
    config, drafter, ends = parts(cache)
    before = ends.embed_VD.clone(), ends.head_VD.clone()
    engine = TorchEngine(drafter, optim(), EngineConfig(dtype="bfloat16"), CPU)
    train_step(engine, steps(config, store, MANY_BINS)[0], ends, BatchConfig(chunk_slots=64), 1e-3)
    assert torch.equal(before[0], ends.embed_VD) and torch.equal(before[1], ends.head_VD)
    assert all(p.dtype == torch.float32 for p in drafter.parameters())
    assert all(t.dtype == torch.float32 for t in engine.state().values())


def test_torch_state_survives_a_reload_bit_for_bit(cache, store, reference):
    config, drafter, ends = parts(cache)
    engine = TorchEngine(drafter, optim(), EngineConfig(dtype="float32"), CPU)
    engine.load_state(reference[2], step=2)
    train_step(engine, steps(config, store, ONE_BIN)[2], ends, BatchConfig(chunk_slots=64), RATES[2])
    assert all(torch.equal(tensor, reference[3][name]) for name, tensor in engine.state().items())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_deepspeed_processes_equal_one_of_torch(reference, deepspeed, stage):
    found = deepspeed[stage, "float32", NO_CLIP]
    assert helpers.relative(found["0"], weights(reference[0])) == 0, "the masters are not the fp32 weights given"
    assert helpers.relative(gradient(found["1"]), gradient(reference[1])) < 1e-5
    assert helpers.relative(found["3"], weights(reference[3])) < 1e-5
    states = [found[str(number)] for number in range(4)]
    assert helpers.relative(update(states), update(reference)) < 1e-5
    assert found["3"].keys() == reference[3].keys() | {"norm"}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeed_reports_the_norm_of_the_whole_gradient(reference, deepspeed, stage):
    for clip in (CLIP, NO_CLIP):
        reported = float(deepspeed[stage, "float32", clip]["1"]["norm"])
        assert reported == pytest.approx(norm(gradient(reference[1])), rel=1e-4)


def norm(tensors):
    return sum(float(tensor.double().square().sum()) for tensor in tensors.values()) ** 0.5


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeed_clips_the_whole_gradient(cache, store, deepspeed, stage):
    found, states = deepspeed[stage, "float32", CLIP], torch_states(cache, store, ONE_BIN, clip=CLIP)
    clipped = gradient(states[1])
    assert norm(clipped) == pytest.approx(CLIP, rel=1e-4)
    assert helpers.relative(gradient(found["1"]), clipped) < 1e-4  # DeepSpeed divides by the norm + 1e-6
    assert helpers.relative(found["3"], weights(states[3])) < 1e-5


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bf16_deepspeed_keeps_fp32_masters_near_those_of_torch(cache, store, deepspeed, stage):
    """Tolerance: rounding activations to 8 bits moves the gradient by 0.5 % (torch, autocast) to 0.8 % (DeepSpeed,
    which rounds the weights too), measured against fp32; AdamW's first steps are near to sign(gradient),
    hence 4 % of update.
    """
    states = torch_states(cache, store, ONE_BIN, dtype="bfloat16")
    found = deepspeed[stage, "bfloat16", NO_CLIP]
    assert helpers.relative(found["0"], weights(states[0])) == 0, "the masters were rounded"
    assert helpers.relative(gradient(found["1"]), gradient(states[1])) < 0.02
    assert helpers.relative(update([found[str(number)] for number in range(4)]), update(states)) < 0.1
    assert helpers.relative(found["3"], weights(states[3])) < 0.005


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_run_changes_engine_between_steps(cache, store, reference, deepspeed, stage):
    found = deepspeed[stage, "float32", NO_CLIP]
    assert helpers.relative(found["from-torch"], weights(reference[3])) < 1e-5  # torch, torch, deepspeed
    assert helpers.relative(gradient(found["from-torch"]), gradient(reference[3])) < 1e-5
    config, drafter, ends = parts(cache)
    engine = TorchEngine(drafter, optim(), EngineConfig(dtype="float32"), CPU)
    engine.load_state(found["2"], step=2)
    train_step(
        engine, steps(config, store, ONE_BIN)[2], ends, BatchConfig(chunk_slots=64), RATES[2]
    )  # deepspeed, deepspeed, torch
    assert helpers.relative(engine.state(), weights(reference[3])) < 1e-5


def rank_main(cache: Path) -> None:
    """One rank: every case, three steps, and one step from torch's state of step 2. Rank 0 writes."""
    start_process_group(CPU, deepspeed=True)
    rank, store = int(os.environ["RANK"]), Store(cache / "store")
    for stage, dtype, clip in CASES:
        config, drafter, ends = parts(cache)
        ends.embed_VD, ends.head_VD = (t.to(getattr(torch, dtype)) for t in (ends.embed_VD, ends.head_VD))
        tables = ends.embed_VD.clone(), ends.head_VD.clone()
        engine = DeepSpeedEngine(drafter, optim(clip=clip), EngineConfig(zero_stage=stage, dtype=dtype), CPU)
        states, loader = {"0": engine.state()}, steps(config, store, MANY_BINS, rank, world=2)
        for number, rate in enumerate(RATES):
            step = loader[number]
            empty = [len(batch.weighted_N) == 0 for batch in step.batches]
            assert any(empty) == (rank == 1), "this step should have an empty bin on the second rank alone"
            norm = train_step(engine, step, ends, BatchConfig(chunk_slots=64), rate).norm
            states[str(number + 1)] = engine.state() | {"norm": norm.float().clone()}
        engine.load_state(load_file(cache / "torch-2.safetensors"), step=2)
        train_step(engine, loader[2], ends, BatchConfig(chunk_slots=64), RATES[2])
        states["from-torch"] = engine.state()
        assert torch.equal(tables[0], ends.embed_VD) and torch.equal(tables[1], ends.head_VD)
        if rank == 0:
            flat = {f"{when}:{name}": tensor for when, state in states.items() for name, tensor in state.items()}
            save_file(flat, cache / file_name(stage, dtype, clip))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank_main(Path(sys.argv[1]))
