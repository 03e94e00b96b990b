"""The DFlash drafter: a few Qwen3-style layers whose keys and values also hold the target's hidden states.

    context   H = RMSNorm(fc [h_tap1; ...; h_tapN])               once, shared by all layers (paper, section 3.1)
    layer     Q = Wq X;  K = [Wk H ; Wk X];  V = [Wv H ; Wv X]     X: the block, slot 0 the anchor, the rest masks
    logits    head(norm(X)) at slots 1..S-1; slot k predicts the token at anchor + k

Embedding and head are the target's own. Parameter names are those of z-lab's released drafters, so that a
checkpoint of either loads in the other. This file and `generate.py` are what an export ships as remote code: they
need torch and transformers (4.57.1 or 5.x) only.

Shapes: B sequences, T context tokens, Q block tokens (blocks x slots), N = T + Q, D hidden, F features, H heads,
G key-value heads, K head dimension, V vocabulary.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, Qwen3Config

from .generate import Buffers, Proposal, Round, generate


@dataclass
class TargetEnds:
    """The target's frozen embedding and head, used in place.

    embed_VD, head_VD: the two tables (the same tensor for a tied target). The scales and the soft-cap are those of
    the target's architecture: logits = cap * tanh(scale * head(x) / cap).
    """

    embed_VD: torch.Tensor
    head_VD: torch.Tensor
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [...] -> scaled embeddings [..., D]."""
        rows = F.embedding(ids, self.embed_VD)
        return rows if self.embed_scale == 1.0 else rows * rows.new_tensor(self.embed_scale)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden states [..., D] -> logits [..., V], in the head's dtype; in fp32 where scaled or capped."""
        # As rows: a slice of a batch of one has strides for which oneDNN takes 20 times as long.
        rows = hidden.to(self.head_VD.dtype).flatten(0, -2)
        logits = F.linear(rows, self.head_VD).unflatten(0, hidden.shape[:-1])
        if self.logit_scale != 1.0:
            logits = logits.float() * self.logit_scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits.float() / self.softcap)

    @classmethod
    def of(cls, target: nn.Module, config: Qwen3Config) -> "TargetEnds":
        """Both tables of a loaded target, the scales of the drafter's config. ValueError for a head with a bias."""
        if getattr(target.get_output_embeddings(), "bias", None) is not None:
            raise ValueError("target: its head has a bias, which no DFlash engine applies to the drafter; unsupported")
        embed, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
        return cls(embed.detach(), head.detach(), **scales(config))


def scales(config: Qwen3Config) -> dict:
    """Embedding scale, logit scale and soft-cap that a drafter config records of its target (keys as z-lab's)."""
    extra = config.dflash_config
    return {
        "embed_scale": extra.get("input_embedding_scale", 1.0),
        "logit_scale": extra.get("output_multiplier", 1.0),
        "softcap": extra.get("final_logit_softcapping"),
    }


def rope_theta(config: Qwen3Config) -> float:
    """The rotary base: the one resolver for training and export.

    Transformers 4 keeps it flat, Transformers 5 in `rope_parameters`. Raises ValueError where both exist and differ,
    where none does, and for any scaled or partial rotary embedding, which a drafter does not use.
    """
    nested = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    found = {value for value in (getattr(config, "rope_theta", None), nested.get("rope_theta")) if value is not None}
    if len(found) != 1:
        raise ValueError(f"rope_theta: found {sorted(found) or 'none'}, expected one value; fix the drafter's config")
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind != "default" or nested.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"rope_parameters: found {nested}, expected plain rotary; a drafter's rotary is not scaled")
    return float(found.pop())


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * y.to(x.dtype)


