"""The loop: resume; while step < total: batch -> step -> log -> measure -> save."""

import math
import signal
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from data_prep.codec import Codec
from data_prep.files import file_digest
from data_prep.prepare import Preparation, describe
from data_prep.store import CODEC, Store
from dflash.config import Init
from dflash.model import DFlashDraftModel, TargetEnds
from dflash.objective import Objective, block_loss
from dflash.target import start_from_target
from train import checkpoint
from train.config import BatchConfig, OptimConfig, RunConfig, Schedule
from train.data import Step, Steps, split_rows, to_device
from train.engine import make_engine, ranks
from train.evaluate import heldout_measures
from train.log import Log, heldout_line, landmarks, profiler, train_line, useful_flops


@dataclass
class Sums:
    """What a step adds up over its bins and ranks; ranks exchange sums and counts, never means."""

    loss: torch.Tensor  # weighted cross-entropy
    right_S: torch.Tensor  # whole blocks whose slots 1..k are all right, at index k (index 0: whole blocks)
    norm: torch.Tensor  # of the step's gradient; the same on all ranks

    def reduce(self, stop: bool) -> bool:
        """Add up over the ranks; returns whether any of them wants to stop."""
        if ranks()[1] > 1:
            wish = torch.tensor([stop], dtype=torch.float64, device=self.loss.device)
            both = torch.cat((self.loss[None].double(), self.right_S.double(), wish))
            dist.all_reduce(both)
            self.loss, self.right_S, stop = both[0], both[1:-1], bool(both[-1])
        return stop


def start(drafter: DFlashDraftModel, ends: TargetEnds, store: Store, preparation: Preparation) -> None:
    """Give a fresh drafter what it starts from: a released one's weights, its target's last layers, or random ones."""
    if preparation.released is not None:
        drafter.load_state_dict(preparation.released.tensors, strict=True)
    elif preparation.model.init == Init.target:
        sample = [store.row(i).features_TF.float().cpu() for i in range(min(len(store), 8))]
        sample_TF = store.codec.lift(torch.cat(sample))
        start_from_target(drafter, preparation.target, sample_TF, preparation.model.revision)
    else:
        start_at_uniform(drafter, ends)
    read_through(drafter, store.codec)


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
    """Linear warm-up over the first share of the steps, then the schedule. step counts from 0.

    It is a function of (step, total): a run that is extended goes on with the rate that the longer run has there.
    """
    warmup = round(optim.warmup * total)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.schedule == Schedule.cosine:
        return optim.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))
    if optim.schedule == Schedule.wsd:
        return optim.lr * min(1.0, (total - step) / max(round(optim.decay * total), 1))
    return optim.lr


def prefix_right(right_AS: torch.Tensor, weight_AS: torch.Tensor) -> torch.Tensor:
    """Of the blocks with a label at every slot: how many have slots 1..k all right. int64 [S]; index 0: their count."""
    whole_A = weight_AS[:, -1] > 0
    run_AS = right_AS[whole_A].long()
    run_AS[:, 0] = 1
    return run_AS.cumprod(dim=1).sum(dim=0)


def train_step(
    engine, step: Step, ends: TargetEnds, budgets: BatchConfig, lr: float, objective=Objective.decay
) -> Sums:
    """One optimiser step: forward and backward of this rank's bins, then the update. Nothing waits for the device."""
    loss = torch.zeros((), device=engine.device)
    right_S = None
    for number, batch in enumerate(step.batches):
        batch = to_device(batch, engine.device, budgets)
        batch.features_TF = batch.features_TF.to(engine.dtype)
        result = block_loss(engine, batch, ends, budgets.chunk_slots, objective)
        engine.backward(result.loss, step.weight, last=number == len(step.batches) - 1)
        loss += result.loss.detach()
        counted_S = prefix_right(result.right_AS, batch.blocks.weight_AS)
        right_S = counted_S if right_S is None else right_S + counted_S
    return Sums(loss, right_S, engine.step(lr))


class Stop:
    """A wish to stop, from SIGTERM or SIGUSR1 (Slurm's warning). Ranks agree on it at a step's end."""

    def __enter__(self):
        self.wished = False
        self.before = {n: signal.signal(n, self._note) for n in (signal.SIGTERM, signal.SIGUSR1)}
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number, frame) -> None:
        self.wished = True


class SkipLimit:
    """Counts the steps that were skipped because their gradient was not finite."""

    def __init__(self, most: int):
        self.most, self.total, self.in_a_row = most, 0, 0

    def count(self, norms: list[float], step: int) -> None:
        """norms of the steps up to `step`. Raises ValueError after too many in a row."""
        for norm in norms:
            self.in_a_row = 0 if math.isfinite(norm) else self.in_a_row + 1
            self.total += not math.isfinite(norm)
            if self.in_a_row >= self.most:
                raise ValueError(
                    f"optim.max_skips: {self.in_a_row} steps in a row before step {step} had a gradient that is not"
                    f" finite, at most {self.most - 1} are skipped; lower optim.lr, or audit the cache"
                )


def read_ahead(steps: Steps, first: int, total: int, depth: int):
    """Yield (step, seconds waited for it), read in a thread up to `depth` steps ahead."""
    with ThreadPoolExecutor(1) as reader:
        pending = deque()
        for number in range(first, total):
            while depth and len(pending) <= depth and number + len(pending) < total:
                pending.append(reader.submit(steps.__getitem__, number + len(pending)))
            began = time.perf_counter()
            now = pending.popleft().result() if depth else steps[number]
            yield now, time.perf_counter() - began


