"""The training objective: masked block cross-entropy, through the target's frozen head.

    loss = sum over blocks and slots k of  w_k * CE(head(drafter(block))_k, token at anchor + k)

returned as a sum; the step divides it by one global number (the sum of all weights), which is known before the first
forward. The head runs on weighted slots only, a chunk at a time, and full logits never exist.

Shapes: T context tokens, A anchors, S slots, Q = A * S, N slots with weight, D hidden, F features, V vocabulary.
"""

from dataclasses import dataclass

import torch

from .blocks import Blocks, attention_mask, grouped_mask
from .model import TargetEnds


@dataclass
class BlockBatch:
    """One bin on the device: the context and its blocks."""

    features_TF: torch.Tensor
    position_T: torch.Tensor  # int64, document-local
    blocks: Blocks
    weighted_N: torch.Tensor  # int64 indices into Q of the slots with weight


@dataclass
class BlockLoss:
    """Sums of one bin. `loss` carries the gradient; `right_AS` tells which weighted slots were predicted."""

    loss: torch.Tensor  # fp32 scalar, sum of weight * cross-entropy
    right_AS: torch.Tensor  # bool


class ChunkedCrossEntropy(torch.autograd.Function):
    """Weighted cross-entropy behind a frozen head, loss and gradient of a chunk in one pass.

    The head gets no gradient, so d loss / d hidden is formed while the chunk's logits are at hand, and neither logits
    nor a recomputation are needed later. hidden_ND, label_N, weight_N -> (fp32 sum, predicted ids [N]).
    """

    @staticmethod
    def forward(ctx, hidden_ND, label_N, weight_N, ends: TargetEnds, chunk: int):
        grad_ND = torch.empty_like(hidden_ND, dtype=ends.head_VD.dtype)
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        predicted_N = torch.empty_like(label_N)
        for start in range(0, len(hidden_ND), chunk):
            part = slice(start, start + chunk)
            label, weight = label_N[part, None], weight_N[part, None]
            logits = ends.logits(hidden_ND[part])
            highest, predicted = logits.max(dim=-1, keepdim=True)
            predicted_N[part] = predicted[:, 0]
            probs = logits.softmax(dim=-1, dtype=torch.float32)
            # The log-sum-exp follows from the largest probability: at least 1 / V, so its logarithm is safe.
            total = highest.float() - probs.gather(1, predicted).log()
            loss += (weight * (total - logits.gather(1, label).float())).sum()
            if not ctx.needs_input_grad[0]:
                continue
            probs.scatter_add_(1, label, torch.full_like(weight, -1.0))
            if ends.softcap is not None:
                probs *= 1 - (logits / ends.softcap).square()
            grad = torch.mul(probs, weight * ends.logit_scale, out=logits)
            grad_ND[part] = grad.to(ends.head_VD.dtype) @ ends.head_VD
        ctx.save_for_backward(grad_ND)
        ctx.mark_non_differentiable(predicted_N)
        return loss, predicted_N

    @staticmethod
    def backward(ctx, grad_loss, _):
        (grad_ND,) = ctx.saved_tensors
        return grad_ND * grad_loss, None, None, None, None


def block_loss(drafter, batch: BlockBatch, ends: TargetEnds, chunk: int) -> BlockLoss:
    """The weighted loss of one bin. drafter: the model, or an engine whose forward is the model's.

    chunk: how many slots' logits exist at one time; it changes memory and speed, not the result.
    """
    blocks = batch.blocks
    num_context, block_size = len(batch.position_T), blocks.input_AS.shape[1]
    geometry = blocks.anchor_A, blocks.start_A, num_context, block_size
    on_cpu = batch.features_TF.device.type == "cpu"
    mask = grouped_mask(*geometry) if on_cpu else attention_mask(*geometry, dense=False)
    positions_BN = torch.cat((batch.position_T, blocks.position_AS.flatten()))[None]
    embeds_BQD = ends.embed(blocks.input_AS.flatten())[None]
    hidden_QD = drafter(embeds_BQD, batch.features_TF[None], positions_BN, mask)[0]
    label_N = blocks.label_AS.flatten()[batch.weighted_N]
    weight_N = blocks.weight_AS.flatten()[batch.weighted_N]
    loss, predicted_N = ChunkedCrossEntropy.apply(hidden_QD[batch.weighted_N], label_N, weight_N, ends, chunk)
    right_AS = torch.zeros_like(blocks.input_AS, dtype=torch.bool)
    right_AS.view(-1)[batch.weighted_N] = predicted_N == label_N
    return BlockLoss(loss, right_AS)
