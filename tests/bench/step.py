"""A training step against a straightforward one: tokens/s, and peak memory above model and optimiser.

    python tests/bench/step.py            both cases, then how time and memory grow
    python tests/bench/step.py compare    both cases alone

The other side is what a competent engineer would write first: rows padded to the longest, every slot of every block,
one dense mask over context and all blocks, full logits of slots 1 to S-1, `F.cross_entropy`. Same drafter, rows,
anchors, dtype and threads; loss and gradients of both are compared first. Geometry: T = 1024 tokens, up to 128 anchors
a row, S = 16, hidden 576, vocabulary 49,152, two layers, on random features.

Cases: every slot supervised, one row; and a batch of chat rows, whose lengths and supervised shares follow the
committed histogram of the demo target's answers (tests/bench/chat_rows.json).
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from transformers import Qwen3Config  # noqa: E402

from dflash.blocks import decay_weights, eligible_anchors, visible  # noqa: E402
from dflash.config import ModelConfig  # noqa: E402
from dflash.flops import step_flops  # noqa: E402
from dflash.model import DFlashDraftModel, TargetEnds  # noqa: E402
from dflash.objective import block_loss  # noqa: E402
from train.config import EngineConfig, OptimConfig  # noqa: E402
from train.data import make_batch, pack  # noqa: E402
from train.engine import TorchEngine  # noqa: E402

HIDDEN, VOCAB, TAPS, GAMMA, MASK, CHUNK = 576, 49_152, 5, 7.0, 4, 256  # CHUNK: batch.chunk_slots


class Row:
    """A row as the store gives it."""

    def __init__(self, length: int, supervised: int, seed: int, dtype: torch.dtype):
        g = torch.Generator().manual_seed(seed)
        self.ids_T = torch.randint(5, VOCAB, (length,), generator=g)
        self.loss_mask_T = torch.arange(length) >= length - supervised
        self.features_TF = torch.randn(length, TAPS * HIDDEN, generator=g).to(dtype)
        self.last_TD = None


def drafter_of(vocab: int, size: int) -> DFlashDraftModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=HIDDEN, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, block_size=size, num_target_layers=30,
        dflash_config={"target_layer_ids": [1, 8, 14, 20, 27], "mask_token_id": MASK},
    )  # fmt: skip
    return DFlashDraftModel(config)


def ours(engine, rows, anchors, ends, size: int, budgets=(1024, 128)):
    """Our step's forward and backward; returns the loss."""
    model = ModelConfig("bench", block_size=size, taps=[1, 8, 14, 20, 27], mask_token_id=MASK, gamma=GAMMA)
    bins = pack([len(row.ids_T) for row in rows], list(map(len, anchors)), *budgets)
    batches = [make_batch([rows[i] for i in items], [anchors[i] for i in items], model) for items in bins]
    total, loss = sum(float(b.blocks.weight_AS.double().sum()) for b in batches), 0.0
    for number, batch in enumerate(batches):
        result = block_loss(engine, batch, ends, CHUNK).loss
        engine.backward(result, total, last=number == len(batches) - 1)
        loss += float(result.detach())
    return loss / total


def plain(engine, rows, anchors, ends, size: int):
    """The straightforward step's forward and backward; returns the loss."""
    longest, most = max(len(row.ids_T) for row in rows), max(map(len, anchors))
    features, positions, inputs, labels, weights, masks = [], [], [], [], [], []
    for row, chosen in zip(rows, anchors):
        length, count = len(row.ids_T), len(chosen)
        features.append(F.pad(row.features_TF, (0, 0, 0, longest - length)))
        anchor = F.pad(chosen, (0, most - count))
        slot = anchor[:, None] + torch.arange(size)
        inside = (slot < length) & (torch.arange(most) < count)[:, None]
        slot = slot.clamp(max=length - 1)
        learned = inside & row.loss_mask_T[slot]
        learned[:, 0] = True
        weights.append(decay_weights(size, GAMMA) * learned.cumprod(dim=1) * (torch.arange(most) < count)[:, None])
        block = torch.full_like(slot, MASK)
        block[:, 0] = row.ids_T[anchor]
        inputs.append(block.flatten())
        labels.append(row.ids_T[slot])
        positions.append(torch.cat((torch.arange(longest), (anchor[:, None] + torch.arange(size)).flatten())))
        see = visible(anchor, torch.zeros_like(anchor), longest, size)
        masks.append(see(None, None, torch.arange(most * size)[:, None], torch.arange(longest + most * size)))
    embeds = ends.embed(torch.stack(inputs))
    hidden = engine(embeds, torch.stack(features), torch.stack(positions), torch.stack(masks)[:, None])
    hidden = hidden.unflatten(1, (most, size))[:, :, 1:]
    weight, label = torch.stack(weights)[:, :, 1:].flatten(), torch.stack(labels)[:, :, 1:].flatten()
    logits = ends.logits(hidden.reshape(-1, HIDDEN)).float()
    loss = (weight * F.cross_entropy(logits, label, reduction="none")).sum()
    engine.backward(loss, float(weight.sum()), last=True)
    return float(loss.detach() / weight.sum())