def rotary_angles(theta: float, head_dim: int, positions_BN: torch.Tensor) -> torch.Tensor:
    """fp32 angles [B, N, K] of a rotary embedding with half-split pairing."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=positions_BN.device) / head_dim)
    return (positions_BN[..., None].float() * frequency).repeat(1, 1, 2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [B, N, heads, K], half-split pairing; cos, sin [B, N, 1, K]. Same shape out."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@functools.cache
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def attend(q_BHQK, k_BGNK, v_BGNK, mask):
    """Attention of the blocks' queries [B, H, Q, K] over context and blocks [B, G, N, K] -> [B, H, Q, K].

    mask: None (all visible), a dense bool mask, a BlockMask (FlexAttention), or a list of `blocks.Group`.
    """
    gqa = q_BHQK.shape[1] != k_BGNK.shape[1]
    if isinstance(mask, list):
        parts = []
        for queries, context, slots, part in mask:
            k, v = (torch.cat((x[:, :, context], x[:, :, slots]), dim=2) for x in (k_BGNK, v_BGNK))
            parts.append(F.scaled_dot_product_attention(q_BHQK[:, :, queries], k, v, attn_mask=part, enable_gqa=gqa))
        return torch.cat(parts, dim=2)
    if mask is None or isinstance(mask, torch.Tensor):
        return F.scaled_dot_product_attention(q_BHQK, k_BGNK, v_BGNK, attn_mask=mask, enable_gqa=gqa)
    return _compiled_flex()(q_BHQK, k_BGNK, v_BGNK, block_mask=mask, enable_gqa=gqa)


class Attention(nn.Module):
    """Queries from the block [B, Q, D]; keys and values from [context ; block], N = T + Q, by the same projections."""

    def __init__(self, config: Qwen3Config, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, heads, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x_BQD, context_BTD, cos, sin, mask, cache):
        """[B, Q, D]. cos, sin [B, N, 1, K]: of the context's positions, then of the slots'. mask: see `attend`."""
        first_slot = context_BTD.shape[1]
        both_BND = torch.cat((context_BTD.to(x_BQD.dtype), x_BQD), dim=1)
        q = self.q_norm(self.q_proj(x_BQD).unflatten(-1, (-1, self.head_dim)))
        k = self.k_norm(self.k_proj(both_BND).unflatten(-1, (-1, self.head_dim)))
        v = self.v_proj(both_BND).unflatten(-1, (-1, self.head_dim))
        q = rotate(q, cos[:, first_slot:], sin[:, first_slot:]).transpose(1, 2)
        k, v = rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        return self.o_proj(attend(q, k, v.to(q.dtype), mask).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: Qwen3Config, layer: int):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, layer), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BQD, *attention_inputs):
        x_BQD = x_BQD + self.self_attn(self.input_layernorm(x_BQD), *attention_inputs)
        return x_BQD + self.mlp(self.post_attention_layernorm(x_BQD))


class DFlashDraftModel(PreTrainedModel):
    """The drafter. Config: a Qwen3Config with z-lab's keys `block_size` and `dflash_config` (taps, mask token)."""

    config_class = Qwen3Config
    base_model_prefix = ""
    _no_split_modules = ["DecoderLayer"]
    _supports_sdpa = True

    def __init__(self, config: Qwen3Config):
        super().__init__(config)
        self.taps = list(config.dflash_config["target_layer_ids"])
        self.mask_token_id = config.dflash_config["mask_token_id"]
        self.block_size = config.block_size
        self.theta = rope_theta(config)
        self.recompute = False  # each layer in the backward pass, to save memory
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.fc = nn.Linear(len(self.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)

    def forward(self, embeds_BQD, features_BTF, positions_BN, mask=None, cache: Buffers | None = None):
        """Hidden states [B, Q, D] of the blocks, normed: what the target's head turns into logits.

        embeds_BQD: embeddings of the blocks' slots, block after block. features_BTF: the target's tapped states of
        T context tokens (only the new ones where a cache holds the earlier). positions_BN: absolute, document-local
        positions of the context tokens, then of the slots. mask: see `blocks.visible`; None shows everything, as
        serving one sequence does.
        """
        angle = rotary_angles(self.theta, self.config.head_dim, positions_BN)[:, :, None]
        cos, sin = angle.cos().to(embeds_BQD.dtype), angle.sin().to(embeds_BQD.dtype)
        context_BTD = self.hidden_norm(self.fc(features_BTF))
        x_BQD = embeds_BQD
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x_BQD = checkpoint(layer, x_BQD, context_BTD, cos, sin, mask, cache, use_reentrant=False)
            else:
                x_BQD = layer(x_BQD, context_BTD, cos, sin, mask, cache)
        return self.norm(x_BQD)

    def begin(self, target: nn.Module, capacity: int):
        """State of one generation: buffers of `capacity` tokens, the last one spare, and the target's two tables."""
        return Buffers(capacity), TargetEnds.of(target, self.config)

    def propose(self, state, told: Round, num_drafts: int, choose) -> Proposal:
        """Draft `num_drafts` tokens behind each anchor in one forward.

        choose: logits [B, n, V] -> Proposal. Void features are kept in the spare place, which nobody sees.
        """
        cache, ends = state
        device, length_B1 = told.anchor_B.device, told.length_B[:, None]
        context_BT = told.first_B[:, None] + torch.arange(told.features_BTF.shape[1], device=device)
        slot_BQ = length_B1 + torch.arange(num_drafts + 1, device=device)
        kept_BT = torch.where(context_BT < length_B1, context_BT, cache.capacity - 1)
        cache.aim(torch.cat((kept_BT, slot_BQ), dim=1), told.bound)
        mask = None if told.exact else (torch.arange(told.bound, device=device) <= slot_BQ[:, -1:])[:, None, None]
        ids_BQ = F.pad(told.anchor_B[:, None], (0, num_drafts), value=self.mask_token_id)
        positions_BN = torch.cat((context_BT, slot_BQ), dim=1)
        features_BTF = told.features_BTF.to(self.dtype)
        hidden_BQD = self(ends.embed(ids_BQ).to(self.dtype), features_BTF, positions_BN, mask, cache)
        return choose(ends.logits(hidden_BQD[:, 1:]))

    def spec_generate(
        self, target, input_ids, max_new_tokens, stop_token_ids=None, temperature=0.0, block_size=None, **sampling
    ):
        """Prompt ids [1, P] int64 -> prompt and answer ids [1, P + n]; the words are the target's own.

        Arguments and errors are those of `generate`.
        """
        result = generate(
            target, input_ids, max_new_tokens, drafter=self, stop_token_ids=stop_token_ids or (),
            temperature=temperature, block_size=block_size, **sampling,
        )  # fmt: skip
        return torch.cat((input_ids, torch.tensor([result.tokens], device=input_ids.device)), dim=1)