def fit(
    config: RunConfig, store: Store, drafter: DFlashDraftModel, ends: TargetEnds, device: torch.device, training: dict
) -> None:
    """Train to the last step, from the newest complete checkpoint if there is one.

    training: what a checkpoint and an export say of where they come from. Raises SystemExit, after a checkpoint was
    written, where a signal asked to stop.
    """
    rank, world = ranks()
    optim, store.reads_last = config.optim, config.optim.objective == Objective.distill
    rows, heldout = split_rows(store, config.data.heldout)
    weights = [source.weight for source in config.data.sources]
    steps = Steps(store, rows, config.model, config.batch, config.seed, rank, world, weights, optim.objective)
    total = optim.steps or optim.epochs * steps.per_epoch()
    engine = make_engine(drafter, optim, config.engine, device)
    folder, skips = config.folder / "checkpoints", SkipLimit(optim.max_skips)
    path = checkpoint.latest(folder)
    step, run_id = resume(path, config, training, store, engine, skips) if path else (0, None)
    if rank == 0:
        origin = f"resumed from {path}" if path else "from the start"
        print(f"train: {len(rows)} rows, {total} steps of {config.batch.rows_per_step}, {origin}", flush=True)
        print(f"normal is: {landmarks(drafter.config.vocab_size)}", flush=True)
    log = Log(config.folder, config.log, config.name, describe(config), rank == 0, run_id)
    with log, Stop() as stop, profiler(config, rank) as trace:
        window, waited, began = [], 0.0, time.perf_counter()
        for now, wait in read_ahead(steps, step, total, config.engine.prefetch):
            lr = learning_rate(step, total, optim)
            sums = train_step(engine, now, ends, config.batch, lr, optim.objective)
            stopping = sums.reduce(stop.wished) and step + 1 < total
            window.append((now, sums))
            step += 1
            save = step % config.save_every == 0 or step == total or stopping
            measure = step % config.evaluate.every == 0 or (save and not stopping)
            waited += wait
            if trace is not None:
                trace.step()
            if step % config.log.every == 0 or save:
                norms = torch.stack([sums.norm.float() for _, sums in window]).tolist()  # here the device is waited for
                seconds = time.perf_counter() - began
                flops = sum(useful_flops(drafter, now) for now, _ in window)
                skips.count(norms, step)
                log.write(*train_line(step, total, window, lr, norms, flops, (seconds, waited), skips))
                window, waited, began = [], 0.0, time.perf_counter()
            tau = 0.0  # of a step that is not measured: it shall not pass for the best
            if measure:
                measured = heldout_measures(engine, ends, store, heldout[: config.evaluate.rows], config)
                tau = measured["tau"]
                log.write(*heldout_line(step, measured))
                began = time.perf_counter()
            if save:
                state = engine.state()
                if rank == 0:
                    trainer = {"step": step, "tau": tau, "config": describe(config), "training": training}
                    trainer |= {"wandb": log.run_id, "skipped": skips.total}
                    checkpoint.save(folder, state, drafter.config, trainer, store.codec)
                    checkpoint.prune(folder, config.keep)
                    print(f"saved: step {step} in {folder}", flush=True)
                began = time.perf_counter()
            if stopping:
                raise SystemExit(f"stopped by a signal at step {step} of {total}; the same command goes on from there")


def resume(path: Path, config: RunConfig, training: dict, store: Store, engine, skips: SkipLimit):
    """Take up a checkpoint; returns its step, and the id of its curves in wandb."""
    state, trainer = checkpoint.load(path)
    refuse_other_run(config, training, trainer, path, store)
    skips.total = trainer["skipped"]
    engine.load_state(state, trainer["step"] - skips.total)  # a skipped step was none to AdamW
    return trainer["step"], trainer["wandb"]


def refuse_other_run(config: RunConfig, training: dict, trainer: dict, path: Path, store: Store) -> None:
    """Raise ValueError where a checkpoint is of a run with another drafter, other data or another order of rows."""
    mine, saved = describe(config), trainer["config"]
    compared = {
        "model": (mine["model"], saved["model"]),
        "drafter": (mine["drafter"], saved["drafter"]),
        "data.heldout": (mine["data"]["heldout"], saved["data"]["heldout"]),
        "the weights of data.sources": tuple([s["weight"] for s in c["data"]["sources"]] for c in (mine, saved)),
        "optim.objective": (mine["optim"]["objective"], saved["optim"]["objective"]),
        "the features' recipe": (training["features"], trainer["training"]["features"]),
        "batch.rows_per_step": (mine["batch"]["rows_per_step"], saved["batch"]["rows_per_step"]),
        "batch.anchors": (mine["batch"]["anchors"], saved["batch"]["anchors"]),
        "batch.anchors_per_row": (mine["batch"]["anchors_per_row"], saved["batch"]["anchors_per_row"]),
        "seed": (mine["seed"], saved["seed"]),
    }
    if (path / CODEC).exists():  # `fc` reads through this very map
        compared["the cache's codec"] = file_digest(store.folder / CODEC)[:12], file_digest(path / CODEC)[:12]
    for name, (found, expected) in compared.items():
        if found != expected:
            raise ValueError(
                f"{name}: found {found}, expected {expected} as in {path}; resume with the same values, or give the new"
                " run another name="
            )
