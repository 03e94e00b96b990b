"""A trained drafter as a checkpoint that engines load, in one of two formats.

z-lab's, which SGLang, vLLM and Transformers read:

    config.json             DFlashDraftModel on Qwen3's fields; block_size twice, rope_theta and rope_parameters
    model.safetensors       bf16, in shards above `export.shard`; no embedding, no head: the target's are used
    model.py, generate.py   the code, for AutoModel.from_pretrained(..., trust_remote_code=True)
    dflash_training.json    target, template, taps, data and cache, steps, versions
    probe.st                inputs of one block, and what the trained drafter makes of them (see verify.py)

speculators', which vLLM reads: the drafter's fields nested in `transformer_layer_config`, tap ids one higher (they
count what enters a layer), S - 1 drafts, the target's name; its two tables in the weights if wished.

The card and the measurements are added by report.py.
"""

import shutil
from enum import Enum
from pathlib import Path

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from transformers import Qwen3Config

import dflash.generate
import dflash.model
from data_prep.files import read_json, sampled_digest, write_json
from dflash.model import DFlashDraftModel, TargetEnds, rope_theta, scales
from train import checkpoint
from train.config import RunConfig
from train.verify import PROBE, TRAINING, geometry, probe, refuse, verify

CODE = (dflash.model.__file__, dflash.generate.__file__)

# What either format says of the drafter's layers. Nothing else of a config leaves the house: a field that an engine
# knows and training did not would change what the drafter computes there (speculators #613).
LAYERS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "initializer_range", "attention_bias", "attention_dropout", "vocab_size",
    "max_position_embeddings", "layer_types", "use_sliding_window", "sliding_window", "max_window_layers",
    "tie_word_embeddings", "use_cache", "bos_token_id", "eos_token_id",
)  # fmt: skip


class Format(Enum):
    zlab = "zlab"
    speculators = "speculators"


def layers_config(config: Qwen3Config) -> dict:
    """The fields that both formats share: flat and nested rotary fields agree, causality is explicit."""
    theta = rope_theta(config)
    return {name: getattr(config, name) for name in LAYERS} | {
        "model_type": "qwen3",
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "is_causal": False,
    }


def zlab_config(config: Qwen3Config) -> dict:
    inside = {"block_size": config.block_size, **config.dflash_config}
    return layers_config(config) | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "model.DFlashDraftModel"},
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": inside,
        "rope_scaling": None,
        "dtype": "bfloat16",
        "transformers_version": transformers.__version__,
    }


def speculators_config(config: Qwen3Config, training: dict) -> dict:
    """training: names the served model. Raises ValueError for scales of the target, which have no key there."""
    if found := {name: value for name, value in scales(config).items() if value not in (1.0, None)}:
        raise ValueError(f"export.speculators: the target has {found}, which the format has no key for; use z-lab's")
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.8.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {
                "name_or_path": training["target_id"],
                "architectures": training["target_architectures"],
            },
        },
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.dflash_config["target_layer_ids"]],
        "mask_token_id": config.dflash_config["mask_token_id"],
        "sliding_window_non_causal": True,  # vLLM takes `causal` of every layer from it where is_causal is not found
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformers_version": transformers.__version__,
        "transformer_layer_config": layers_config(config),
    }


def export(
    drafter: DFlashDraftModel, folder: Path, training: dict, form: Format = Format.zlab,
    tables: TargetEnds | None = None, shard: str = "5GB",
) -> Path:  # fmt: skip
    """Write an export and let the door-keeper see it; the folder appears only when nothing was found wrong.

    training: what `dflash_training.json` says. tables: the target's, to copy into speculators' format. Raises
    ValueError, one line, for the first thing that an engine would read differently from what was trained.
    """
    config = zlab_config(drafter.config)
    if form == Format.speculators:
        config = speculators_config(drafter.config, training)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in drafter.state_dict().items()}
        if tables is not None:
            copies = {"embed_tokens.weight": tables.embed_VD, "lm_head.weight": tables.head_VD}
            tensors |= {name: table.to("cpu", torch.bfloat16, copy=True) for name, table in copies.items()}
        save_torch_state_dict(tensors, part, max_shard_size=shard)
        write_json(part / "config.json", config)
        for source in CODE if form == Format.zlab else ():
            shutil.copy(source, part)
        save_file(probe(drafter), part / PROBE)
        write_json(part / TRAINING, training | {"geometry": geometry(drafter)})
        refuse(verify(part, drafter))
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def export_checkpoint(config: RunConfig) -> Path:
    """Export `path` (a checkpoint), or the run's best one, to runs/NAME/export; returns that folder.

    With `export.speculators` also to runs/NAME/export-speculators.
    """
    path = config.path or checkpoint.best(config.folder / "checkpoints")
    if path is None:
        raise ValueError(f"path: no complete checkpoint in {config.folder / 'checkpoints'}; train first")
    if not (path / "trainer.json").exists():
        raise ValueError(f"path: {path} is not a complete checkpoint, expected a trainer.json in it")
    trainer, folder = read_json(path / "trainer.json"), path.parents[1] / "export"
    if (kind := trainer["config"]["drafter"]["kind"]) != "dflash":
        raise ValueError(f"path: {path} has a drafter of kind {kind}, expected dflash; no engine runs this baseline")
    weights = sampled_digest(path / "state.safetensors")
    training = trainer["training"] | {"steps": trainer["step"], "checkpoint": {"name": path.name, "hash": weights}}
    training["config"] = {name: trainer["config"][name] for name in ("data", "cache", "batch", "optim", "evaluate")}
    places = {Format.zlab: folder}
    if config.export.speculators:
        places[Format.speculators] = path.parents[1] / "export-speculators"
    for form, place in places.items():
        if (place / TRAINING).exists() and read_json(place / TRAINING).items() >= training.items():
            print(f"export: {place} is that of {path} already", flush=True)
            continue
        drafter, tables = checkpoint.load_drafter(path), None
        if form == Format.speculators and config.export.tables:
            tables = _tables(config, drafter)
        export(drafter, place, training, form, tables, config.export.shard)
        print(f"export: {path} -> {place}, reloaded in a fresh process and equal", flush=True)
    return folder


def _tables(config: RunConfig, drafter: DFlashDraftModel) -> TargetEnds:
    from data_prep.prepare import target_folder
    from dflash.target import load_ends

    model = config.model
    return load_ends(
        target_folder(model, config.cache), drafter.config, dtype=torch.bfloat16, revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )  # fmt: skip
