"""Anchors, blocks, weights, and the one attention mask.

Rows are packed end to end into a *bin* of T tokens. An anchor is a token of a row; its block has S slots: slot 0 holds
the anchor's clean token, slots 1..S-1 the mask token; slot k predicts the token at anchor + k (paper, section 3.2; the
same position, no shift). Everything here runs on the host, before the batch goes to the device.

Shapes: T context tokens of a bin, A anchors, S slots, Q = A * S.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass
class Blocks:
    """The blocks of one bin. All positions but `position_AS` are indices into the bin."""

    anchor_A: torch.Tensor  # int64
    start_A: torch.Tensor  # int64, where the anchor's document starts
    input_AS: torch.Tensor  # int64 ids: anchor, then mask tokens
    label_AS: torch.Tensor  # int64 ids; meaningless where there is no weight
    weight_AS: torch.Tensor  # fp32; 0 at slot 0 and behind the supervised, in-document prefix
    position_AS: torch.Tensor  # int64, document-local


def decay_weights(block_size: int, gamma: float) -> torch.Tensor:
    """w_k = exp(-(k - 1) / gamma) for slots k >= 1, 0 for the anchor's slot (paper, equation 4). fp32 [S]."""
    slot_S = torch.arange(block_size)
    return torch.where(slot_S == 0, 0.0, torch.exp(-(slot_S - 1) / gamma))


def eligible_anchors(loss_mask_T: torch.Tensor) -> torch.Tensor:
    """Indices i of one row at which tokens i and i + 1 are both supervised. loss_mask_T: bool."""
    return (loss_mask_T[:-1] & loss_mask_T[1:]).nonzero()[:, 0]


def sample_anchors(loss_mask_T, count: int, *, seed: int, epoch: int, row_id: str, occurrence: int = 0) -> torch.Tensor:
    """Up to `count` eligible anchors of one row, without replacement, sorted: int64 indices into the row.

    They depend on the arguments alone: not on rank, batch, packing or resume. `occurrence` counts the times that the
    row stands in the epoch.
    """
    key = hashlib.blake2b(f"{seed}/{epoch}/{row_id}/{occurrence}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1)
    eligible = eligible_anchors(loss_mask_T)
    chosen = torch.randperm(len(eligible), generator=generator)[:count]
    return eligible[chosen].sort().values


def make_blocks(ids_T, loss_mask_T, bounds, anchor_A, block_size: int, mask_token_id: int, gamma: float) -> Blocks:
    """Blocks of a bin.

    ids_T int64 and loss_mask_T bool: the bin's tokens, and which are supervised. bounds: int64 [documents + 1], the
    offsets of its documents. anchor_A: int64 indices into the bin.

    The weights of a block stop at the first slot that is unsupervised or outside the document (a contiguous prefix),
    so that tails and end-of-turn tokens are learned and nothing is learned across a gap.
    """
    document_A = torch.searchsorted(bounds, anchor_A, right=True) - 1
    start_A, end_A = bounds[document_A], bounds[document_A + 1]
    token_AS = anchor_A[:, None] + torch.arange(block_size)
    inside_AS = token_AS < end_A[:, None]
    token_AS = token_AS.clamp(max=len(ids_T) - 1)
    learned_AS = inside_AS & loss_mask_T[token_AS]
    learned_AS[:, 0] = True  # the anchor is given; it carries no loss, but the prefix starts behind it
    input_AS = torch.full_like(token_AS, mask_token_id)
    input_AS[:, 0] = ids_T[anchor_A]
    return Blocks(
        anchor_A=anchor_A,
        start_A=start_A,
        input_AS=input_AS,
        label_AS=ids_T[token_AS],
        weight_AS=decay_weights(block_size, gamma) * learned_AS.cumprod(dim=1),
        position_AS=(anchor_A - start_A)[:, None] + torch.arange(block_size),
    )


def visible(anchor_A, start_A, num_context: int, block_size: int):
    """The mask predicate (batch, head, query, key) -> bool, over queries [A * S] and keys [T context ; A * S slots].

    anchor_A, start_A: as in `Blocks`; num_context: T. The four arguments are integer tensors that broadcast.

    A block sees the context of its own document strictly before its anchor, and all slots of its own block; no other.
    """

    def predicate(batch, head, query, key):
        block = query // block_size
        context = (key >= start_A[block]) & (key < anchor_A[block])
        own = (key >= num_context) & ((key - num_context) // block_size == block)
        return context | own

    return predicate


class Group(NamedTuple):
    """Neighbouring blocks of one document, and the only keys that they may see."""

    queries: slice  # their slots, among the queries
    context: slice  # their document's tokens before the last anchor, among the keys
    slots: slice  # their slots, among the keys
    mask: torch.Tensor  # bool [queries, context + slots]


def grouped_mask(anchor_A, start_A, num_context: int, block_size: int, group_size: int = 16) -> list[Group]:
    """`visible` on the parts of the mask that can be true: for SDPA, where FlexAttention has no backward.

    Arguments as in `visible`; anchors are in rising order. A group is up to `group_size` neighbouring blocks of one
    document; it costs its queries times its own context and slots, so that nothing is paid for other documents, or for
    context behind the anchors.
    """
    predicate = visible(anchor_A, start_A, num_context, block_size)
    anchors, starts, groups, first = anchor_A.tolist(), start_A.tolist(), [], 0
    while first < len(anchors):
        end = first + 1
        while end < len(anchors) and end - first < group_size and starts[end] == starts[first]:
            end += 1
        queries = slice(first * block_size, end * block_size)
        context = slice(starts[first], anchors[end - 1])
        slots = slice(num_context + queries.start, num_context + queries.stop)
        key = torch.cat((torch.arange(context.start, context.stop), torch.arange(slots.start, slots.stop)))
        query = torch.arange(queries.start, queries.stop)[:, None]
        groups.append(Group(queries, context, slots, predicate(None, None, query, key)))
        first = end
    if not groups:  # a bin without blocks: no queries, but keys, so that every parameter gets its zero gradient
        groups.append(Group(slice(0, 0), slice(0, 1), slice(num_context, num_context), torch.ones(0, 1).bool()))
    return groups


def attention_mask(anchor_A, start_A, num_context: int, block_size: int, dense: bool):
    """`visible` (same arguments) as a dense bool mask [Q, T + Q] (SDPA) or as a FlexAttention BlockMask."""
    predicate = visible(anchor_A, start_A, num_context, block_size)
    num_query = len(anchor_A) * block_size
    if dense:
        query = torch.arange(num_query, device=anchor_A.device)[:, None]
        return predicate(None, None, query, torch.arange(num_context + num_query, device=anchor_A.device))
    from torch.nn.attention.flex_attention import create_block_mask

    # Uncompiled, the builder would materialise the dense mask.
    build = torch.compile(create_block_mask, dynamic=False) if anchor_A.is_cuda else create_block_mask
    return build(predicate, None, None, num_query, num_context + num_query, device=anchor_A.device)
