"""What only a GPU can show: FlexAttention against the dense mask, no recompiles, bf16 training, speed and memory.

    python tests/gpu/check.py

Needs `dflash` and torch 2.11 or newer alone, and under 8 minutes on one GPU. Without a GPU it runs the same at tiny
size on the CPU (FlexAttention has no backward there: outputs alone are compared), which proves the script, not the
speed.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import Qwen3Config

from dflash.blocks import attention_mask, decay_weights, make_blocks
from dflash.flops import peak_flops, step_flops
from dflash.model import DFlashDraftModel, TargetEnds, attend
from dflash.objective import BlockBatch, block_loss, padded

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
# Qwen3-8B's drafter, and a bin of its training; or the same in small.
SHAPE = {"hidden": 4096, "layers": 5, "heads": 32, "kv": 8, "mlp": 12288, "vocab": 151_936, "taps": 5, "size": 16}
BIN = {"tokens": 4096, "anchors": 512, "documents": 4}
if not GPU:
    SHAPE = {"hidden": 64, "layers": 2, "heads": 4, "kv": 2, "mlp": 96, "vocab": 512, "taps": 3, "size": 8}
    BIN = {"tokens": 192, "anchors": 16, "documents": 3}


def bin_of(seed: int, features: int, shape: dict, tokens: int, anchors: int, documents: int, dtype) -> BlockBatch:
    """A bin of several documents that does not quite fill the budgets, then padded to them."""
    g = torch.Generator().manual_seed(seed)
    used = tokens - int(torch.randint(1, tokens // 8, (1,), generator=g))
    cuts = torch.randperm(used - 2, generator=g)[: documents - 1].sort().values + 1
    bounds = torch.cat((torch.zeros(1, dtype=torch.long), cuts, torch.tensor([used])))
    ids = torch.randint(5, shape["vocab"], (used,), generator=g)
    mask = torch.rand(used, generator=g) < 0.9
    eligible = (mask[:-1] & mask[1:]).nonzero()[:, 0]
    chosen = eligible[torch.randperm(len(eligible), generator=g)[: anchors - 3]].sort().values
    blocks = make_blocks(ids, mask, bounds, chosen, shape["size"], 3, 7.0)
    position = torch.cat([torch.arange(int(n)) for n in bounds.diff()])
    features_TF = torch.randn(used, features, generator=g).to(dtype)
    weighted = blocks.weight_AS.flatten().nonzero()[:, 0]
    batch = padded(BlockBatch(features_TF, ids, position, blocks, weighted), tokens, anchors)
    move = lambda t: t.to(DEVICE)  # noqa: E731
    moved = type(blocks)(**{name: move(tensor) for name, tensor in vars(batch.blocks).items()})
    return BlockBatch(move(batch.features_TF), move(batch.ids_T), move(batch.position_T), moved, move(batch.weighted_N))


def model_of(shape: dict, dtype) -> tuple[DFlashDraftModel, TargetEnds]:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["mlp"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["kv"],
        head_dim=shape["hidden"] // shape["heads"], block_size=shape["size"], num_target_layers=36,
        dflash_config={"target_layer_ids": list(range(1, shape["taps"] + 1)), "mask_token_id": 3},
    )  # fmt: skip
    with DEVICE:
        drafter = DFlashDraftModel(config).to(dtype)
        tables = [torch.randn(shape["vocab"], shape["hidden"], dtype=dtype).mul_(0.02) for _ in range(2)]
    return drafter, TargetEnds(*tables)


def check_flex() -> None:
    """Attention by FlexAttention's BlockMask equals attention by the dense mask; on a GPU the gradients too."""
    worst = {"output": 0.0, "gradient": 0.0}
    for seed in range(4):
        batch = bin_of(seed, 8, SHAPE | {"vocab": 64}, 256, 16, 3, torch.float32)
        geometry = batch.blocks.anchor_A, batch.blocks.start_A, 256, SHAPE["size"]
        queries = 16 * SHAPE["size"]
        g = torch.Generator(DEVICE).manual_seed(seed)
        shapes = ((1, 4, queries, 32), (1, 2, 256 + queries, 32), (1, 2, 256 + queries, 32))
        inputs = [torch.randn(shape, generator=g, device=DEVICE, requires_grad=GPU) for shape in shapes]
        found = []
        for dense in (True, False):
            out = attend(*inputs, attention_mask(*geometry, dense=dense))
            grads = torch.autograd.grad(out.square().sum(), inputs) if GPU else []
            found.append((out.detach(), grads))
        (out, grads), (flex, flex_grads) = found
        worst["output"] = max(worst["output"], float((out - flex).abs().max()))
        for a, b in zip(grads, flex_grads):
            worst["gradient"] = max(worst["gradient"], float((a - b).norm() / a.norm()))
    print(f"flex against dense, fp32: output {worst['output']:.1e}, gradient {worst['gradient']:.1e} (relative)")
    # TF32 is off by default for matrix products; FlexAttention's kernels may use it.
    assert worst["output"] < 5e-3 and worst["gradient"] < 5e-3


