"""The training objective: masked block cross-entropy, through the target's frozen head.

    loss = sum over blocks and slots k of  w_k * CE(head(drafter(block))_k, token at anchor + k)

returned as a sum; the step divides it by one global number, which is known before the first forward. The head runs on
weighted slots only, a chunk at a time, and full logits never exist. Three objectives, over the slots 1..n that have a
label in their block:

    decay    w_k = exp(-(k - 1) / gamma) (paper, equation 4); divided by the sum of all w_k
    dpace    w_k = sum over m = k..n of  prod over i = 1..m of q~_i,  q~ = (1 - alpha) q + alpha, with q_i the
             probability that the drafter gives the label of slot i, taken as a constant: what slot k adds to the
             expected number of accepted tokens, smoothed (D-PACE); divided by the number of blocks
    distill  decay's weights, with KL(target || drafter) of the whole next-token distribution instead of the
             cross-entropy; the target's is its head on its own last state one position before

Shapes: T context tokens, A anchors, S slots, Q = A * S, N slots with weight, D hidden, F features, V vocabulary.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from .blocks import Blocks, attention_mask, grouped_mask
from .model import TargetEnds


class Objective(Enum):
    """What a step minimises; the formulas stand at the top of dflash/objective.py."""

    decay = "decay"
    dpace = "dpace"
    distill = "distill"


@dataclass
class BlockBatch:
    """One bin on the device: the context and its blocks."""

    features_TF: torch.Tensor
    ids_T: torch.Tensor  # int64, which the baselines read
    position_T: torch.Tensor  # int64, document-local
    blocks: Blocks
    weighted_N: torch.Tensor  # int64 indices into Q of the slots with weight
    teacher_ND: torch.Tensor | None = None  # the target's last states that predict those slots, for `distill`


def padded(batch: BlockBatch, num_tokens: int, num_anchors: int) -> BlockBatch:
    """The same bin with so many context tokens and anchors: static shapes, which compiled kernels need.

    What is added has no weight, and no slot with weight sees it. It stands behind the rest, so anchors stay in order.
    """
    blocks, more_T, more_A = batch.blocks, num_tokens - len(batch.position_T), num_anchors - len(batch.blocks.anchor_A)
    assert more_T >= 0 and more_A >= 0
    pad = torch.nn.functional.pad
    filled = {  # an anchor behind all context, whose document starts there: it sees nothing but its own block
        "anchor_A": pad(blocks.anchor_A, (0, more_A), value=num_tokens),
        "start_A": pad(blocks.start_A, (0, more_A), value=num_tokens),
        **{name: pad(getattr(blocks, name), (0, 0, 0, more_A)) for name in ("input_AS", "label_AS", "weight_AS")},
        "position_AS": pad(blocks.position_AS, (0, 0, 0, more_A)),
    }
    features_TF = pad(batch.features_TF, (0, 0, 0, more_T))
    ids_T, position_T = pad(batch.ids_T, (0, more_T)), pad(batch.position_T, (0, more_T))
    return BlockBatch(features_TF, ids_T, position_T, Blocks(**filled), batch.weighted_N, batch.teacher_ND)


@dataclass
class BlockLoss:
    """Sums of one bin. `loss` carries the gradient; `right_AS` tells which weighted slots were predicted."""

    loss: torch.Tensor  # fp32 scalar, sum of weight * cross-entropy
    right_AS: torch.Tensor  # bool


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of each slot behind a frozen head, value and gradient of a chunk in one pass.

    The head gets no gradient, so d loss / d hidden is formed while the chunk's logits are at hand, and neither logits
    nor a recomputation are needed later. hidden_ND, label_N -> (fp32 [N], predicted ids [N]). With teacher_ND, states
    of the target: KL(target || drafter) of each slot instead.
    """

    @staticmethod
    def forward(ctx, hidden_ND, label_N, ends: TargetEnds, chunk: int, teacher_ND=None):
        """label_N: int64 ids. chunk: slots whose logits exist at one time."""
        grad_ND = torch.empty_like(hidden_ND, dtype=ends.head_VD.dtype)
        loss_N = hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32)
        predicted_N = torch.empty_like(label_N)
        for start in range(0, len(hidden_ND), chunk):
            part = slice(start, start + chunk)
            label = label_N[part, None]
            logits = ends.logits(hidden_ND[part])
            highest, predicted = logits.max(dim=-1, keepdim=True)
            predicted_N[part] = predicted[:, 0]
            probs = logits.softmax(dim=-1, dtype=torch.float32)
            # The log-sum-exp follows from the largest probability: at least 1 / V, so its logarithm is safe.
            total = highest.float() - probs.gather(1, predicted).log()
            if teacher_ND is None:
                loss_N[part] = (total - logits.gather(1, label).float())[:, 0]
                probs.scatter_add_(1, label, torch.full_like(total, -1.0))
            else:
                log_teacher = ends.logits(teacher_ND[part]).log_softmax(dim=-1, dtype=torch.float32)
                teacher = log_teacher.exp()
                loss_N[part] = (teacher * (log_teacher - logits.float())).sum(dim=-1) + total[:, 0]
                probs -= teacher
            if not ctx.needs_input_grad[0]:
                continue
            if ends.softcap is not None:
                probs *= 1 - (logits / ends.softcap).square()
            grad = torch.mul(probs, ends.logit_scale, out=logits)
            grad_ND[part] = grad.to(ends.head_VD.dtype) @ ends.head_VD
        ctx.save_for_backward(grad_ND)
        ctx.mark_non_differentiable(predicted_N)
        return loss_N, predicted_N

    @staticmethod
    def backward(ctx, grad_N, _):
        (grad_ND,) = ctx.saved_tensors
        return (grad_ND * grad_N[:, None]).to(grad_ND.dtype), None, None, None, None


