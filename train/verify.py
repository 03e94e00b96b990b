"""The door-keeper: what engines will make of an export, before it leaves the house.

A broken drafter still yields the target's words; only acceptance falls, and nobody is told. So an export is refused
where

- its tensors are not those of the format, by name, shape and dtype;
- its config, read by the rules of vLLM or SGLang, is not the geometry that was trained;
- the rotary table that Transformers makes of its config is not that of training;
- a load in a fresh process gives other hidden states for a stored probe than the trained drafter did;
- the features that it was trained on were those of other taps.

`path=` of `stage=verify` is an export; what was trained stands in its own dflash_training.json and probe.st.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from data_prep.files import read_json
from dflash.model import DFlashDraftModel, rotary_angles, scales

TRAINING = "dflash_training.json"
PROBE = "probe.st"  # safetensors, but not by its name: vLLM takes every *.safetensors of a folder for weights
PROBE_TOLERANCE = 1e-4
ROOT = Path(__file__).resolve().parent.parent

_PLAIN = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "vocab_size", "max_position_embeddings", "attention_bias", "hidden_act",
)  # fmt: skip

# Loads an export where nothing of this process can help it. z-lab's format: by its own code, with the project's
# packages blocked. speculators': by our reader of released drafters.
_RELOAD = """
import sys
path, probe, out, root = sys.argv[1:]
import torch
from safetensors.torch import load_file, save_file
inputs = load_file(probe)
if root:
    sys.path.insert(0, root)
    from transformers import Qwen3Config
    from dflash.model import DFlashDraftModel
    from dflash.released import read_released
    released = read_released(path)
    model = DFlashDraftModel(Qwen3Config(**released.config))
    model.load_state_dict(released.tensors, strict=True)
else:
    for name in ("dflash", "data_prep", "train"):
        sys.modules[name] = None
    from transformers import AutoModel
    model, info = AutoModel.from_pretrained(path, trust_remote_code=True, dtype=torch.float32, output_loading_info=True)
    wrong = {key: value for key, value in info.items() if value}
    assert not wrong, f"loading: {wrong}"
with torch.no_grad():
    save_file({"hidden": model.float().eval()(inputs["embeds"], inputs["features"], inputs["positions"])}, out)
"""


def geometry(drafter: DFlashDraftModel) -> dict:
    """What was trained, in the words that the engines' rules give back."""
    config, layers = drafter.config, drafter.config.num_hidden_layers
    return {name: getattr(config, name) for name in _PLAIN} | {
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "taps": list(drafter.taps),
        "mask_token_id": drafter.mask_token_id,
        "causal": [False] * layers,
        "windows": [None] * layers,
        "rope_theta": drafter.theta,
        "rope_type": "default",
        "partial_rotary_factor": 1.0,
        **scales(config),
    }


def read_by_vllm(config: dict) -> dict:
    """vLLM 0.32: transformers_utils/configs/speculators/algos.py, then model_executor/models/qwen3_dflash.py."""
    found = {}
    if is_speculators(config):
        found["block_size"] = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] + 1
        inside = {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": [tap - 1 for tap in config["aux_hidden_state_layer_ids"]],
            "causal": not config.get("sliding_window_non_causal", True),
        }
        if config.get("draft_vocab_size") is not None:
            found["vocab_size"] = config["draft_vocab_size"]
        config = config["transformer_layer_config"] | {"dflash_config": inside}
    else:  # of the number of drafts vLLM is told by its user, who reads it here
        found["block_size"] = config.get("block_size", config.get("dflash_config", {}).get("block_size"))
        found["num_target_layers"] = config.get("num_target_layers")
        if config.get("architectures") != ["DFlashDraftModel"]:
            raise ValueError(f"architectures: found {config.get('architectures')}, expected ['DFlashDraftModel']")
    inside, kinds, layers = config.get("dflash_config") or {}, config.get("layer_types"), config["num_hidden_layers"]
    slides = [bool(inside.get("use_swa"))] * layers
    if kinds and ("sliding_attention" in kinds or not inside.get("use_swa")):
        slides = [kind == "sliding_attention" for kind in kinds]
    causal = config.get("is_causal", inside.get("causal"))
    window = inside.get("swa_window_size", config.get("sliding_window"))
    if any(slides) and window is None:
        raise ValueError("sliding_window: found none for a layer that slides")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return (
        _by_class(config)
        | {
            "taps": inside.get("target_layer_ids"),
            "mask_token_id": inside.get("mask_token_id"),
            "causal": slides if causal is None else [causal] * layers,
            "windows": [window if is_so else None for is_so in slides],
            "rope_theta": rope.get("rope_theta", config.get("rope_theta")),
            "rope_type": rope.get("rope_type", "default"),
            "partial_rotary_factor": rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)),
            **_scales(inside, config),
        }
        | found
    )


