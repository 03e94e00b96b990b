"""A drafter that somebody released, as the start of a training: z-lab's format or speculators', a folder or a Hub id.

Both are read into z-lab's words. What our drafters do not have (sliding windows, causal blocks, a pruned vocabulary,
scaled rotary embeddings) is refused by name.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import Qwen3Config
from transformers.utils import cached_file

# The geometry that a drafter may have of its own; the rest of its config follows from the target.
GEOMETRY = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
FROZEN = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t")


@dataclass
class Released:
    """config: z-lab's keys. tensors: by z-lab's names, without copies of the target's tables."""

    path: str
    config: dict
    tensors: dict[str, torch.Tensor]

    def check(self, model) -> None:
        """Raise ValueError, one line, for the first choice of a ModelConfig that is not the drafter's."""
        inside = self.config["dflash_config"]
        own = {
            "block_size": self.config["block_size"],
            "num_layers": self.config["num_hidden_layers"],
            "taps": inside["target_layer_ids"],
            "mask_token_id": inside["mask_token_id"],
            "target_layers": self.config.get("num_target_layers", model.target_layers),
            "hidden_size": self.config["hidden_size"],
            "vocab_size": self.config["vocab_size"],
        }
        for name, value in own.items():
            found = getattr(model, name)
            if found != value and not (name in ("target_layers", "hidden_size", "vocab_size") and found is None):
                raise ValueError(f"model.{name}: found {found}, expected {value} as in {self.path} (model.init_from)")

    def geometry(self) -> dict:
        """What of the drafter's config is its own, and its rotary base."""
        rope = self.config.get("rope_parameters") or {}
        theta = {v for v in (rope.get("rope_theta"), self.config.get("rope_theta")) if v is not None}
        if len(theta) != 1 or rope.get("rope_type", "default") != "default" or self.config.get("rope_scaling"):
            raise ValueError(f"{self.path}: rotary fields {rope or theta} found, expected one plain base")
        return {name: self.config[name] for name in GEOMETRY} | {"rope_theta": float(theta.pop())}


def read_released(path: str) -> Released:
    """Read a released drafter. Raises ValueError for one that our drafters cannot be."""
    config = json.loads(Path(cached_file(path, "config.json")).read_text())
    if "transformer_layer_config" in config:  # speculators: a nested config, and ids that count boundaries
        taps = [i - 1 for i in config["aux_hidden_state_layer_ids"]]
        inside = {"target_layer_ids": taps, "mask_token_id": config["mask_token_id"]}
        causal = not config.get("sliding_window_non_causal", True) and "is_causal" not in config
        sizes = {name: config[name] for name in ("block_size", "draft_vocab_size") if name in config}
        nested = config["transformer_layer_config"]
        config = {**nested, **sizes, "dflash_config": inside, "is_causal": nested.get("is_causal", causal)}
    elif "dflash_config" not in config:
        raise ValueError(f"model.init_from: {path} has neither dflash_config nor transformer_layer_config: no drafter")
    else:
        config = {**config, "dflash_config": dict(config["dflash_config"])}
        config.setdefault("block_size", config["dflash_config"].get("block_size", 16))
    windows = [kind for kind in config.get("layer_types") or () if kind != "full_attention"]
    unlike = {
        "is_causal": bool(config.get("is_causal")),
        "layer_types": bool(windows),
        "draft_vocab_size": config.get("draft_vocab_size", config["vocab_size"]) != config["vocab_size"],
        "attention_bias": bool(config.get("attention_bias")),
        "selector_rank": "selector_rank" in config["dflash_config"],
        "conv_kernel_size": "conv_kernel_size" in config["dflash_config"],
    }
    for name, is_so in unlike.items():
        if is_so:
            found = config.get(name, config["dflash_config"].get(name))
            raise ValueError(f"model.init_from: {path} has {name}={found}, which drafters of this trainer do not have")
    return Released(path, config, _tensors(path))


def _tensors(path: str) -> dict[str, torch.Tensor]:
    index = cached_file(path, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    files = (
        ["model.safetensors"]
        if index is None
        else sorted({*json.loads(Path(index).read_text())["weight_map"].values()})
    )
    found = {}
    for file in files:
        with safe_open(cached_file(path, file), framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}
    found = {name.removeprefix("model."): tensor.float() for name, tensor in found.items()}
    return {name: tensor for name, tensor in found.items() if name not in FROZEN}


def adopt(config: Qwen3Config, released: Released) -> Qwen3Config:
    """A drafter's config with the geometry of the released one."""
    values = {k: v for k, v in config.to_dict().items() if k not in ("rope_parameters", "rope_scaling")}
    return Qwen3Config(**{**values, **released.geometry()})
