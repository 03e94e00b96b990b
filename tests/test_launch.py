"""Who starts the ranks, and how they end. References: Slurm's documented variables, a bare script's exit codes, and
what the ranks print.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import run_helpers as helpers

from train import launch
from train.config import EngineConfig, LaunchConfig, OptimConfig
from train.engine import deepspeed_config

RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("gpu07", "gpu07"),
        ("gpu[07-09,12],fat1", "gpu07"),
        ("a-1,b-2", "a-1"),
        ("n[3]", "n3"),
        ("r1n[001,004]", "r1n001"),
    ],
)
def test_first_host_of_slurms_lists(nodes, first):
    assert launch.first_host(nodes) == first


def slurm(monkeypatch, tasks, nodes, task):
    for name in RANK_NAMES:
        monkeypatch.delenv(name, raising=False)
    values = {"STEP_NUM_TASKS": tasks, "STEP_NUM_NODES": nodes, "STEP_NODELIST": "gpu[3-4]", "JOB_ID": 40123}
    values |= {"PROCID": task, "LOCALID": task % (tasks // nodes), "NODEID": task // (tasks // nodes)}
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


def test_one_slurm_task_a_gpu_is_a_rank(monkeypatch):
    slurm(monkeypatch, tasks=8, nodes=2, task=5)
    launch.adopt_slurm(LaunchConfig())
    assert [os.environ[name] for name in RANK_NAMES] == ["5", "8", "1", "gpu3", "20123"]
    assert launch.launched() and not launch.ours()


def test_one_slurm_task_a_node_starts_that_nodes_ranks(monkeypatch):
    slurm(monkeypatch, tasks=2, nodes=2, task=1)
    config = LaunchConfig()
    launch.adopt_slurm(config)
    assert (config.nnodes, config.node_rank, config.rendezvous) == (2, 1, "gpu3:20123") and not launch.launched()


def test_a_single_slurm_task_and_other_launchers_are_left_alone(monkeypatch):
    slurm(monkeypatch, tasks=1, nodes=1, task=0)
    config = LaunchConfig()
    launch.adopt_slurm(config)
    assert config == LaunchConfig() and not launch.launched()
    slurm(monkeypatch, tasks=4, nodes=1, task=2)
    for name, value in zip(RANK_NAMES, ("0", "1", "0", "host", "1")):  # torchrun inside an allocation
        monkeypatch.setenv(name, value)
    launch.adopt_slurm(config)
    assert os.environ["RANK"] == "0" and os.environ["MASTER_ADDR"] == "host"


RANKS = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from train.config import LaunchConfig
from train.launch import run_ranks
if "RANK" in os.environ:
    rank = os.environ["RANK"]
    if sys.argv[1] == "fail" and rank == "1":
        raise RuntimeError("the disk of rank 1 is broken")
    def save(*_):
        time.sleep(1)
        print("saved by " + rank + "\\n", end="", flush=True)  # in one write: the other rank has the same pipe
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
    print("rank " + rank + " of " + os.environ["WORLD_SIZE"] + "\\n", end="", flush=True)
    time.sleep(0 if sys.argv[1] == "end" else 60)
else:
    nodes = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    where = dict(nnodes=nodes, node_rank=int(sys.argv[2]), rendezvous=sys.argv[4]) if nodes > 1 else {{}}
    run_ranks(__file__, sys.argv[1:2], LaunchConfig(ranks=2, grace=20, **where))
    print("all done", flush=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "ranks.py"
    path.write_text(RANKS.format(root=str(helpers.ROOT)))
    return path


def start(script, *arguments):
    return subprocess.Popen(
        [sys.executable, str(script), *arguments], env=helpers.environment(), start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process, timeout=60):
    try:
        return *process.communicate(timeout=timeout), process.returncode
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_failed_rank_ends_the_others_with_its_error_on_the_console(script):
    began = time.perf_counter()
    out, err, code = finish(start(script, "fail"))
    assert code == 1 and "all done" not in out and time.perf_counter() - began < 40
    assert "the disk of rank 1 is broken" in err and "rank 1 ended with code 1" in err


def test_a_signal_to_the_launcher_lets_the_ranks_save(script):
    process = start(script, "wait")
    try:
        for _ in range(2):
            assert process.stdout.readline().startswith("rank")
        process.send_signal(signal.SIGTERM)
        out, err, code = finish(process, timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert sorted(line for line in out.splitlines() if "saved" in line) == ["saved by 0", "saved by 1"]
    assert code == 143 and "SIGTERM" in err and "all done" not in out


def test_two_launchers_make_one_group(script):
    """As on two nodes: the same command with two node ranks and one rendezvous."""
    port = helpers.free_port()
    both = [start(script, "end", str(node), "2", f"127.0.0.1:{port}") for node in (0, 1)]
    ended = [finish(process) for process in both]
    assert [code for *_, code in ended] == [0, 0], ended
    lines = [line for out, *_ in ended for line in out.splitlines()]
    assert sorted(lines) == ["all done"] * 2 + [f"rank {rank} of 4" for rank in range(4)]


def test_a_users_deepspeed_file_is_merged_and_checked(tmp_path):
    path = tmp_path / "ds.json"

    def merged(theirs, **engine):
        path.write_text(json.dumps(theirs))
        return deepspeed_config(OptimConfig(), EngineConfig(deepspeed=path, zero_stage=2, **engine))

    found = merged(
        {"zero_optimization": {"overlap_comm": True}, "wall_clock_breakdown": True, "gradient_clipping": "auto"}
    )
    assert found["zero_optimization"] == {"overlap_comm": True, "stage": 2} and found["wall_clock_breakdown"]
    assert found["gradient_clipping"] == 1.0 and found["bf16"] == {"enabled": True}
    for theirs, words in [
        ({"zero_optimization": {"stage": 3}}, ["zero_optimization=3", "2"]),
        ({"gradient_clipping": 0.5}, ["gradient_clipping=0.5", "1.0"]),
        ({"train_micro_batch_size_per_gpu": 4}, ["train_micro_batch_size_per_gpu=4"]),
        ({"optimizer": {}}, ["optimizer", "optim.*"]),
    ]:
        with pytest.raises(ValueError, match=r"^engine\.deepspeed: ") as error:
            merged(theirs)
        assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