def dpace_weights(loss_N, weighted_N, num_blocks: int, block_size: int, alpha: float = 0.5) -> torch.Tensor:
    """D-PACE's weights of the weighted slots [N], from their cross-entropies; constants."""
    chain_AS = loss_N.new_zeros(num_blocks * block_size)
    chain_AS[weighted_N] = (1 - alpha) * torch.exp(-loss_N.detach()) + alpha
    chain_AS = chain_AS.view(num_blocks, block_size)
    chain_AS = chain_AS[:, 1:].cumprod(dim=1)  # a slot without label ends it, as its factor is 0
    weight_AS = chain_AS.flip(1).cumsum(dim=1).flip(1)
    return torch.nn.functional.pad(weight_AS, (1, 0)).flatten()[weighted_N]


def block_inputs(batch: BlockBatch, ends: TargetEnds) -> tuple:
    """What the drafter's forward takes of a bin: embeddings, features, positions, and the mask."""
    blocks = batch.blocks
    num_context, block_size = len(batch.position_T), blocks.input_AS.shape[1]
    geometry = blocks.anchor_A, blocks.start_A, num_context, block_size
    on_cpu = batch.features_TF.device.type == "cpu"
    mask = grouped_mask(*geometry) if on_cpu else attention_mask(*geometry, dense=False)
    positions_BN = torch.cat((batch.position_T, blocks.position_AS.flatten()))[None]
    embeds_BQD = ends.embed(blocks.input_AS.flatten())[None]
    return embeds_BQD, batch.features_TF[None], positions_BN, mask


def block_loss(drafter, batch: BlockBatch, ends: TargetEnds, chunk: int, objective=Objective.decay) -> BlockLoss:
    """The weighted loss of one bin. drafter: the model, or an engine whose forward is the model's.

    chunk: how many slots' logits exist at one time; it changes memory and speed, not the result.
    """
    blocks, block_size = batch.blocks, batch.blocks.input_AS.shape[1]
    inputs = getattr(getattr(drafter, "module", drafter), "block_inputs", block_inputs)  # a baseline's own, or DFlash's
    hidden_QD = drafter(*inputs(batch, ends))[0]
    label_N = blocks.label_AS.flatten()[batch.weighted_N]
    hidden_ND = hidden_QD[batch.weighted_N]
    loss_N, predicted_N = ChunkedCrossEntropy.apply(hidden_ND, label_N, ends, chunk, batch.teacher_ND)
    if objective == Objective.dpace:
        weight_N = dpace_weights(loss_N, batch.weighted_N, len(blocks.anchor_A), block_size)
    else:
        weight_N = blocks.weight_AS.flatten()[batch.weighted_N]
    right_AS = torch.zeros_like(blocks.input_AS, dtype=torch.bool)
    right_AS.view(-1)[batch.weighted_N] = predicted_N == label_N
    return BlockLoss((weight_N * loss_N).sum(), right_AS)
