"""From the store to the micro-batches of a step.

    order    the rows of a step are a function of (seed, epoch, rows_per_step), nothing else
    anchors  drawn anew each epoch, from (seed, epoch, row id and its occurrence) alone
    bins     the step's rows packed first-fit, longest first, under a token and an anchor budget
    deal     bin b goes to rank b mod world; missing ones are empty, so that collectives stay matched
    weight   the sum of all weights of the step, over all ranks: known before the first forward

So the gradient of a step does not depend on budgets, packing, ranks or accumulation.
"""

import functools
from dataclasses import dataclass

import torch

from data_prep.store import Row, Store
from dflash.blocks import Blocks, eligible_anchors, make_blocks, sample_anchors
from dflash.config import ModelConfig
from dflash.objective import BlockBatch, Objective, padded
from train.config import Anchors, BatchConfig


@dataclass
class Step:
    """What one rank does in one optimiser step, and what all ranks do together."""

    epoch: int
    rows: list[int]  # indices into the store, all ranks
    batches: list[BlockBatch]  # this rank's micro-batches
    weight: float  # of all ranks' slots: the one denominator
    num_anchors: int  # of all ranks
    num_eligible: int  # anchors that could have been drawn
    num_tokens: int  # context tokens of all ranks
    num_weighted: int  # slots with weight, of all ranks
    num_pairs: int  # (slot, key) pairs that see each other, of all ranks


def split_rows(store: Store, heldout: float) -> tuple[list[int], list[int]]:
    """Indices of the rows to train on and of the held-out ones; heldout: their share of all prompts."""
    held = store.heldout(heldout)
    return (~held).nonzero()[:, 0].tolist(), held.nonzero()[:, 0].tolist()


def epoch_order(rows: list[int], seed: int, epoch: int, sources=None, weights=(1.0,)) -> list[tuple[int, int]]:
    """(row, occurrence) of an epoch, in order.

    sources: int [rows of the store], which data set a row is of; empty: the first. A data set of weight 2.5 has each of
    its rows twice, and half of them, drawn anew each epoch, a third time.
    """
    generator, items = torch.Generator().manual_seed(seed * 1_000_003 + epoch), []
    for source, weight in enumerate(weights):
        mine = rows if sources is None else [row for row in rows if sources[row] == source]
        whole, rest = divmod(round(weight * len(mine)), max(len(mine), 1))
        drawn = torch.randperm(len(mine), generator=generator)[:rest].tolist() if rest else []
        items += [(row, k) for k in range(whole) for row in mine] + [(mine[i], whole) for i in drawn]
    return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]


def pack(tokens: list[int], anchors: list[int], max_tokens: int, max_anchors: int) -> list[list[int]]:
    """Items in bins, first fit, most tokens first; each bin within both budgets."""
    bins, room = [], []
    for item in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        fit = next((b for b, (t, a) in enumerate(room) if tokens[item] <= t and anchors[item] <= a), None)
        if fit is None:
            fit = len(bins)
            bins.append([])
            room.append((max_tokens, max_anchors))
        bins[fit].append(item)
        room[fit] = room[fit][0] - tokens[item], room[fit][1] - anchors[item]
    return bins


