"""The baselines: other drafters for the same target, trained on the same cache, in the same loop, for comparison.

    eagle3   x_i = merge [norm embed(token i) ; norm fc(taps of token i - 1)], a few causal layers, the target's head
             (EAGLE-3, arXiv 2503.01840). The first draft reads the target's states; each further one reads, in their
             place, the drafter's own last hidden state, and training unrolls these steps.
    mtp      the same with the highest tap alone: what a multi-token-prediction module reads (DeepSeek-V3, 2412.19437)
    fused    reads x_i likewise, and drafts a block in one forward: masks behind the anchor, which see one another
    tokens   the same without the target's states

Not the published models to the letter: layers, head, data, anchors and weights are DFlash's, so that the comparison is
of the method. In unrolled steps tokens are forced to the true ones, states are the drafter's own, as in EAGLE-3.

Shapes as in dflash/model.py; A anchors, S slots.
"""

import torch
from torch import nn
from transformers import Qwen3Config

from .config import Kind
from .generate import Buffers, Proposal, Round
from .model import DFlashDraftModel, RMSNorm, TargetEnds, rotary_angles
from .objective import BlockBatch


class Unrolled:
    """Keys and values of one training forward: the context's, then those of each step behind them."""

    def __init__(self):
        self.held = {}

    def update(self, k_BGNK, v_BGNK, layer: int):
        keys, values = self.held.setdefault(layer, ([], []))
        keys.append(k_BGNK)
        values.append(v_BGNK)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)


class Reader(DFlashDraftModel):
    """What the baselines share: the context is read as tokens, each merged with the states of the one before."""

    def __init__(self, config: Qwen3Config):
        super().__init__(config)
        size = config.hidden_size
        if config.drafter_kind == Kind.mtp.value:
            self.taps = self.taps[-1:]
        self.fc = nn.Linear(len(self.taps) * size, size, bias=False)
        self.embed_norm = RMSNorm(size, config.rms_norm_eps)
        self.merge = nn.Linear(2 * size, size, bias=False)
        for module in (self.fc, self.merge):
            self._init_weights(module)
        with torch.no_grad():
            self.merge.weight[:, size:] += torch.eye(size)  # states pass: the first steps learn from them

    def _through(self, embeds_BND, states_BND, positions_BN, mask, cache):
        """Hidden states [B, N, D], before the final norm, of tokens and the states that go with them."""
        x_BND = self.merge(torch.cat((self.embed_norm(embeds_BND), self.hidden_norm(states_BND)), dim=-1))
        angle = rotary_angles(self.theta, self.config.head_dim, positions_BN)[:, :, None]
        cos, sin = angle.cos().to(x_BND.dtype), angle.sin().to(x_BND.dtype)
        for layer in self.layers:
            x_BND = layer(x_BND, x_BND[:, :0], cos, sin, mask, cache)
        return x_BND

    def _read(self, context_BTD, features_BTF, position_T):
        """Pass a bin's tokens, each with the states of the one before: (hidden states, what sees what, the cache)."""
        before_BTF = nn.functional.pad(features_BTF[..., -self.fc.in_features :], (0, 0, 1, -1))
        before_BTF = before_BTF * (position_T > 0)[:, None]
        index_T, cache = torch.arange(len(position_T), device=position_T.device), Unrolled()
        seen = (index_T <= index_T[:, None]) & (index_T >= (index_T - position_T)[:, None])
        return self._through(context_BTD, self.fc(before_BTF), position_T[None], seen, cache), seen, cache

    def begin(self, target: nn.Module, capacity: int) -> dict:
        """State of one generation; `before`: the target's states of the token before the next one to be read."""
        return {"cache": Buffers(capacity), "ends": TargetEnds.of(target, self.config), "before": None}

    def _unread(self, state, told: Round):
        """The tokens since the last call and the anchor: ids, states before each, positions, and where they are kept.

        Void ones are kept in the spare place.
        """
        features_BTF, length_B1 = told.features_BTF.to(self.dtype), told.length_B[:, None]
        if state["before"] is None:
            state["before"] = torch.zeros_like(features_BTF[:, :1])
        before_BNF = torch.cat((state["before"], features_BTF), dim=1)
        last = (told.length_B - told.first_B)[:, None, None].expand_as(state["before"])
        state["before"] = before_BNF.gather(1, last)
        before_BNF = torch.cat((before_BNF[:, :-1], state["before"]), dim=1)
        ids_BN = torch.cat((told.ids_BT, told.anchor_B[:, None]), dim=1)
        read_BT = told.first_B[:, None] + torch.arange(told.ids_BT.shape[1], device=ids_BN.device)
        kept_BT = torch.where(read_BT < length_B1, read_BT, state["cache"].capacity - 1)
        return ids_BN, before_BNF, *(torch.cat((at, length_B1), dim=1) for at in (read_BT, kept_BT))


