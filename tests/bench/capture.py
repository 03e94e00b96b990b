"""Capture against the bare forward of the target over the same length-sorted batches, alternately in one process.

    python tests/bench/capture.py [rows]

The demo's target in bf16, the demo's answers. Capture includes the hooks, the checks, packing, writing and hashing.
"""

import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from data_prep.cache import capture, fixed_threads, length_batches  # noqa: E402
from data_prep.prepare import Preparation  # noqa: E402
from data_prep.run import load_config  # noqa: E402
from data_prep.store import CODEC  # noqa: E402
from dflash.target import PAD_TO  # noqa: E402
from train.config import RunConfig  # noqa: E402


def main(rows: int = 240, repeats: int = 2) -> None:
    folder = ROOT / ".cache/bench-capture"
    for codec in ("bf16", "lowrank"):
        shutil.rmtree(folder, ignore_errors=True)
        overrides = ["+model=demo", f"data.limit={rows}", f"cache.dir={folder}", f"cache.codec={codec}"]
        config = load_config("train", RunConfig, [*overrides, "data.heldout=0.2", "cache.shard_tokens=8192"])
        if not (folder / "targets").exists():
            folder.mkdir(parents=True)
            (folder / "targets").symlink_to(ROOT / ".cache/targets")
        prepared = Preparation(config.model, config.data, config.cache)
        encoded, recipe = prepared.encode(), prepared.features_recipe
        with prepared.running_target() as run, torch.inference_mode():
            target = prepared.load_target(config.cache.dtype)
            seconds = {"bare": [], "capture": []}
            for _ in range(repeats + 1):
                seconds["bare"].append(bare(target, encoded, config.cache))
                for path in folder.glob("features-*/*"):
                    if path.name != CODEC:  # fitting it is not repeated: it costs the same for any size of data
                        path.unlink()
                began = time.perf_counter()
                start = lambda: nullcontext(run)  # noqa: E731
                capture(encoded, prepared.features_folder, recipe, prepared.features_name, config.cache, start)
                seconds["capture"].append(time.perf_counter() - began)
        best = {side: min(values[1:]) for side, values in seconds.items()}  # the first round warms up
        tokens = encoded.manifest["tokens"]
        print(
            f"{codec}: bare forward {tokens / best['bare']:.0f} tokens/s, capture {tokens / best['capture']:.0f}, ratio"
            f" {best['bare'] / best['capture']:.3f}"
        )
    shutil.rmtree(folder)


def bare(target, encoded, config) -> float:
    """Seconds of the body's forward over the batches that capture makes, shard by shard."""
    batches = []
    for shard in range(len(encoded.first_rows) - 1):
        ids = [row.ids_T.tolist() for row in encoded.rows_of(shard)]
        for batch in length_batches(list(map(len, ids)), config.batch_tokens):
            longest = -(-max(len(ids[i]) for i in batch) // PAD_TO) * PAD_TO
            batches.append(torch.tensor([ids[i] + [0] * (longest - len(ids[i])) for i in batch]))
    with fixed_threads(config.threads):
        began = time.perf_counter()
        for ids in batches:
            target.get_decoder()(input_ids=ids, use_cache=False)
        return time.perf_counter() - began


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
