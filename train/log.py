"""What a run says, and where: console, `log.jsonl` in the run's folder, and wandb (off by default; its one door)."""

import contextlib
import json
import math
import resource
from pathlib import Path

import torch

from dflash.flops import peak_flops, step_flops
from dflash.model import DFlashDraftModel
from train.config import LogConfig, RunConfig, Wandb
from train.data import Step
from train.engine import ranks

SUSPICIOUS = 0.97  # share of blocks with a right slot 1 that no published drafter reaches


class Log:
    """A context manager; only rank 0 has one that writes (`enabled`)."""

    def __init__(self, folder: Path, config: LogConfig, name: str, run_config: dict, enabled: bool, run_id=None):
        self.enabled, self.wandb, self.run_id = enabled, None, run_id
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "log.jsonl").open("a")
        if config.wandb != Wandb.off:
            import wandb

            mode = config.wandb.value
            self.wandb = wandb.init(
                project=config.project, name=name, dir=folder, mode=mode, config=run_config, id=run_id, resume="allow"
            )
            self.run_id = self.wandb.id  # a resumed run goes on in the same curves

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.enabled:
            self.file.close()
        if self.wandb is not None:
            self.wandb.finish()

    def write(self, line: str, values: dict) -> None:
        """`line` to the console, `values` (numbers, and lists of one number a slot) to the file and to wandb."""
        if not self.enabled:
            return
        print(line, flush=True)
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        if self.wandb is not None:
            flat = {}
            for name, value in values.items():
                flat |= {f"{name}/{i}": v for i, v in enumerate(value, 1)} if isinstance(value, list) else {name: value}
            self.wandb.log(flat, step=values["step"])


def landmarks(vocab_size: int) -> str:
    """By what a user tells a normal curve."""
    return (
        f"a loss near ln V = {math.log(vocab_size):.1f} at the start (objective decay, random start, head not tied);"
        " slot 1 above slot 2 above slot 3; a published run (Qwen3-8B, one layer, S = 16, 50,000 rows, 3 epochs) has"
        " tau_anchor 4.6 held out (SpecForge #578)"
    )


def heldout_line(step: int, measured: dict) -> tuple[str, dict]:
    slots = " ".join(f"{p:.2f}" for p in measured["slot_acceptance"])
    line = f"held out at {step}: tau {measured['tau']:.3f}  tau_anchor {measured['tau_anchor']:.3f}  slots {slots}"
    return line, {"step": step, **{f"heldout/{name}": value for name, value in measured.items()}}


def train_line(step: int, total: int, window: list[tuple], lr: float, norms: list, flops: float, seconds, skips):
    """The console line and the values of the steps since the last one.

    window: of each step what was done (data.Step) and what came of it (trainer.Sums). flops: useful ones of these
    steps, on all ranks. seconds: (for these steps, of them waited for data).
    """
    right_S = sum(sums.right_S for _, sums in window).double()
    slots = (right_S[1:] / right_S[0].clamp(min=1)).tolist()
    taken, waited = seconds
    world = ranks()[1]
    per_second = {
        f"{name}_per_second_per_rank": sum(getattr(now, f"num_{name}") for now, _ in window) / taken / world
        for name in ("tokens", "anchors")
    }
    values = {
        "step": step,
        "epoch": window[-1][0].epoch,
        "loss": float(sum(sums.loss for _, sums in window)) / sum(now.weight for now, _ in window),
        "tau_anchor": 1 + sum(slots),
        "slot_acceptance": slots,
        "lr": lr,
        "grad_norm": norms[-1],
        **per_second,
        "useful_flops_per_second_per_rank": flops / taken / world,
        "anchors_used": sum(now.num_anchors for now, _ in window) / sum(now.num_eligible for now, _ in window),
        "seconds_per_step": taken / len(window),
        "data_wait": waited / taken,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else peak_memory_gb(),
        "skipped_steps": skips.total,
    }
    mfu = ""
    if (peak := peak_flops()) is not None:
        values["mfu"] = values["useful_flops_per_second_per_rank"] / peak
        mfu = f"  MFU {values['mfu']:.0%}"
    line = (
        f"step {step}/{total}  loss {values['loss']:.3f}  tau_anchor {values['tau_anchor']:.2f}"
        f"  slots {' '.join(f'{p:.2f}' for p in slots)}  {values['tokens_per_second_per_rank']:.0f} tokens/s{mfu}"
        f"  lr {lr:.1e}  norm {norms[-1]:.2f}  {(total - step) * values['seconds_per_step'] / 60:.1f} min left"
    )
    if slots[0] > SUSPICIOUS and right_S[0] >= 100:
        line += f"\nalarm: slot 1 is right in {slots[0]:.1%} of blocks; do the features or labels tell the answer?"
    return line, values


def useful_flops(drafter: DFlashDraftModel, now: Step) -> float:
    slots = now.num_anchors * drafter.block_size
    if hasattr(drafter.config, "drafter_kind"):  # a baseline: the context, too, passes its layers
        slots += now.num_tokens
    return step_flops(drafter.config, drafter.fc.in_features, now.num_tokens, slots, now.num_weighted, now.num_pairs)


def peak_memory_gb() -> float:
    """This process's largest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def profiler(config: RunConfig, rank: int):
    """A trace of a few steps of rank 0, for profile=true."""
    if not config.profile or rank:
        return contextlib.nullcontext()
    from torch import profiler as torch_profiler

    return torch_profiler.profile(
        schedule=torch_profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(config.folder / "profile.json")),
    )
