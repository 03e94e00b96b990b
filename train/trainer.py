"""The loop: resume; while step < total: batch -> step -> log -> measure -> save."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from data_prep.codec import Codec
from data_prep.prepare import describe
from data_prep.store import Store
from dflash.model import DFlashDraftModel, TargetEnds
from dflash.objective import block_loss
from train import checkpoint
from train.config import OptimConfig, RunConfig
from train.data import Step, Steps, split_rows, to_device
from train.engine import make_engine
from train.evaluate import heldout_measures
from train.log import Log


@dataclass
class Sums:
    """What a step adds up over its bins and ranks; ranks exchange sums and counts, never means."""

    loss: torch.Tensor  # weighted cross-entropy
    right_S: torch.Tensor  # whole blocks whose slots 1..k are all right, at index k (index 0: whole blocks)

    def reduce(self) -> "Sums":
        if dist.is_initialized() and dist.get_world_size() > 1:
            both = torch.cat((self.loss[None].double(), self.right_S.double()))
            dist.all_reduce(both)
            self.loss, self.right_S = both[0], both[1:]
        return self


@torch.no_grad()
def start_at_uniform(drafter: DFlashDraftModel, ends: TargetEnds) -> None:
    """Scale the final norm so that fresh logits have unit variance, and the loss starts near ln V for any head.

    A normed state has length sqrt(D); rows of a head whose entries are larger than 1 / sqrt(D) would turn it into
    confident nonsense, which costs the first hundred steps.
    """
    spread = float(ends.head_VD.float().square().mean().sqrt()) * drafter.config.hidden_size**0.5 * ends.logit_scale
    drafter.norm.weight.fill_(1 / spread)


@torch.no_grad()
def read_through(drafter: DFlashDraftModel, codec: Codec) -> None:
    """Let `fc` read what a codec gives, from where it would start on features; loading a checkpoint folds it."""
    if codec.rank is not None:
        weight_DR = codec.unfold(drafter.fc.weight)
        drafter.fc = torch.nn.Linear(codec.rank, len(weight_DR), bias=False)
        drafter.fc.weight.copy_(weight_DR)


def learning_rate(step: int, total: int, optim: OptimConfig) -> float:
    """Linear warm-up over the first share of the steps, then cosine to zero. step counts from 0."""
    warmup = round(optim.warmup * total)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    return optim.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))


def prefix_right(right_AS: torch.Tensor, weight_AS: torch.Tensor) -> torch.Tensor:
    """Of the blocks with a label at every slot: how many have slots 1..k all right. int64 [S]; index 0: their count."""
    whole_A = weight_AS[:, -1] > 0
    run_AS = right_AS[whole_A].long()
    run_AS[:, 0] = 1
    return run_AS.cumprod(dim=1).sum(dim=0)


def train_step(engine, step: Step, ends: TargetEnds, chunk: int, lr: float) -> tuple[Sums, float]:
    """One optimiser step: forward and backward of this rank's bins, then the update. Returns sums and gradient norm."""
    loss = torch.zeros((), device=engine.device)
    right_S = None
    for number, batch in enumerate(step.batches):
        batch = to_device(batch, engine.device)
        batch.features_TF = batch.features_TF.to(engine.dtype)
        result = block_loss(engine, batch, ends, chunk)
        engine.backward(result.loss, step.weight, last=number == len(step.batches) - 1)
        loss += result.loss.detach()
        counted_S = prefix_right(result.right_AS, batch.blocks.weight_AS)
        right_S = counted_S if right_S is None else right_S + counted_S
    return Sums(loss, right_S), engine.step(lr)