def make_batch(rows: list[Row], anchors: list[torch.Tensor], model: ModelConfig) -> BlockBatch:
    """One bin, on the host: rows end to end, and their blocks. Without features where the rows carry none."""
    lengths = torch.tensor([len(row.ids_T) for row in rows])
    bounds = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    ids_T = torch.cat([row.ids_T for row in rows])
    mask_T = torch.cat([row.loss_mask_T for row in rows])
    anchor_A = torch.cat([chosen + start for chosen, start in zip(anchors, bounds)])
    blocks = make_blocks(ids_T, mask_T, bounds, anchor_A, model.block_size, model.mask_token_id, model.gamma)
    weighted_N = blocks.weight_AS.flatten().nonzero()[:, 0]
    teacher_ND = None
    if rows[0].last_TD is not None:  # what predicts the token of slot k is the target's state one position before it
        token_N = blocks.anchor_A[weighted_N // model.block_size] + weighted_N % model.block_size
        teacher_ND = torch.cat([row.last_TD for row in rows])[token_N - 1]
    return BlockBatch(
        features_TF=None if rows[0].features_TF is None else torch.cat([row.features_TF for row in rows]),
        ids_T=ids_T,
        position_T=torch.cat([torch.arange(length) for length in lengths.tolist()]),
        blocks=blocks,
        weighted_N=weighted_N,
        teacher_ND=teacher_ND,
    )


def require_room(store: Store, batch: BatchConfig) -> None:
    """Refuse a token budget that the longest row does not fit into."""
    longest = store.manifest["longest"]
    if longest > batch.bin_tokens:
        raise ValueError(
            f"batch.bin_tokens: found {batch.bin_tokens}, expected at least {longest}, the longest row; raise it"
        )


def normaliser(blocks: Blocks, objective: Objective) -> float:
    """What a bin adds to the number that the step's loss is divided by: it depends on the data alone."""
    if objective == Objective.dpace:  # its weights depend on predictions: the number of blocks with a label
        return float((blocks.weight_AS[:, 1] > 0).sum())
    return float(blocks.weight_AS.double().sum())


class Steps:
    """The steps of one rank. `steps[s]` is a function of s alone: resuming needs no state but the step."""

    def __init__(
        self, store: Store, rows: list[int], model: ModelConfig, batch: BatchConfig, seed: int, rank=0, world=1,
        weights=(1.0,), objective=Objective.decay,
    ):  # fmt: skip
        self.store, self.model, self.batch, self.seed = store, model, batch, seed
        self.rank, self.world, self.objective = rank, world, objective
        sources = store.index["source"].tolist() if len(weights) > 1 else None
        self.order = functools.lru_cache(2)(lambda epoch: epoch_order(rows, seed, epoch, sources, weights))
        require_room(store, batch)

        if not self.order(0):
            raise ValueError("data.sources: no row is left for training; raise a weight")

    def per_epoch(self) -> int:
        """Steps of an epoch; the last one may have fewer rows."""
        return -(-len(self.order(0)) // self.batch.rows_per_step)

    def _anchors(self, row: Row, epoch: int, occurrence: int) -> torch.Tensor:
        """Where the blocks of a row start: indices into it."""
        count = self.batch.anchors_per_row
        if self.batch.anchors == Anchors.fixed:
            return eligible_anchors(row.loss_mask_T)[:: self.model.block_size][:count]
        named = {"epoch": epoch, "row_id": row.id, "occurrence": occurrence}
        return sample_anchors(row.loss_mask_T, count, seed=self.seed, **named)

    def __getitem__(self, step: int) -> Step:
        epoch, within = divmod(step, self.per_epoch())
        count = self.batch.rows_per_step
        items = self.order(epoch)[within * count : (within + 1) * count]
        indices = [row for row, _ in items]
        rows = [self.store.row(i, features=False) for i in indices]
        anchors = [self._anchors(row, epoch, occurrence) for row, (_, occurrence) in zip(rows, items)]
        lengths = [len(row.ids_T) for row in rows]
        bins = pack(lengths, [len(chosen) for chosen in anchors], self.batch.bin_tokens, self.batch.bin_anchors)
        weight, weighted, pairs, batches = 0.0, 0, 0, []
        for number in range(-(-len(bins) // self.world) * self.world):
            empty = number >= len(bins)
            items = [0] if empty else bins[number]
            chosen = [anchors[i][:1] if empty else anchors[i] for i in items]
            mine = number % self.world == self.rank
            bin_rows = [self.store.row(indices[i]) if mine else rows[i] for i in items]
            batch = make_batch(bin_rows, chosen, self.model)
            if empty:  # it fills up a rank: one block without weight
                batch.blocks.weight_AS.zero_()
                batch.weighted_N = batch.weighted_N[:0]
                batch.teacher_ND = None if batch.teacher_ND is None else batch.teacher_ND[:0]
            blocks, size = batch.blocks, self.model.block_size
            weight += normaliser(blocks, self.objective)
            weighted += len(batch.weighted_N)
            pairs += size * int((blocks.anchor_A - blocks.start_A + size).sum())
            if mine:
                batches.append(batch)
        return Step(
            epoch=epoch,
            rows=indices,
            batches=batches,
            weight=weight,
            num_anchors=sum(map(len, anchors)),
            num_eligible=sum(len(eligible_anchors(row.loss_mask_T)) for row in rows),
            num_tokens=sum(lengths),
            num_weighted=weighted,
            num_pairs=pairs,
        )


def to_device(batch: BlockBatch, device: torch.device, budgets: BatchConfig) -> BlockBatch:
    """The batch with all its tensors on the device; on a GPU filled up to the budgets, so that shapes are static."""
    if device.type == "cpu":
        return batch
    batch = padded(batch, budgets.bin_tokens, budgets.bin_anchors)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor if tensor.is_cuda else tensor.pin_memory()).to(device, non_blocking=True)

    blocks = type(batch.blocks)(**{name: move(tensor) for name, tensor in vars(batch.blocks).items()})
    teacher_ND = None if batch.teacher_ND is None else move(batch.teacher_ND)
    rest = (move(tensor) for tensor in (batch.features_TF, batch.ids_T, batch.position_T))
    return BlockBatch(*rest, blocks, move(batch.weighted_N), teacher_ND)
