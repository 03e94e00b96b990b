"""Start the ranks of this node with torch's elastic launcher, when no launcher did."""

import os
import sys

import torch

from train.config import LaunchConfig


def launched() -> bool:
    """Whether this process is a rank that a launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def ours() -> bool:
    """Whether the launcher was `run_ranks`, whose caller goes on after the training."""
    return os.environ.get("DFLASH_LAUNCHED") == "1"


def num_ranks(config: LaunchConfig) -> int:
    return config.ranks or max(torch.cuda.device_count(), 1)


def run_ranks(script: str, arguments: list[str], ranks: int) -> None:
    """Run `script` in so many processes; returns when all are done. Raises SystemExit with a failed rank's code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as Elastic
    from torch.distributed.launcher.api import elastic_launch

    # Gloo and the rendezvous stay on this node; each rank gets its share of the cores.
    os.environ["DFLASH_LAUNCHED"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // ranks, 1)))
    elastic = Elastic(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        max_restarts=0, run_id="dflash",
    )  # fmt: skip
    try:
        elastic_launch(elastic, sys.executable)("-u", script, *arguments)
    except ChildFailedError as error:
        rank, failure = next(iter(error.failures.items()))
        print(f"rank {rank} ended with code {failure.exitcode}; its message stands above", file=sys.stderr)
        raise SystemExit(1) from None