class AutoregressiveDrafter(Reader):
    """One token a forward: `eagle3` and `mtp`."""

    def block_inputs(self, batch: BlockBatch, ends: TargetEnds) -> tuple[torch.Tensor, ...]:
        """What `forward` takes of a bin."""
        blocks = batch.blocks
        embeds = ends.embed(batch.ids_T)[None], ends.embed(blocks.label_AS)[None]
        return *embeds, batch.features_TF[None], batch.position_T, blocks.anchor_A

    def forward(self, context_BTD, forced_BASD, features_BTF, position_T, anchor_A):
        """Hidden states [B, A * S, D], normed; slot k of a block is what predicts the token at anchor + k.

        context_BTD: embeddings of the bin's tokens. forced_BASD: of the true tokens at each block's slots.
        """
        hidden, seen, cache = self._read(context_BTD, features_BTF, position_T)
        anchor_A = anchor_A.clamp(max=len(position_T) - 1)  # bins are filled up with anchors behind all context
        hidden, seen = hidden[:, anchor_A], seen[anchor_A]
        own, slots = torch.eye(len(anchor_A), dtype=torch.bool, device=seen.device), [hidden, hidden]
        for step in range(1, forced_BASD.shape[2] - 1):
            seen = torch.cat((seen, own), dim=1)
            at_A = position_T[anchor_A] + step
            hidden = self._through(forced_BASD[:, :, step], hidden, at_A[None], seen, cache)
            slots.append(hidden)
        return self.norm(torch.stack(slots, dim=2).flatten(1, 2))

    def propose(self, state, told: Round, num_drafts: int, choose) -> Proposal:
        """As DFlash's, in `num_drafts` forwards: the first reads what was verified since the last call."""
        cache, ends = state["cache"], state["ends"]
        ids_BN, before_BNF, position_BN, kept_BN = self._unread(state, told)
        states, length_B1 = self.fc(before_BNF), told.length_B[:, None]
        drafts = []
        while True:
            cache.aim(kept_BN, told.bound)
            seen = (torch.arange(told.bound, device=ids_BN.device) <= position_BN[..., None])[:, None]
            embeds_BND = ends.embed(ids_BN).to(self.dtype)
            states = self._through(embeds_BND, states, position_BN, seen, cache)[:, -1:]
            drafts.append(choose(ends.logits(self.norm(states))))
            if len(drafts) == num_drafts:
                break
            ids_BN, position_BN = drafts[-1].ids, length_B1 + len(drafts)
            kept_BN = position_BN
        ids, probs = zip(*drafts)
        return Proposal(torch.cat(ids, dim=1), None if probs[0] is None else torch.cat(probs, dim=1))


class FusedDrafter(Reader):
    """A block in one forward, the context read as tokens with states: `fused`, and `tokens` without the states."""

    def __init__(self, config: Qwen3Config):
        super().__init__(config)
        self.share = 0.0 if config.drafter_kind == Kind.tokens.value else 1.0

    def _through(self, embeds_BND, states_BND, *rest):
        return super()._through(embeds_BND, self.share * states_BND, *rest)

    def block_inputs(self, batch: BlockBatch, ends: TargetEnds) -> tuple[torch.Tensor, ...]:
        """What `forward` takes of a bin."""
        blocks = batch.blocks
        embeds = ends.embed(batch.ids_T)[None], ends.embed(blocks.input_AS)[None]
        return *embeds, batch.features_TF[None], batch.position_T, blocks.anchor_A

    def forward(self, context_BTD, masks_BASD, features_BTF, position_T, anchor_A):
        """Hidden states [B, A * S, D], normed. masks_BASD: embeddings of each block's anchor and masks."""
        hidden, seen, cache = self._read(context_BTD, features_BTF, position_T)
        anchor_A = anchor_A.clamp(max=len(position_T) - 1)
        slots = masks_BASD.shape[2] - 1
        block_Q = torch.arange(len(anchor_A), device=anchor_A.device).repeat_interleave(slots)
        seen = torch.cat((seen[anchor_A][block_Q], block_Q[:, None] == block_Q), dim=1)
        at_AS = position_T[anchor_A][:, None] + torch.arange(1, slots + 1, device=anchor_A.device)
        masks_BQD = masks_BASD[:, :, 1:].flatten(1, 2)
        drafted = self._through(masks_BQD, torch.zeros_like(masks_BQD), at_AS.flatten()[None], seen, cache)
        both = torch.cat((hidden[:, anchor_A][:, :, None], drafted.unflatten(1, (-1, slots))), dim=2)
        return self.norm(both.flatten(1, 2))

    def propose(self, state, told: Round, num_drafts: int, choose) -> Proposal:
        """As DFlash's, in one forward of what was verified since the last call, and the block."""
        ids_BN, before_BNF, position_BN, kept_BN = self._unread(state, told)
        device, pad = ids_BN.device, nn.functional.pad
        slot_BS = told.length_B[:, None] + torch.arange(1, num_drafts + 1, device=device)
        ids_BN = pad(ids_BN, (0, num_drafts), value=self.mask_token_id)
        states_BND = pad(self.fc(before_BNF), (0, 0, 0, num_drafts))
        last_BN = torch.cat((position_BN, slot_BS[:, -1:].expand_as(slot_BS)), dim=1)  # slots see their whole block
        position_BN = torch.cat((position_BN, slot_BS), dim=1)
        state["cache"].aim(torch.cat((kept_BN, slot_BS), dim=1), told.bound)
        seen = (torch.arange(told.bound, device=device) <= last_BN[..., None])[:, None]
        embeds_BND = state["ends"].embed(ids_BN).to(self.dtype)
        hidden = self._through(embeds_BND, states_BND, position_BN, seen, state["cache"])[:, -num_drafts:]
        return choose(state["ends"].logits(self.norm(hidden)))


def make_drafter(config: Qwen3Config, kind: Kind | None = None) -> DFlashDraftModel:
    """A fresh drafter; without a kind, of that which its config names. DFlash's config names none."""
    kind = kind or Kind(getattr(config, "drafter_kind", "dflash"))
    if kind == Kind.dflash:
        return DFlashDraftModel(config)
    config.drafter_kind = kind.value
    return (FusedDrafter if kind in (Kind.fused, Kind.tokens) else AutoregressiveDrafter)(config)