def read_by_sglang(config: dict) -> dict | None:
    """SGLang 0.5.23: srt/speculative/dflash_utils.py and srt/models/dflash.py. None: a format that it does not read."""
    if is_speculators(config):
        return None
    inside, kinds, layers = config["dflash_config"], config.get("layer_types"), config["num_hidden_layers"]
    slides = [kind == "sliding_attention" for kind in kinds or ["full_attention"] * layers]
    depth, taps = inside.get("num_target_layers", config.get("num_target_layers")), inside.get("target_layer_ids")
    if not depth or depth < 1 or not taps or not all(0 <= tap < depth for tap in taps):
        raise ValueError(f"num_target_layers, target_layer_ids: found {depth}, {taps}, expected ids below the depth")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return _by_class(config) | {
        "num_target_layers": depth,
        "block_size": inside.get("block_size", config.get("block_size", 16)),
        "taps": taps,
        "mask_token_id": inside.get("mask_token_id", config.get("mask_token_id")),
        "causal": slides,  # a layer that slides is causal there, whatever is_causal says
        "windows": [config.get("sliding_window") if is_so else None for is_so in slides],
        "rope_theta": config.get("rope_theta", rope.get("rope_theta", 10000.0)),
        "rope_type": rope.get("rope_type", rope.get("type", "default")),
        "partial_rotary_factor": config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)),
        **_scales(inside, config),
    }


RULES = {"vLLM": read_by_vllm, "SGLang": read_by_sglang}


def _by_class(config: dict) -> dict:
    """Fields that both take from Transformers' Qwen3Config, its defaults included."""
    read = Qwen3Config.from_dict({k: v for k, v in config.items() if k not in ("rope_scaling", "auto_map")})
    return {name: getattr(read, name) for name in _PLAIN}


def _scales(inside: dict, config: dict) -> dict:
    keys = {
        "embed_scale": ("input_embedding_scale", 1.0),
        "logit_scale": ("output_multiplier", 1.0),
        "softcap": ("final_logit_softcapping", None),
    }
    return {name: inside.get(key, config.get(key, default)) for name, (key, default) in keys.items()}


