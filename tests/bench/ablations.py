"""The paper's own questions on the demo's target, three short runs each: configs/ablation, in order. Resumable.

    python tests/bench/ablations.py [steps]

Equal rows, steps and start; three seeds, for what chance does. Measured on held-out rows: tau, walked as in serving,
and tau_anchor. Writes ablations.json and .png to runs/. What was found: docs/comparison.md.
"""

import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from data_prep.files import read_json, write_json  # noqa: E402
from data_prep.prepare import Preparation  # noqa: E402
from data_prep.run import load_config  # noqa: E402
from dflash.target import load_ends  # noqa: E402
from train import checkpoint  # noqa: E402
from train.config import RunConfig  # noqa: E402
from train.data import split_rows  # noqa: E402
from train.evaluate import heldout_measures  # noqa: E402
from train.plots import plot_ablations  # noqa: E402

NAMES = ("plain", "fused", "tokens", "fixed_blocks", "depth_1", "depth_5", "no_decay", "dpace")
WARMUP = 60  # steps, the demo's own; with 12, one seed of three was thrown off by its first steps and stayed behind
RUNS = [(name, seed) for name in NAMES for seed in range(3)]


def measure(overrides: list[str], folder: Path) -> dict:
    """Held-out figures of a finished run."""
    config = load_config("train", RunConfig, overrides)
    preparation = Preparation(config.model, config.data, config.cache)
    drafter = checkpoint.load_drafter(checkpoint.latest(folder / "checkpoints"), torch.bfloat16)
    ends = load_ends(preparation.target, preparation.drafter, dtype=torch.bfloat16)
    store = preparation.features()
    measured = heldout_measures(drafter, ends, store, split_rows(store, config.data.heldout)[1], config)
    return measured | {"parameters": sum(parameter.numel() for parameter in drafter.parameters())}


def main(steps: str = "300") -> None:
    runs, found = ROOT / f"runs/ablations-{steps}", {}
    for name, seed in RUNS:
        folder = runs / f"{name}-{seed}"
        overrides = [
            "+model=demo", f"+ablation={name}", "stage=train", f"name={folder.name}", f"runs={runs}", f"seed={seed}",
            "data.limit=1200", "data.heldout=0.08", f"optim.steps={steps}",
            f"optim.warmup={min(WARMUP / int(steps), 0.5)}", "evaluate.every=100000", "evaluate.rows=1",
            f"cache.dir={ROOT}/.cache",
        ]  # fmt: skip
        if not (folder / "measured.json").exists():
            command = [sys.executable, "train/run.py", *overrides]
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            write_json(folder / "measured.json", measure(overrides, folder))
        found.setdefault(name, []).append(measured := read_json(folder / "measured.json"))
        slots = " ".join(f"{p:.2f}" for p in measured["slot_acceptance"])
        print(
            f"{name:13} seed {seed}  tau {measured['tau']:.3f}  tau_anchor {measured['tau_anchor']:.3f}  slots {slots}"
            f"  {measured['blocks']} blocks  {measured['parameters'] / 1e6:.2f} million parameters",
            flush=True,
        )
    write_json(runs / "ablations.json", found)
    plot_ablations(found, runs / "ablations.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
