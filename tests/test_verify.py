"""Both engines' rules give back what was trained, for every model of configs/ and for targets with awkward fields.

References: the targets' published configs (hidden sizes, heads, rotary fields as on the Hub), the fields written out.
"""

import copy
import json

import pytest
import run_helpers as helpers
import torch
from transformers import (
    Gemma2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)  # fmt: skip
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from data_prep.run import load_config
from dflash.config import Init, ModelConfig, drafter_config
from dflash.model import DFlashDraftModel
from dflash.objective import Objective
from train.config import RunConfig
from train.export import Format, export, speculators_config, zlab_config
from train.verify import RULES, _wrong_rotary, geometry, read_by_sglang, read_by_vllm, verify

QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
PUBLISHED = {
    "qwen3_4b": Qwen3Config(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, vocab_size=151936,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True, **QWEN3,
    ),
    "qwen3_8b": Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, vocab_size=151936,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False, **QWEN3,
    ),
    "llama31_8b": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, vocab_size=128256,
        num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072, rope_parameters=dict(LLAMA3),
    ),
    "qwen3_coder_30b": Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32, vocab_size=151936,
        num_key_value_heads=4, head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=262144, num_experts=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
    ),
    "demo": LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, rope_parameters={"rope_type": "default", "rope_theta": 1e5}, tie_word_embeddings=True,
        max_position_embeddings=8192,
    ),
}  # fmt: skip
SERVED = {"target_id": "me/target", "target_architectures": ["Qwen3ForCausalLM"]}
THETA = {"qwen3_4b": 1e6, "qwen3_8b": 1e6, "llama31_8b": 5e5, "qwen3_coder_30b": 1e7, "demo": 1e5}
TAPS = {"qwen3_8b": [1, 9, 17, 25, 33], "llama31_8b": [1, 8, 15, 22, 29], "qwen3_coder_30b": [1, 12, 23, 34, 45]}


def on_meta(config):
    with torch.device("meta"):
        return DFlashDraftModel(config)


def assert_read_back(drafter):
    """By each engine's rules, from a config that went through JSON; and Transformers' rotary table."""
    expected = geometry(drafter)
    written = zlab_config(drafter.config), speculators_config(drafter.config, SERVED)
    for config in (json.loads(json.dumps(c)) for c in written):
        for rules in RULES.values():
            found = rules(config)
            if found is not None:
                assert found == {name: expected[name] for name in found}
                assert found.keys() >= {"taps", "mask_token_id", "block_size", "causal", "windows", "rope_theta"}
        assert list(_wrong_rotary(config, expected)) == []
    assert read_by_vllm(written[1]) is not None and read_by_sglang(written[1]) is None


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_models_drafter_is_read_as_it_was_trained(name):
    model = load_config("train", RunConfig, [f"+model={name}"]).model
    target = PUBLISHED[name]
    drafter = on_meta(drafter_config(target, model))
    found = geometry(drafter)
    assert found["rope_theta"] == THETA[name] and found["hidden_size"] == target.hidden_size
    assert found["max_position_embeddings"] == target.max_position_embeddings
    assert found["taps"] == TAPS.get(name, found["taps"]) and found["block_size"] == model.block_size
    assert_read_back(drafter)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("form", Format)
def test_a_shrunk_drafter_of_every_model_exports(name, form, tmp_path):
    """Its config with the widths divided: real files, a real reload."""
    target, model = copy.deepcopy(PUBLISHED[name]), load_config("train", RunConfig, [f"+model={name}"]).model
    target.hidden_size, target.intermediate_size, target.vocab_size, target.head_dim = 64, 96, 300, 16
    target.num_attention_heads, target.num_key_value_heads = 4, 2
    model.hidden_size = model.vocab_size = None
    model.mask_token_id, model.num_layers = 299, 1
    torch.manual_seed(0)
    drafter = DFlashDraftModel(drafter_config(target, model))
    folder = export(drafter, tmp_path / "export", SERVED | {"captured_taps": drafter.taps}, form)
    assert verify(folder, drafter) == []


def small(kind, **fields):
    return kind(
        hidden_size=64, intermediate_size=96, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=4096, **fields,
    )  # fmt: skip


def nested(**fields):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0, **fields}}


AWKWARD = {
    "partial rotary": small(Qwen3Config, **nested(partial_rotary_factor=0.25)),
    "llama3 scaling": small(LlamaConfig, rope_parameters={**LLAMA3, "rope_theta": 50000.0}),
    "yarn": small(Qwen3Config, **nested(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)),
    "tied": small(Qwen3Config, tie_word_embeddings=True, **nested()),
    "sliding layers": small(
        Qwen2Config, use_sliding_window=True, sliding_window=64, max_window_layers=2, **nested(),
    ),
    "experts": small(Qwen3MoeConfig, num_experts=4, **nested()),
}  # fmt: skip


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_targets_leave_no_trace_in_the_drafter(name):
    """Its rotary embedding is plain with the target's base, its layers see everything, it has no foreign field."""
    drafter = on_meta(drafter_config(AWKWARD[name], ModelConfig("t", mask_token_id=299, block_size=8, num_layers=2)))
    found = geometry(drafter)
    assert (found["rope_theta"], found["rope_type"], found["partial_rotary_factor"]) == (50000.0, "default", 1.0)
    assert found["causal"] == [False, False] and found["windows"] == [None, None]
    written = json.dumps(zlab_config(drafter.config))
    assert not any(word in written for word in ("partial", "factor", "yarn", "llama3", "experts", "mrope"))
    assert json.loads(written)["tie_word_embeddings"] is False
    assert_read_back(drafter)