def setting(case: str, anchors_per_row=128, length=1024, vocab=VOCAB, size=16, dtype="bfloat16"):
    """(engine, rows, anchors, ends) of a case."""
    engine = TorchEngine(drafter_of(vocab, size), OptimConfig(), EngineConfig(dtype=dtype), torch.device("cpu"))
    g = torch.Generator().manual_seed(1)
    ends = TargetEnds(*(torch.randn(vocab, HIDDEN, generator=g).mul(0.03).to(getattr(torch, dtype)) for _ in range(2)))
    if case == "every slot":
        shapes = [(length, length)]
    else:
        histogram = json.loads((Path(__file__).parent / "chat_rows.json").read_text())
        shapes = random.Random(0).choices(histogram["shapes"], histogram["counts"], k=4)
    rows = [Row(*shape, i, getattr(torch, dtype)) for i, shape in enumerate(shapes)]
    anchors = []
    for row in rows:
        row.ids_T = row.ids_T % vocab
        eligible = eligible_anchors(row.loss_mask_T)
        chosen = torch.randperm(len(eligible), generator=g)[:anchors_per_row]
        anchors.append(eligible[chosen].sort().values)
    return engine, rows, anchors, ends


def measure(side: str, case: str, repeats: int, **changes) -> dict:
    """Seconds a step (the fastest), and peak memory above what was there before, in a process of its own."""
    call = f"step.one({side!r}, {case!r}, {repeats}, {changes!r})"
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import step; {call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def one(side: str, case: str, repeats: int, changes: dict) -> None:
    size = changes.get("size", 16)
    engine, rows, anchors, ends = setting(case, **changes)
    run = lambda: (ours if side == "ours" else plain)(engine, rows, anchors, ends, size)  # noqa: E731
    for p in engine.module.parameters():  # gradients and moments are part of model and optimiser
        p.grad = torch.zeros_like(p)
    engine.step(0.0)
    before, seconds = status("VmRSS"), []
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # start the kernel's high-water mark anew
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
        engine.optimizer.zero_grad()
    high = status("VmHWM")
    tokens = sum(len(row.ids_T) for row in rows)
    print(json.dumps({"seconds": min(seconds), "memory": high - before, "tokens": tokens}))


def status(name: str) -> float:
    """A figure of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def same(case: str) -> None:
    """Loss and gradients of both sides are equal, in fp32."""
    found = []
    for run in (ours, plain):
        engine, rows, anchors, ends = setting(case, dtype="float32")
        loss = run(engine, rows, anchors, ends, 16)
        found.append((loss, torch.cat([p.grad.flatten() for p in engine.module.parameters()])))
    (a, grad_a), (b, grad_b) = found
    error = float((grad_a - grad_b).norm() / grad_b.norm())
    assert abs(a / b - 1) < 1e-5 and error < 1e-4, (a, b, error)
    print(f"{case}: same loss ({a:.4f}) and gradient (relative difference {error:.1e}) in fp32")


def compare() -> None:
    for case in ("every slot", "chat rows"):
        same(case)
        sides = {"ours": [], "plain": []}
        for _ in range(2):  # back to back
            for side in sides:
                sides[side].append(measure(side, case, 3))
        best = {side: min(runs, key=lambda run: run["seconds"]) for side, runs in sides.items()}
        for side, run in best.items():
            print(f"  {side:6} {run['tokens'] / run['seconds']:8.0f} tokens/s  {run['memory']:8.0f} MiB")
        speed = best["plain"]["seconds"] / best["ours"]["seconds"]
        memory = min(r["memory"] for r in sides["ours"]) / min(r["memory"] for r in sides["plain"])
        print(f"  ratio  {speed:8.2f} x the tokens/s  {memory:8.2f} x the memory")


def growth() -> None:
    print("how a step grows (ours, every slot):  seconds, MiB")
    for name, values in {
        "length": (256, 512, 1024, 2048, 4096),
        "anchors_per_row": (32, 64, 128, 256, 512),
        "vocab": (12_288, 24_576, 49_152, 98_304),
    }.items():
        runs = [measure("ours", "every slot", 2, **{name: value}) for value in values]
        print(f"  {name:15}", "  ".join(f"{v}: {r['seconds']:.2f} s {r['memory']:.0f}" for v, r in zip(values, runs)))


def shares() -> None:
    """Where the time goes: useful FLOPs at the matrix peak of this machine, as a share of a step's time."""
    a, b = torch.randn(2048, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - began)
    peak = 2 * 2048**3 / min(seconds)
    engine, _, anchors, _ = setting("every slot")
    config, A, S, T = engine.module.config, 128, 16, 1024
    pairs = S * sum(int(i) + S for i in anchors[0])
    weighted = int((torch.arange(S)[None, 1:] + anchors[0][:, None] < T).sum())
    parts = {
        "context, blocks": step_flops(config, TAPS * HIDDEN, T, A * S, 0, 0),
        "attention": step_flops(config, TAPS * HIDDEN, 0, 0, 0, pairs),
        "head": step_flops(config, TAPS * HIDDEN, 0, 0, weighted, 0),
    }
    taken = measure("ours", "every slot", 3)["seconds"]
    print(
        f"matrix peak {peak / 1e9:.0f} GFLOP/s (bf16, 2048 x 2048); a step takes {taken:.2f} s, of which at that peak:"
    )
    for name, flops in parts.items():
        print(f"  {name:16} {flops / peak:.2f} s ({flops / peak / taken:.0%})")
    print(f"  the rest         {1 - sum(parts.values()) / peak / taken:.0%}")


if __name__ == "__main__":
    compare()
    if "compare" not in sys.argv:
        growth()
        shares()