def fit(
    config: RunConfig, store: Store, drafter: DFlashDraftModel, ends: TargetEnds, device: torch.device, training: dict
) -> None:
    """Train to the last step, from the newest complete checkpoint if there is one.

    training: what a checkpoint and an export say of where they come from.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rows, heldout = split_rows(store, config.data.heldout)
    weights = [source.weight for source in config.data.sources]
    steps = Steps(store, rows, config.model, config.batch, config.seed, rank, world, weights)
    total = config.optim.steps or config.optim.epochs * steps.per_epoch()
    engine = make_engine(drafter, config.optim, config.engine, device)
    folder, step, tau = config.folder / "checkpoints", 0, 0.0
    if (path := checkpoint.latest(folder)) is not None:
        state, trainer = checkpoint.load(path)
        refuse_other_run(config, training, trainer, path)
        step, tau = trainer["step"], trainer["tau"]
        engine.load_state(state, step)
    if rank == 0:
        origin = f"resumed from {path}" if path else "from the start"
        print(f"train: {len(rows)} rows, {total} steps of {config.batch.rows_per_step}, {origin}", flush=True)
    with Log(config.folder, config.log, config.name, describe(config), enabled=rank == 0) as log:
        window, seconds = [], 0.0
        while step < total:
            began = time.perf_counter()
            now, lr = steps[step], learning_rate(step, total, config.optim)
            sums, norm = train_step(engine, now, ends, config.batch.chunk_slots, lr)
            window.append((now, sums.reduce()))
            step += 1
            seconds += time.perf_counter() - began
            if step % config.log.every == 0 or step == total:
                log.write(*train_line(step, total, window, lr, norm, seconds / len(window)))
                window, seconds = [], 0.0
            save = step % config.save_every == 0 or step == total
            if (save or step % config.evaluate.every == 0) and rank == 0:
                measured = heldout_measures(engine, ends, store, heldout[: config.evaluate.rows], config)
                tau = measured["tau"]
                log.write(*heldout_line(step, measured))
            if save:
                state = engine.state()
                if rank == 0:
                    trainer = {"step": step, "tau": tau, "config": describe(config), "training": training}
                    checkpoint.save(folder, state, drafter.config, trainer, store.codec)
                    checkpoint.prune(folder, config.keep)


def heldout_line(step: int, measured: dict) -> tuple[str, dict]:
    slots = " ".join(f"{p:.2f}" for p in measured["slot_acceptance"])
    line = f"held out at {step}: tau {measured['tau']:.3f}  tau_anchor {measured['tau_anchor']:.3f}  slots {slots}"
    return line, {"step": step, **{f"heldout/{name}": value for name, value in measured.items()}}


def train_line(step: int, total: int, window: list[tuple[Step, Sums]], lr: float, norm: float, seconds: float):
    """The console line and the values of the steps since the last one."""
    right_S = sum(sums.right_S for _, sums in window).double()
    blocks = max(float(right_S[0]), 1.0)
    slots = (right_S[1:] / blocks).tolist()
    values = {
        "step": step,
        "epoch": window[-1][0].epoch,
        "loss": float(sum(sums.loss for _, sums in window)) / sum(now.weight for now, _ in window),
        "tau_anchor": 1 + sum(slots),
        "slot_acceptance": slots,
        "lr": lr,
        "grad_norm": norm,
        "tokens_per_second": sum(now.num_tokens for now, _ in window) / len(window) / seconds,
        "anchors_per_second": sum(now.num_anchors for now, _ in window) / len(window) / seconds,
        "anchors_used": sum(now.num_anchors for now, _ in window) / sum(now.num_eligible for now, _ in window),
        "seconds_per_step": seconds,
    }
    left = (total - step) * seconds
    line = (
        f"step {step}/{total}  loss {values['loss']:.3f}  tau_anchor {values['tau_anchor']:.2f}"
        f"  slots {' '.join(f'{p:.2f}' for p in slots)}  {values['tokens_per_second']:.0f} tokens/s"
        f"  lr {lr:.1e}  norm {norm:.2f}  {left / 60:.1f} min left"
    )
    return line, values


def refuse_other_run(config: RunConfig, training: dict, trainer: dict, path: Path) -> None:
    """Raise ValueError where a checkpoint is of a run with another drafter, other data or another order of rows."""
    mine, saved = describe(config), trainer["config"]
    compared = {
        "model": (mine["model"], saved["model"]),
        "data": (mine["data"], saved["data"]),
        "the features' recipe": (training["features"], trainer["training"]["features"]),
        "batch.rows_per_step": (mine["batch"]["rows_per_step"], saved["batch"]["rows_per_step"]),
        "batch.anchors_per_row": (mine["batch"]["anchors_per_row"], saved["batch"]["anchors_per_row"]),
        "seed": (mine["seed"], saved["seed"]),
    }
    for name, (found, expected) in compared.items():
        if found != expected:
            raise ValueError(
                f"{name}: found {found}, expected {expected} as in {path}; resume with the same values, or give the new"
                " run another name="
            )
