"""Released drafters as a start. References: z-lab's published config.json of Qwen3-8B-DFlash-b16 (its keys and values,
https://huggingface.co/z-lab/Qwen3-8B-DFlash-b16), the key list that speculators 0.8 writes, and the weights themselves.
"""

import json

import pytest
import run_helpers as helpers
import torch
from helpers import tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from data_prep.prepare import Preparation
from dflash.config import ModelConfig
from dflash.model import DFlashDraftModel
from dflash.released import Released, adopt, read_released
from train.export import zlab_config

QWEN3_8B = {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "model_type": "qwen3",
    "block_size": 16, "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 5, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-06, "initializer_range": 0.02,
    "attention_bias": False, "attention_dropout": 0.0, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rope_theta": 1000000, "rope_scaling": None, "layer_types": ["full_attention"] * 5, "use_sliding_window": False,
    "sliding_window": None, "max_window_layers": 5, "tie_word_embeddings": False, "use_cache": True,
    "bos_token_id": 151643, "eos_token_id": 151645, "dtype": "bfloat16", "transformers_version": "4.57.1",
}  # fmt: skip


def zlab(folder, drafter, **changes):
    """`drafter` as z-lab releases one, with the keys of the published config."""
    config = {key: getattr(drafter.config, key, value) for key, value in QWEN3_8B.items()}
    config |= {"rope_theta": drafter.theta, "rope_scaling": None, "dtype": "bfloat16", "transformers_version": "4.57.1"}
    config["dflash_config"] = {k: drafter.config.dflash_config[k] for k in ("mask_token_id", "target_layer_ids")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    save_file({name: tensor.bfloat16() for name, tensor in drafter.state_dict().items()}, folder / "model.safetensors")
    return str(folder)


def speculators(folder, drafter, **changes):
    """The same as speculators 0.8 releases one: nested config, ids one higher, the target's tables beside it."""
    c, inside = drafter.config, drafter.config.dflash_config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    nested = {name: getattr(c, name) for name in (*names, "head_dim", "rms_norm_eps", "vocab_size")}
    nested |= {"layer_types": ["full_attention"] * c.num_hidden_layers, "attention_bias": False, "is_causal": False}
    nested["rope_parameters"] = {"rope_theta": drafter.theta, "rope_type": "default"}
    config = {
        "speculators_model_type": "dflash", "block_size": c.block_size, "draft_vocab_size": c.vocab_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in inside["target_layer_ids"]],
        "mask_token_id": inside["mask_token_id"], "transformer_layer_config": nested,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    tables = {name: torch.zeros(c.vocab_size, c.hidden_size) for name in ("embed_tokens.weight", "lm_head.weight")}
    save_file(drafter.state_dict() | tables, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def drafter():
    """One whose geometry is its own: other heads and width than the target's."""
    config = tiny_drafter(tiny_target("Qwen3"), num_layers=2).config
    config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size = 6, 3, 8, 40
    torch.manual_seed(5)
    return DFlashDraftModel(config)


def model_of(drafter, **changes):
    inside = drafter.config.dflash_config
    values = {"block_size": drafter.block_size, "num_layers": 2, "taps": inside["target_layer_ids"]}
    return ModelConfig("tiny", **{**values, "mask_token_id": inside["mask_token_id"], **changes})


@pytest.mark.parametrize("write", [zlab, speculators])
def test_both_formats_give_the_drafter_back(tmp_path, drafter, write):
    released = read_released(write(tmp_path, drafter))
    released.check(model_of(drafter))
    plain = tiny_drafter(tiny_target("Qwen3"), num_layers=2).config
    loaded = DFlashDraftModel(adopt(plain, released))
    loaded.load_state_dict(released.tensors, strict=True)
    assert loaded.theta == drafter.theta and loaded.taps == drafter.taps and loaded.block_size == drafter.block_size
    for name, tensor in drafter.state_dict().items():
        expected = tensor.bfloat16().float() if write is zlab else tensor
        assert torch.equal(loaded.state_dict()[name], expected), name


@pytest.mark.parametrize(
    "change, words",
    [
        ({"block_size": 4}, ["model.block_size", "4", "8"]),
        ({"num_layers": 3}, ["model.num_layers", "3", "2"]),
        ({"taps": [0, 2, 3]}, ["model.taps", "[0, 2, 3]"]),
        ({"mask_token_id": 7}, ["model.mask_token_id", "7"]),
        ({"hidden_size": 64}, ["model.hidden_size", "64", "48"]),
    ],
)
def test_a_conflicting_choice_is_refused_by_name(tmp_path, drafter, change, words):
    released = read_released(zlab(tmp_path, drafter))
    with pytest.raises(ValueError) as error:
        released.check(model_of(drafter, **change))
    assert all(word in str(error.value) for word in [*words, str(tmp_path)]) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "write, changes, word",
    [
        (zlab, {"is_causal": True}, "is_causal=True"),
        (zlab, {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        (zlab, {"attention_bias": True}, "attention_bias"),
        (
            zlab,
            {"dflash_config": {"target_layer_ids": [1], "mask_token_id": 1, "selector_rank": 16}},
            "selector_rank=16",
        ),
        (speculators, {"draft_vocab_size": 40}, "draft_vocab_size=40"),
    ],
)
def test_what_our_drafters_do_not_have_is_refused(tmp_path, drafter, write, changes, word):
    with pytest.raises(ValueError, match=r"^model\.init_from: ") as error:
        read_released(write(tmp_path, drafter, **changes))
    assert word in str(error.value)


def test_scaled_rotary_is_refused(tmp_path, drafter):
    path = zlab(tmp_path, drafter, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(ValueError, match="rotary"):
        read_released(path).geometry()


def test_a_low_rank_cache_is_refused_with_the_reason(tmp_path):
    config = helpers.config(tmp_path, "cache.codec=lowrank", f"model.init_from={tmp_path}")
    with pytest.raises(ValueError, match=r"^cache\.codec: found lowrank with model\.init_from.*fc"):
        Preparation(config.model, config.data, config.cache)


def test_a_training_starts_from_it(tmp_path):
    """One step at a tiny rate from a released drafter stays at its weights."""
    drafter = helpers.trained_drafter()
    path = zlab(tmp_path / "released", drafter)
    overrides = [f"model.init_from={path}", "optim.steps=1", "optim.lr=1e-9", "evaluate.rows=2", "stage=train"]
    paths = [f"cache.dir={tmp_path}/cache", f"runs={tmp_path}/runs", "data.max_new_tokens=24"]
    done = helpers.run("train/run.py", "+model=tiny", *overrides, *paths)
    assert done.returncode == 0, done.stderr[-2000:]
    found = load_file(tmp_path / "runs/tiny/checkpoints/step-000001/state.safetensors")
    expected = {name: tensor.bfloat16().float() for name, tensor in drafter.state_dict().items()}
    assert helpers.relative(found, expected) < 1e-6
    done = helpers.run("train/run.py", "stage=export", f"path={tmp_path}/runs/tiny/checkpoints/step-000001")
    assert done.returncode == 0, done.stderr[-2000:]
    given, made = tmp_path / "released", tmp_path / "runs/tiny/export"
    assert load_file(made / "model.safetensors").keys() == load_file(given / "model.safetensors").keys()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (given, made))
    changed = {key for key in before if key != "dflash_config" and before[key] != after[key]}
    assert changed <= {"auto_map", "transformers_version"} and after.keys() - before.keys() == ADDED


ADDED = {"is_causal", "rope_parameters"}  # what our exports say beyond the published config


def test_every_published_key_comes_back_from_an_export():
    """z-lab's config through reader and exporter, but for the code's name and version."""
    with torch.device("meta"):
        values = {k: v for k, v in QWEN3_8B.items() if k not in ("rope_scaling", "auto_map", "transformers_version")}
        drafter = DFlashDraftModel(adopt(Qwen3Config(**values), Released("z-lab", QWEN3_8B, {})))
    written = zlab_config(drafter.config)
    inside, expected = written.pop("dflash_config"), {k: v for k, v in QWEN3_8B.items() if k != "dflash_config"}
    differ = {key for key, value in expected.items() if written[key] != value}
    assert differ == {"auto_map", "transformers_version"} and written.keys() - expected.keys() == ADDED
    assert inside == QWEN3_8B["dflash_config"] | {"block_size": 16}