def test_multimodal_positions_and_linear_layers_stay_out():
    """A hybrid target: its rotary embedding is partial and cut in sections, most of its layers are no attention."""
    rope = {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    target = small(Qwen3_5TextConfig, head_dim=16, **nested(**rope))
    drafter = on_meta(drafter_config(target, ModelConfig("t", mask_token_id=299, block_size=8, num_layers=1)))
    written = json.dumps(zlab_config(drafter.config))
    assert not any(word in written for word in ("mrope", "partial", "linear"))
    assert geometry(drafter)["rope_theta"] == 50000.0
    assert_read_back(drafter)


def test_a_target_that_is_no_language_model_is_refused_in_one_line():
    target = Qwen2VLConfig(text_config={"vocab_size": 300, "num_hidden_layers": 12})
    with pytest.raises(ValueError, match=r"^target qwen2_vl_text: no causal language model") as error:
        drafter_config(target, ModelConfig("t", mask_token_id=299, block_size=8))
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_gemmas_scales_are_in_zlabs_format_and_refused_in_the_other():
    target = small(Gemma2Config, final_logit_softcapping=30.0, head_dim=16)
    drafter = on_meta(drafter_config(target, ModelConfig("t", mask_token_id=299, block_size=8, num_layers=1)))
    config = json.loads(json.dumps(zlab_config(drafter.config)))
    for rules in (read_by_vllm, read_by_sglang):
        found = rules(config)
        assert (found["embed_scale"], found["softcap"]) == (8.0, 30.0)
    with pytest.raises(ValueError, match=r"^export\.speculators: the target has .*embed_scale.*8\.0"):
        speculators_config(drafter.config, SERVED)


@pytest.mark.parametrize("form", ["flat", "nested", "both"])
def test_flat_and_nested_bases_are_the_same_to_training_and_export(form):
    target = small(Qwen3Config, **({"rope_theta": 50000.0} if form == "flat" else nested()))
    if form == "both":
        target.rope_theta = 50000.0
    drafter = on_meta(drafter_config(target, ModelConfig("t", mask_token_id=299, block_size=8, num_layers=1)))
    assert geometry(drafter)["rope_theta"] == 50000.0
    assert_read_back(drafter)


def test_bases_that_disagree_are_refused():
    target = small(Qwen3Config, **nested())
    target.rope_theta = 10000.0
    with pytest.raises(ValueError, match=r"rope_theta: found \[10000\.0, 50000\.0\]"):
        drafter_config(target, ModelConfig("t", mask_token_id=299, block_size=8))


def test_the_rotary_table_of_training_is_transformers(tmp_path):
    from dflash.model import rotary_angles

    config = Qwen3Config(head_dim=32, **nested())
    positions = torch.arange(0, 3000, 7)[None]
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions)
    angles = rotary_angles(50000.0, 32, positions)
    assert torch.allclose(angles.cos(), cos, atol=2e-3) and torch.allclose(angles.sin(), sin, atol=2e-3)


def test_a_folder_that_is_no_export_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^path: .* has no config\.json, expected an export"):
        verify(tmp_path)


def test_the_stage_works_from_the_path_alone(tmp_path):
    """A sound export passes; a config changed later fails with the field's name, exit code 1 and one line."""
    drafter = helpers.new_drafter()
    described = helpers.tiny_run()[2].provenance(helpers.tiny_run()[1])
    from data_prep.prepare import describe

    config = describe(helpers.tiny_run()[0])
    described["config"] = {name: config[name] for name in ("data", "cache", "batch", "optim", "evaluate")}
    folder = export(drafter, tmp_path / "export", described)
    done = helpers.run("train/run.py", "stage=verify", f"path={folder}")
    assert done.returncode == 0 and "is what was trained, for vLLM and SGLang" in done.stdout, done.stderr
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = 261
    (folder / "config.json").write_text(json.dumps(config))
    done = helpers.run("train/run.py", "stage=verify", f"path={folder}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "mask_token_id as 261, 260 was trained" in done.stderr.splitlines()[-1]


def test_a_path_stands_for_the_model_and_overrides_win(tmp_path):
    """An export's own word for model and data, under what the command line says."""
    said = {"model": {"target": "me/t", "mask_token_id": 5, "taps": [1, 3], "block_size": 4, "init": "target"}}
    said["config"] = {"data": {"path": "chats.jsonl", "thinking": False}, "optim": {"objective": "dpace"}}
    (tmp_path / "dflash_training.json").write_text(json.dumps(said))
    given = [
        "stage=verify",
        f"path={tmp_path}",
        "data.thinking=true",
        "model.revision=abc",
        "+model.load={device_map: a}",
    ]
    config = load_config("train", RunConfig, given)
    assert (config.model.target, config.model.taps, config.model.block_size) == ("me/t", [1, 3], 4)
    assert config.model.init == Init.target and config.optim.objective == Objective.dpace
    assert (config.model.revision, config.model.load, config.data.thinking) == ("abc", {"device_map": "a"}, True)
    with pytest.raises(ValueError, match=r"^path: found .*none, expected a complete checkpoint or an export"):
        load_config("train", RunConfig, ["stage=verify", f"path={tmp_path}/none"])
