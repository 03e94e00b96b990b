"""The method's claim: at equal acceptance length a block drafter is faster than one that drafts token by token.

    python tests/bench/claim.py [steps] [prompts of each set but the first, which has 24]

DFlash and the two baselines of dflash/baselines.py on the demo's target: one cache, equal optimiser steps and
near-equal parameters; then the target alone and each drafter, the baselines at every draft length, on the same prompts,
alternately, in one loop and run. What was measured: docs/comparison.md.
"""

import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from data_prep.files import write_json  # noqa: E402
from data_prep.prepare import Preparation  # noqa: E402
from data_prep.run import load_config  # noqa: E402
from dflash.generate import generate  # noqa: E402
from train import checkpoint  # noqa: E402
from train.config import RunConfig  # noqa: E402
from train.evaluate import evaluation_prompts  # noqa: E402
from train.figures import interval, resample  # noqa: E402

KINDS = ("dflash", "eagle3", "mtp")
WARMUP = 60  # steps, the demo's own
NEAREST = "arithmetic"  # the set on which every draft length is tried
SETS = f"['{NEAREST}:24',gsm_symbolic,humaneval,mt_bench]"  # first turns


def measure(target, drafters: dict, prompts: list, stops, config, sizes: dict) -> dict:
    """Of each (kind, block size) and prompt [N, 5]: tokens, seconds, drafts' seconds, emitted tokens, rounds."""
    ways = [("alone", 1), *((kind, size) for kind in drafters for size in sizes[kind])]
    parts = {way: [] for way in ways}
    for number, prompt in enumerate(prompts):
        input_ids, first = torch.tensor([prompt.ids]), number % len(ways)
        for kind, size in ways[first:] + ways[:first]:
            drafter = drafters.get(kind)
            options = {"block_size": size} if drafter is not None else {}
            out = generate(target, input_ids, config.max_new_tokens, drafter, stop_token_ids=stops, **options)
            parts[kind, size].append(
                [len(out.tokens), out.seconds, out.draft_seconds, sum(out.accepted), len(out.accepted)]
            )
    return {way: torch.tensor(part, dtype=torch.float64) for way, part in parts.items()}


def figures(parts: dict) -> list[dict]:
    """One line a way."""
    lines = []
    for (kind, size), part in parts.items():
        tokens, seconds, draft, emitted, rounds = part.sum(0).tolist()
        ratio, within = faster(part, parts["alone", 1])
        lines.append({
            "drafter": kind, "drafts": size - 1, "tau": emitted / rounds, "tokens_per_second": tokens / seconds,
            "ratio": ratio, "ratio_interval": within, "draft_share": draft / seconds,
            "draft_ms_a_round": 1000 * draft / rounds,
        })  # fmt: skip
    return lines


def faster(one: torch.Tensor, other: torch.Tensor) -> tuple[float, list[float]]:
    """Quotient of two ways' tokens/s, and its 95 % interval over draws of the prompts."""
    both_N4 = torch.cat((one[:, :2], other[:, :2]), dim=1)

    def quotient(sums):
        return sums[..., 0] / sums[..., 1] * sums[..., 3] / sums[..., 2]

    return float(quotient(both_N4.sum(0))), interval(quotient(resample(both_N4)))


def verdict(lines: list[dict], parts: dict) -> list[str]:
    """What the lines of one set say of the claim: drafting time at equal length, and speed at equal tau."""
    block = next(line for line in lines if line["drafter"] == "dflash")
    said = []
    for kind in KINDS[1:]:
        mine = [line for line in lines if line["drafter"] == kind]
        longest = next(line for line in mine if line["drafts"] == block["drafts"])
        times = longest["draft_ms_a_round"] / block["draft_ms_a_round"]
        said.append(f"{kind}: {block['drafts']} drafts take {times:.2f} times as long as dflash's block")
        near = min(mine, key=lambda line: abs(line["tau"] - block["tau"]))
        off = near["tau"] / block["tau"] - 1
        if abs(off) > 0.05:
            said.append(f"{kind}: no draft length comes within 5 % of dflash's tau (nearest {off:+.0%}): not shown")
        else:
            times, (low, high) = faster(parts["dflash", block["drafts"] + 1], parts[kind, near["drafts"] + 1])
            said.append(
                f"{kind}: at {near['drafts']} drafts its tau is dflash's {off:+.1%}, its ratio {near['ratio']:.2f}"
                f" against {block['ratio']:.2f}; dflash is {times:.2f} ({low:.2f} to {high:.2f}) times as fast"
            )
    return said


def main(steps: str = "800", prompts: str = "12") -> None:
    runs, drafters = ROOT / "runs/claim", {}
    common = ["+model=demo", f"cache.dir={ROOT}/.cache", f"evaluate.sets={SETS}", f"evaluate.prompts={prompts}"]
    warmup = min(WARMUP / int(steps), 0.5)
    trained = ["stage=train", "evaluate.every=100000", f"optim.steps={steps}", f"optim.warmup={warmup}"]
    for kind in KINDS:
        own = [f"name={kind}-{steps}", f"runs={runs}", f"drafter.kind={kind}"]
        subprocess.run([sys.executable, "train/run.py", *common, *trained, *own], check=True, cwd=ROOT)
        path = checkpoint.latest(runs / f"{kind}-{steps}/checkpoints")
        drafters[kind] = checkpoint.load_drafter(path, torch.bfloat16)
        count = sum(parameter.numel() for parameter in drafters[kind].parameters())
        print(f"{kind}: {count / 1e6:.2f} million parameters, {steps} steps", flush=True)
    config = load_config("train", RunConfig, common)
    preparation = Preparation(config.model, config.data, config.cache)
    sets, target = evaluation_prompts(config, preparation), preparation.load_target("bfloat16")
    size, report = config.model.block_size, {}
    measure(target, drafters, sets[NEAREST][:1], preparation.stops, config.evaluate, {kind: [size] for kind in KINDS})
    for name, asked in sets.items():
        lengths = range(2, size + 1) if name == NEAREST else [size]
        sizes = {"dflash": [size], "eagle3": lengths, "mtp": lengths}
        parts = measure(target, drafters, asked, preparation.stops, config.evaluate, sizes)
        report[name] = figures(parts)
        print(f"{name}, {len(asked)} prompts")
        for line in report[name]:
            told = {**line, "ratio_interval": " to ".join(f"{end:.2f}" for end in line["ratio_interval"])}
            print("  " + "  ".join(f"{key} {v:.3g}" if isinstance(v, float) else f"{v}" for key, v in told.items()))
        if name == NEAREST:
            print("\n".join(verdict(report[name], parts)), flush=True)
    write_json(runs / f"claim-{steps}.json", report)


if __name__ == "__main__":
    main(*sys.argv[1:])
