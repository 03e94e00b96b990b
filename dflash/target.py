"""The frozen target: its tapped hidden states, and its embedding and head alone.

Shapes: B rows, T tokens of a row, D hidden, F features (taps x hidden).
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config
from transformers.utils import cached_file, logging

from .generate import tapped
from .model import DFlashDraftModel, TargetEnds, scales

EMBED_NAMES = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
HEAD_NAMES = ("lm_head.weight",)
PAD_TO = 16  # few shapes: libraries keep a kernel and memory for each


def default_device() -> torch.device:
    """The current GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def load_target(
    path: str, *, dtype: torch.dtype, revision: str | None = None, trust_remote_code: bool = False, **options
):
    """The whole target, frozen, in evaluation mode; on the default device unless options place it (`device_map`, a
    quantisation). options: further arguments of `from_pretrained`; raises what it raises."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code, **options
    )
    placed = options.keys() & {"device_map", "quantization_config"}
    return (model if placed else model.to(default_device())).eval().requires_grad_(False)


@torch.no_grad()
def features(target, rows: list[list[int]], taps: list[int], last: bool = False) -> list[tuple[torch.Tensor, ...]]:
    """(features [T, F],) of each row, in the target's dtype: outputs of the decoder layers `taps`, concatenated; with
    `last` also the body's output [T, D], behind its final norm.

    Runs the body only, without the head. Rows are padded on the right, to a multiple of PAD_TO: the target is causal,
    so no token sees padding.
    """
    device = target.get_input_embeddings().weight.device
    longest = -(-max(map(len, rows)) // PAD_TO) * PAD_TO
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    with tapped(target, taps) as states:
        output = target.get_decoder()(input_ids=ids, use_cache=False)
    states = [torch.cat([state.to(device) for state in states], dim=-1)]  # layers may lie on several devices
    states += [output.last_hidden_state.to(device)] if last else []
    return [tuple(state[i, : len(row)] for state in states) for i, row in enumerate(rows)]


def load_ends(
    path: str,
    drafter: Qwen3Config,
    *,
    dtype: torch.dtype,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> TargetEnds:
    """Embedding and head of a target, read from its safetensors without loading its layers.

    A tied target has no head of its own: the embedding serves as both. Raises ValueError where a table is missing or
    has another shape than the drafter's config says.
    """
    tables = _tensors(path, (*EMBED_NAMES, *HEAD_NAMES), revision)
    embed = next((tables[name] for name in EMBED_NAMES if name in tables), None)
    if embed is None:
        raise ValueError(
            f"target {path}: no tensor named {' or '.join(EMBED_NAMES)} found; its layout is not supported"
        )
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    tied = config.get_text_config().tie_word_embeddings  # some types are tied unless they say otherwise
    head = embed if tied else tables.get(HEAD_NAMES[0])
    if head is None:
        raise ValueError(f"target {path}: it is not tied and has no {HEAD_NAMES[0]}; found {sorted(tables)}")
    wanted = (drafter.vocab_size, drafter.hidden_size)
    for name, table in (("embedding", embed), ("head", head)):
        if tuple(table.shape) != wanted:
            raise ValueError(f"target {path}: its {name} has shape {tuple(table.shape)}, expected {wanted}")
    embed = embed.to(default_device(), dtype)
    return TargetEnds(embed, embed if tied else head.to(default_device(), dtype), **scales(drafter))


@torch.no_grad()
def start_from_target(
    drafter: DFlashDraftModel, path: str, sample_TF: torch.Tensor, revision: str | None = None
) -> None:
    """Fill a fresh drafter with copies of its target's last layers and final norm.

    Not of the paper, whose drafters start at random: a choice for short runs. The context starts as the highest tap
    alone (fc its identity, plus a little of its random start), so that a layer's keys and values of the context are
    about those that the copied layer had in the target; the layer's input norm, which the context does not pass, is
    folded into q, k and v. A target without q/k norms gets constant ones, of the size that its queries and keys have on
    `sample_TF` [T, F]. Raises ValueError where a shape differs from the target's.
    """
    kind = AutoConfig.from_pretrained(path, revision=revision).model_type
    if kind not in ("llama", "mistral", "qwen3"):
        raise ValueError(f"model.init: target found, expected random for a {kind} target: its layers compute otherwise")
    count, width = len(drafter.layers), drafter.config.hidden_size
    first = drafter.config.num_target_layers - count
    names = [
        f"model.layers.{first + i}.{name}" for i in range(count) for name in dict(drafter.layers[0].named_parameters())
    ]
    tensors = _tensors(path, ("model.norm.weight", *names), revision)
    normed_TD = sample_TF[:, -width:].float()
    normed_TD = normed_TD * torch.rsqrt(normed_TD.square().mean(-1, keepdim=True) + drafter.config.rms_norm_eps)
    for i, layer in enumerate(drafter.layers):
        source = {name: tensors.get(f"model.layers.{first + i}.{name}") for name, _ in layer.named_parameters()}
        for name, parameter in layer.named_parameters():
            found = source[name]
            if name.endswith(("q_norm.weight", "k_norm.weight")) and found is None:
                folded = source[name.replace("_norm", "_proj")].float() * source["input_layernorm.weight"].float()
                found = torch.full_like(parameter, float((normed_TD @ folded.T).square().mean().sqrt()))
            elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) and found is not None:
                found = found.float() * source["input_layernorm.weight"].float()
            elif name == "input_layernorm.weight":
                found = torch.ones_like(parameter)
            if found is None or found.shape != parameter.shape:
                shape = None if found is None else tuple(found.shape)
                raise ValueError(
                    f"model.init: target found, but its {name} has shape {shape}, expected {tuple(parameter.shape)} as"
                    " in the drafter; use model.init=random"
                )
            parameter.copy_(found)
    drafter.hidden_norm.weight.fill_(1.0)
    drafter.fc.weight.mul_(0.3)
    drafter.fc.weight[:, -width:] += torch.eye(width)
    drafter.norm.weight.copy_(tensors["model.norm.weight"])


def _tensors(path: str, names: tuple[str, ...], revision: str | None) -> dict[str, torch.Tensor]:
    """Those of the named tensors that a checkpoint has, sharded or not."""
    index = cached_file(
        path, "model.safetensors.index.json", revision=revision, _raise_exceptions_for_missing_entries=False
    )
    if index is None:
        files = {"model.safetensors"}
    else:
        placed = json.loads(Path(index).read_text())["weight_map"]
        files = {placed[name] for name in names if name in placed}
    found = {}
    for file in sorted(files):
        with safe_open(cached_file(path, file, revision=revision), framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in names if name in tensors.keys()}
    return found