def expected_tensors(trained: dict) -> dict[str, list[int]]:
    """Names and shapes of the format's tensors (z-lab's released drafters; speculators may add the target's tables)."""
    width, inner = trained["hidden_size"], trained["intermediate_size"]
    queries, keys = (trained[n] * trained["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "input_layernorm": [width], "post_attention_layernorm": [width], "self_attn.q_proj": [queries, width],
        "self_attn.k_proj": [keys, width], "self_attn.v_proj": [keys, width], "self_attn.o_proj": [width, queries],
        "self_attn.q_norm": [trained["head_dim"]], "self_attn.k_norm": [trained["head_dim"]],
        "mlp.gate_proj": [inner, width], "mlp.up_proj": [inner, width], "mlp.down_proj": [width, inner],
    }  # fmt: skip
    shapes = {"fc": [width, len(trained["taps"]) * width], "hidden_norm": [width], "norm": [width]}
    for i in range(trained["num_hidden_layers"]):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def probe(drafter: DFlashDraftModel, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random inputs of one block behind 24 tokens, and the fp32 hidden states of the drafter rounded to bf16."""
    generator = torch.Generator().manual_seed(seed)
    context, size, width = 24, drafter.block_size, drafter.config.hidden_size
    inputs = {
        "embeds": torch.randn(1, size, width, generator=generator),
        "features": torch.randn(1, context, len(drafter.taps) * width, generator=generator),
        "positions": torch.arange(context + size)[None],
    }
    rounded = DFlashDraftModel(drafter.config).float().eval()
    rounded.load_state_dict({name: tensor.bfloat16().float() for name, tensor in drafter.state_dict().items()})
    with torch.no_grad():
        return inputs | {"hidden": rounded(inputs["embeds"], inputs["features"], inputs["positions"])}


def verify(folder: Path, drafter: DFlashDraftModel | None = None) -> list[str]:
    """All that is wrong with an export, one line each; empty where nothing is.

    drafter: what was trained, where it is at hand; else the export's own word for it is taken.
    """
    for name in ("config.json", TRAINING, PROBE):
        if not (folder / name).exists():
            raise ValueError(f"path: {folder} has no {name}, expected an export of this trainer")
    config, training = read_json(folder / "config.json"), read_training(folder)
    trained = geometry(drafter) if drafter is not None else training["geometry"]
    faults = [*_wrong_tensors(folder, trained, config)]
    for engine, rules in RULES.items():
        try:
            read = rules(config)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            faults.append(f"config.json: {engine} cannot read it ({error})")
            continue
        for name, value in (read or {}).items():
            if value != trained[name]:
                faults.append(f"config.json: {engine} reads {name} as {value}, {trained[name]} was trained")
    if (captured := training["captured_taps"]) != trained["taps"]:
        faults.append(f"taps: the cache holds those of layers {captured}, the export names {trained['taps']}")
    if not faults:  # what cannot be read cannot be run
        faults = [*_wrong_rotary(config, trained), *_wrong_states(folder, drafter, is_speculators(config))]
    return faults


def refuse(faults: list[str]) -> None:
    """Raise ValueError, one line, where there is a fault."""
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ValueError(f"export refused: {faults[0]}{more}; the checkpoint is as it was")


def is_speculators(config: dict) -> bool:
    """Whether a config.json is in speculators' format; else it is in z-lab's."""
    return "speculators_model_type" in config


def read_training(folder: Path) -> dict:
    """An export's own word for what was trained. Raises ValueError where it says too little."""
    training = read_json(folder / TRAINING)
    if missing := {"geometry", "captured_taps"} - training.keys():
        raise ValueError(f"path: {folder / TRAINING} has no {' and no '.join(sorted(missing))}; export it again")
    return training


def _wrong_tensors(folder: Path, trained: dict, config: dict):
    found = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                part = file.get_slice(name)
                found[name] = part.get_shape(), {"BF16": "bfloat16", "F32": "float32"}.get(part.get_dtype())
    expected, optional = expected_tensors(trained), {}
    if is_speculators(config):
        table = [trained["vocab_size"], trained["hidden_size"]]
        optional = {"embed_tokens.weight": table, "lm_head.weight": table}
    for name in sorted(expected.keys() - found.keys()):
        yield f"model.safetensors: no {name}"
    for name in sorted(found.keys() - expected.keys() - optional.keys()):
        yield f"model.safetensors: {name} is none of the format's tensors"
    for name, shape in sorted((expected | optional).items()):
        if name in found and found[name] != (wanted := (shape, config.get("dtype"))):
            yield f"model.safetensors: {name} is {found[name]}, expected {wanted}"


def _wrong_rotary(config: dict, trained: dict):
    """Transformers' rotary table of the config, which z-lab's own code uses too, against that of training."""
    fields = config.get("transformer_layer_config", config)
    read = Qwen3Config.from_dict({name: value for name, value in fields.items() if name != "auto_map"})
    positions = torch.arange(min(trained["max_position_embeddings"], 4096))[None]
    theirs = Qwen3RotaryEmbedding(read)(torch.zeros(1), positions)
    angles = rotary_angles(trained["rope_theta"], trained["head_dim"], positions)
    difference = max(float((a - b).abs().max()) for a, b in zip(theirs, (angles.cos(), angles.sin())))
    if not difference <= 1e-2:  # fp32 angles of thousands of radians
        yield f"config.json: its rotary table differs by {difference:.2g} from that of training"


def _wrong_states(folder: Path, drafter: DFlashDraftModel | None, speculators: bool):
    """The hidden states of the probe, by a load in a fresh process."""
    expected = (probe(drafter) if drafter is not None else load_file(folder / PROBE))["hidden"]
    with tempfile.TemporaryDirectory() as temporary:
        script, out = Path(temporary) / "reload.py", Path(temporary) / "out"
        script.write_text(_RELOAD)
        environment = {**os.environ, "HF_MODULES_CACHE": f"{temporary}/modules", "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            [sys.executable, script, folder.resolve(), (folder / PROBE).resolve(), out, ROOT if speculators else ""],
            env=environment, cwd=temporary, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            yield f"it does not load in a fresh process: {done.stderr.strip().splitlines()[-1]}"
            return
        difference = float((load_file(out)["hidden"] - expected).abs().max())
    if not difference <= PROBE_TOLERANCE:
        yield f"hidden states of its reload differ by {difference:.2e}, at most {PROBE_TOLERANCE:.0e} expected"


def verify_path(path: Path | None) -> None:
    """stage=verify. Raises ValueError where something is wrong, after all of it was printed."""
    if path is None:
        raise ValueError("path: nothing found, expected the folder of an export")
    faults = verify(path)
    for fault in faults:
        print(f"verify: {fault}", flush=True)
    if faults:
        raise ValueError(f"verify: {path} is not what was trained: {len(faults)} fault(s), the first: {faults[0]}")
    read = [name for name, rules in RULES.items() if rules(read_json(path / "config.json")) is not None]
    print(f"verify: {path} is what was trained, for {' and '.join(read)} and in a fresh process")
