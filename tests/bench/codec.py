"""What a codec costs in quality: equal training on what it stores, judged through the folded export on live features.

    python tests/bench/codec.py [steps]

For each codec: stored bytes a token against bf16, energy lost, and tau_anchor on held-out rows of the demo (over
20,000 blocks in three seeds), whose features the target computes anew, never packed. Three paired seeds for bf16 and
the default low-rank codec (same start, rows and anchors), one for the rest. What was run: docs/codecs.md.
"""

import contextlib
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from data_prep.cache import capture  # noqa: E402
from data_prep.prepare import Preparation  # noqa: E402
from data_prep.run import load_config  # noqa: E402
from data_prep.store import Online  # noqa: E402
from dflash.target import load_ends  # noqa: E402
from train import checkpoint  # noqa: E402
from train.config import RunConfig  # noqa: E402
from train.data import split_rows  # noqa: E402
from train.evaluate import heldout_measures  # noqa: E402

RUNS = [
    *(run for seed in range(3) for run in (("bf16", None, seed), ("lowrank", 288, seed))),
    ("int8", None, 0),
    ("lowrank", 1440, 0),
    ("lowrank", 576, 0),
    ("lowrank", 144, 0),
]


def prepare(overrides: list[str]):
    config = load_config("train", RunConfig, overrides)
    return config, Preparation(config.model, config.data, config.cache)


def pack(wanted, plain) -> None:
    """The wanted cache, its features taken from the bf16 one: the target runs once for all codecs."""
    (config, prepared), whole = wanted, plain[1].features()
    rows = prepared.encode()
    places = {tuple(rows.row(i, features=False).ids_T.tolist()): i for i in range(len(rows))}

    @contextlib.contextmanager
    def stored():
        yield lambda ids: [(whole.row(places[tuple(row)]).features_TF,) for row in ids]

    capture(rows, prepared.features_folder, prepared.features_recipe, prepared.features_name, config.cache, stored)


def main(steps: str = "300") -> None:
    runs = ROOT / f".cache/bench-codec-{steps}"
    print(
        f"{'codec':8} {'rank':>5} {'seed':>4} {'bytes':>6} {'of bf16':>8} {'lost':>7} {'tau_anchor':>11} {'blocks':>7}"
    )
    for codec, rank, seed in RUNS:
        name = f"{codec}-{rank}-{seed}"
        overrides = [
            "+model=demo", "stage=train", f"name={name}", f"runs={runs}", f"seed={seed}", "data.limit=1200",
            "data.heldout=0.08", f"optim.steps={steps}", "evaluate.every=100000", "evaluate.rows=1",
            f"cache.dir={ROOT}/.cache", f"cache.codec={codec}", *([f"cache.rank={rank}"] if rank else []),
        ]  # fmt: skip
        pack(prepare(overrides), prepare([*overrides, "cache.codec=bf16", "cache.rank=null"]))
        subprocess.run([sys.executable, "train/run.py", *overrides], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        config, prepared = prepare(overrides)
        stored = prepared.features()
        drafter = checkpoint.load_drafter(checkpoint.latest(runs / name / "checkpoints"), torch.bfloat16)
        with prepared.running_target() as run:
            live = Online(prepared.rows_folder, run)
            ends = load_ends(prepared.target, prepared.drafter, dtype=torch.bfloat16)
            measured = heldout_measures(drafter, ends, live, split_rows(live, config.data.heldout)[1], config)
        size, whole = prepared.bytes_per_token, 2 * drafter.fc.in_features
        print(
            f"{codec:8} {rank or '':>5} {seed:>4} {size:>6} {size / whole:>8.3f} {stored.codec.error:>7.3%}"
            f" {measured['tau_anchor']:>11.4f} {measured['blocks']:>7}",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
