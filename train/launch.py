"""Start the ranks of this node with torch's elastic launcher, when no launcher did; adopt those that Slurm started."""

import os
import re
import sys

import torch

from train.config import LaunchConfig


def launched() -> bool:
    """Whether this process is a rank that a launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def ours() -> bool:
    """Whether the launcher was `run_ranks`, whose caller goes on after the training."""
    return os.environ.get("DFLASH_LAUNCHED") == "1"


def leave() -> None:
    """End this rank when all is done, without C++ destructors: a thread of gloo or DeepSpeed may still be alive, and
    would abort the process there."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def adopt_slurm(config: LaunchConfig) -> None:
    """Under `srun`: with several tasks a node this process is a rank; with one a node it shall start that node's ranks.

    A launcher's own variables, and launch.nnodes, come first.
    """
    env, several = os.environ, int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1
    if launched() or config.nnodes > 1 or not several:
        return
    host = first_host(env["SLURM_STEP_NODELIST"])
    port = 20_000 + int(env["SLURM_JOB_ID"]) % 20_000  # any that all tasks agree on
    if env["SLURM_STEP_NUM_TASKS"] == env["SLURM_STEP_NUM_NODES"]:
        config.nnodes, config.node_rank = int(env["SLURM_STEP_NUM_NODES"]), int(env["SLURM_NODEID"])
        config.rendezvous = f"{host}:{port}"
        return
    env |= {"RANK": env["SLURM_PROCID"], "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"], "LOCAL_RANK": env["SLURM_LOCALID"]}
    env |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


def first_host(nodes: str) -> str:
    """The first of a Slurm list of nodes, e.g. gpu07 of gpu[07-09,12],fat1."""
    prefix, number = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes).groups()
    return prefix + (number or "")


def num_ranks(config: LaunchConfig) -> int:
    """Ranks of this node."""
    return config.ranks or max(torch.cuda.device_count(), 1)


def run_ranks(script: str, arguments: list[str], config: LaunchConfig) -> None:
    """Run `script` in the ranks of this node; returns when all are done. Raises SystemExit where one failed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as Elastic
    from torch.distributed.launcher.api import elastic_launch

    ranks = num_ranks(config)
    os.environ["DFLASH_LAUNCHED"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // ranks, 1)))
    # Alone, gloo and the rendezvous stay on this node.
    alone = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0"}
    several = {"rdzv_backend": "static", "rdzv_endpoint": config.rendezvous, "rdzv_configs": {"rank": config.node_rank}}
    elastic = Elastic(
        min_nodes=config.nnodes, max_nodes=config.nnodes, nproc_per_node=ranks, max_restarts=0, run_id="dflash",
        shutdown_timeout=config.grace, signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        **(several if config.nnodes > 1 else alone),
    )  # fmt: skip
    try:
        elastic_launch(elastic, sys.executable)("-u", script, *arguments)
    except ChildFailedError as error:
        rank, failure = next(iter(error.failures.items()))
        print(f"rank {rank} ended with code {failure.exitcode}; its message stands above", file=sys.stderr)
        raise SystemExit(1) from None
    except SignalException as error:
        print(f"launcher: ended by signal {error.sigval.name}, as were the ranks", file=sys.stderr)
        raise SystemExit(128 + error.sigval) from None