def check_training() -> None:
    """bf16 with fp32 masters learns a fixed bin; bins of other content compile nothing new."""
    drafter, ends = model_of(SHAPE | {"hidden": 256 if GPU else 64, "mlp": 512, "layers": 2}, torch.float32)
    ends = TargetEnds(ends.embed_VD.bfloat16(), ends.head_VD.bfloat16())
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, fused=True)
    bins = [bin_of(seed, drafter.fc.in_features, SHAPE, 512, 32, 3, torch.bfloat16) for seed in range(8)]
    losses = []
    for step in range(60):
        batch = bins[0] if step < 50 else bins[step % 8]
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = block_loss(drafter, batch, ends, 256).loss / batch.blocks.weight_AS.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step == 50:  # the second bin: everything is compiled
            compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    again = torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiled
    print(f"bf16 training on one bin: loss {float(losses[0]):.2f} -> {float(losses[49]):.2f}; recompiles: {again}")
    assert losses[49] < 0.8 * losses[0] and again == 0


def speed(compiled: bool) -> None:
    """Forward and backward at the true geometry: tokens/s, share of the peak, memory."""
    drafter, ends = model_of(SHAPE, torch.bfloat16)
    if compiled:
        drafter.compile()
    bins = [bin_of(seed, drafter.fc.in_features, SHAPE, **BIN, dtype=torch.bfloat16) for seed in range(3)]
    if GPU:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()

    def one(batch):
        (block_loss(drafter, batch, ends, 2048).loss / batch.blocks.weight_AS.sum()).backward()
        drafter.zero_grad()

    for batch in bins:
        one(batch)
    times, repeats = [], 10 if GPU else 2
    for round_ in range(repeats):
        if GPU:
            torch.cuda.synchronize()
        began = time.perf_counter()
        one(bins[round_ % 3])
        if GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    seconds, blocks = sorted(times)[len(times) // 2], bins[0].blocks
    pairs = SHAPE["size"] * int((blocks.anchor_A - blocks.start_A + SHAPE["size"]).sum())
    work = step_flops(
        drafter.config,
        drafter.fc.in_features,
        BIN["tokens"],
        BIN["anchors"] * SHAPE["size"],
        len(bins[0].weighted_N),
        pairs,
    )
    peak = peak_flops()
    mfu = f", {work / seconds / peak:.0%} of the peak" if peak else ""
    memory = f", {(torch.cuda.max_memory_allocated() - held) / 2**30:.1f} GiB above weights and bins" if GPU else ""
    name = "compiled" if compiled else "eager"
    print(f"{name}: {BIN['tokens'] / seconds:.0f} tokens/s, {work / seconds / 1e12:.3g} useful TFLOP/s{mfu}{memory}")


if __name__ == "__main__":
    print(torch.__version__, torch.cuda.get_device_name() if GPU else "CPU: tiny size, no speed to speak of")
    assert abs(float(decay_weights(16, 7.0)[2]) - 0.8668779) < 1e-6
    check_flex()
    check_training()
    speed(compiled=False)
    if GPU:
        speed(compiled=True)
    print("all checks passed")
