"""An export is complete, is z-lab's format, and drafts the same elsewhere: in a fresh process where this project cannot
be imported, with Transformers 5 and with 4.57.1. References: the format written out, the files of `dflash/`, and
`dflash.generate` in this process with the drafter rounded to bf16 (tokens, and tokens accepted by every verification:
the text alone would be the target's even with a broken drafter).
"""

import copy
import json
import shutil

import pytest
import run_helpers as helpers
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import train.export as module
from data_prep.prompts import read_rows
from data_prep.regenerate import render
from dflash.config import drafter_config
from dflash.generate import generate
from dflash.model import DFlashDraftModel
from train.export import Format, export, export_checkpoint
from train.verify import geometry, verify

THETA = 50000.0  # neither Transformers' default nor the tiny target's: a lost value shows
NEW = 40
WAYS = [{"temperature": 0.0}, {"temperature": 0.0, "block_size": 4}, {"temperature": 0.8}]
TRAINING = {"target_name": "tiny", "target_id": "me/tiny", "steps": 120, "captured_taps": [1, 2, 3]}
TRAINING["target_architectures"] = ["Qwen3ForCausalLM"]

FRESH = """
import json, sys
for name in ("dflash", "data_prep", "train"):
    sys.modules[name] = None
import torch, transformers
from transformers import AutoModel, AutoModelForCausalLM
path, target, version, prompts, ways, new = sys.argv[1:]
assert transformers.__version__.startswith(version), transformers.__version__
drafter, info = AutoModel.from_pretrained(path, trust_remote_code=True, dtype=torch.float32, output_loading_info=True)
assert not any(info.values()), info
target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
generate = sys.modules[type(drafter).__module__].generate
out = []
for ids in json.loads(prompts):
    ids = torch.tensor([ids])
    for way in json.loads(ways):
        seeded = [torch.Generator().manual_seed(1) for _ in range(2)]
        text = drafter.spec_generate(target, ids, int(new), stop_token_ids=[257], generator=seeded[0], **way)
        assert torch.equal(text[:, : ids.shape[1]], ids)
        run = generate(target, ids, int(new), drafter, stop_token_ids=[257], generator=seeded[1], **way)
        assert text[0, ids.shape[1] :].tolist() == run.tokens
        out.append([run.tokens, run.accepted_raw])
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def drafter():
    """The trained tiny drafter, with another rotary base."""
    trained, prepared = helpers.trained_drafter(), helpers.tiny_run()[2]
    target = AutoConfig.from_pretrained(helpers.TINY)
    target.rope_parameters["rope_theta"] = THETA
    changed = DFlashDraftModel(drafter_config(target, prepared.model))
    changed.load_state_dict(trained.state_dict())
    return changed.eval()


@pytest.fixture(scope="module")
def exported(drafter):
    folder = helpers.folder() / "export"
    assert export(drafter, folder, TRAINING) == folder and not folder.with_name("export.part").exists()
    return folder


def expected_names(depth):
    layer = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    layer += [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    names = [f"layers.{i}.{name}" for i in range(depth) for name in layer] + ["fc", "hidden_norm", "norm"]
    return sorted(f"{name}.weight" for name in names)


def test_tensors_are_those_of_the_format(exported, drafter):
    with safe_open(exported / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    assert sorted(tensors) == expected_names(depth=1)
    assert not any("embed" in name or "lm_head" in name for name in tensors)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(torch.equal(tensors[name], value.bfloat16()) for name, value in drafter.state_dict().items())
    assert tensors["fc.weight"].shape == (128, 3 * 128)


def test_config_is_that_of_the_format(exported):
    config = json.loads((exported / "config.json").read_text())
    golden = {
        "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "model.DFlashDraftModel"},
        "model_type": "qwen3", "dtype": "bfloat16", "block_size": 8, "is_causal": False, "num_hidden_layers": 1,
        "num_target_layers": 6, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 512, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["full_attention"], "rope_theta": THETA,
        "attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    assert {name: config.get(name) for name in golden} == golden
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": THETA}
    assert config["dflash_config"] == {"block_size": 8, "mask_token_id": 260, "target_layer_ids": [1, 2, 3]}
    assert config["sliding_window"] is None and config["rope_scaling"] is None and "_name_or_path" not in config


def test_files_are_complete_and_the_code_is_ours(exported):
    names = {"config.json", "model.safetensors", "model.py", "generate.py", "dflash_training.json", "probe.st"}
    assert {path.name for path in exported.iterdir()} == names
    for name in ("model.py", "generate.py"):
        assert (exported / name).read_bytes() == (helpers.ROOT / "dflash" / name).read_bytes()
    training = json.loads((exported / "dflash_training.json").read_text())
    assert training.pop("geometry")["rope_theta"] == THETA and training == TRAINING


@pytest.fixture(scope="module")
def expected(drafter):
    """[tokens, accepted per verification] of every prompt and way, in this process."""
    rounded = copy.deepcopy(drafter).bfloat16().float()
    prepared, out = helpers.tiny_run()[2], []
    rows = list(read_rows(prepared.data))[5:8]
    prompts = [render(prepared.tokenizer, row["messages"], prepared.data) for row in rows]
    for ids in prompts:
        for way in WAYS:
            seeded = torch.Generator().manual_seed(1)
            run = generate(
                helpers.target(), torch.tensor([ids]), NEW, rounded, stop_token_ids=[257], generator=seeded, **way
            )
            out.append([run.tokens, run.accepted_raw])
    accepted = [n for _, some in out for n in some]
    assert sum(accepted) > 1.1 * len(accepted), "a drafter that gets nothing right would not tell exports apart"
    return prompts, out


@pytest.mark.parametrize("version, packages", [("5.", None), ("4.57.1", ".venv/transformers4")])
def test_a_fresh_process_drafts_the_same(exported, expected, tmp_path, version, packages):
    extra = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    if packages:
        assert (helpers.ROOT / packages / "transformers").exists(), f"{packages} is missing: `make test` installs it"
        extra["PYTHONPATH"] = str(helpers.ROOT / packages)
    (tmp_path / "fresh.py").write_text(FRESH)
    prompts, out = expected
    arguments = [exported, helpers.TINY, version, json.dumps(prompts), json.dumps(WAYS), NEW]
    done = helpers.run(tmp_path / "fresh.py", *arguments, env=helpers.environment(**extra), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == out


def altered(exported, folder, change=None, tensors=None, inside="config.json"):
    """A copy of an export with its config or its tensors changed by a function."""
    shutil.copytree(exported, folder)
    if change is not None:
        config = json.loads((folder / inside).read_text())
        change(config)
        (folder / inside).write_text(json.dumps(config))
    if tensors is not None:
        found = load_file(folder / "model.safetensors")
        tensors(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def speculators(drafter):
    return export(drafter, helpers.folder() / "export-speculators", TRAINING, Format.speculators)


def test_speculators_config_is_that_of_the_format(speculators):
    """Keys and values as speculators 0.8 writes them; `is_causal` inside, which wins in vLLM."""
    config = json.loads((speculators / "config.json").read_text())
    golden = {
        "speculators_model_type": "dflash", "block_size": 8, "draft_vocab_size": 512, "mask_token_id": 260,
        "aux_hidden_state_layer_ids": [2, 3, 4], "sample_from_anchor": False, "sliding_window_non_causal": True,
        "architectures": ["DFlashDraftModel"], "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    assert {name: config[name] for name in golden} == golden
    inside = config["speculators_config"]
    assert inside["proposal_methods"][0]["speculative_tokens"] == 7
    assert inside["verifier"] == {"name_or_path": "me/tiny", "architectures": ["Qwen3ForCausalLM"]}
    nested = config["transformer_layer_config"]
    assert nested["model_type"] == "qwen3" and nested["is_causal"] is False and nested["head_dim"] == 32
    assert nested["rope_parameters"] == {"rope_type": "default", "rope_theta": THETA}
    assert not (speculators / "model.py").exists()


def test_speculators_tables_are_the_targets_and_only_on_request(speculators, drafter, tmp_path):
    assert sorted(load_file(speculators / "model.safetensors")) == expected_names(depth=1)
    ends = helpers.ends(drafter.config)
    folder = export(drafter, tmp_path / "full", TRAINING, Format.speculators, ends)
    found = load_file(folder / "model.safetensors")
    assert torch.equal(found["embed_tokens.weight"], ends.embed_VD.bfloat16())
    assert torch.equal(found["lm_head.weight"], ends.head_VD.bfloat16())


def test_large_exports_are_split_into_shards(drafter, tmp_path):
    folder = export(drafter, tmp_path / "export", TRAINING, shard="300KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1 and (folder / "model.safetensors.index.json").exists()
    assert verify(folder) == []


def put(*path_and_value):
    *path, last, value = path_and_value

    def change(config):
        for name in path:
            config = config[name]
        config[last] = value

    return change


def rope(config):
    for place in (config, config["rope_parameters"]):
        place["rope_theta"] = THETA * 10


ZLAB_FAULTS = {
    "taps": (put("dflash_config", "target_layer_ids", [2, 3, 4]), "vLLM reads taps as [2, 3, 4], [1, 2, 3] was"),
    "mask token": (put("dflash_config", "mask_token_id", 261), "vLLM reads mask_token_id as 261"),
    "block size above": (put("block_size", 16), "vLLM reads block_size as 16, 8 was trained"),
    "block size inside": (put("dflash_config", "block_size", 16), "SGLang reads block_size as 16"),
    "causal": (put("is_causal", True), "vLLM reads causal as [True], [False] was trained"),
    "layer slides": (put("layer_types", ["sliding_attention"]), "causal as [True]"),
    "use_swa": (put("dflash_config", "use_swa", True), "vLLM cannot read it (sliding_window"),
    "a window": (
        lambda c: c["dflash_config"].update(use_swa=True, swa_window_size=64),
        "vLLM reads windows as [64], [None] was",
    ),
    "target layers": (put("num_target_layers", 0), "SGLang cannot read it (num_target_layers"),
    "both thetas": (rope, f"vLLM reads rope_theta as {THETA * 10}"),
    "flat theta": (put("rope_theta", 1e6), "SGLang reads rope_theta as 1000000.0"),
    "nested theta": (put("rope_parameters", "rope_theta", 1e6), "vLLM reads rope_theta as 1000000.0"),
    "partial rotary": (put("rope_parameters", "partial_rotary_factor", 0.5), "partial_rotary_factor as 0.5"),
    "scaled rotary": (put("rope_parameters", "rope_type", "yarn"), "vLLM"),
    "embedding scale": (put("dflash_config", "input_embedding_scale", 2.0), "embed_scale as 2.0"),
    "heads": (put("num_key_value_heads", 4), "num_key_value_heads as 4, 2 was trained"),
    "architecture": (put("architectures", ["Qwen3DFlashDraftModel"]), "vLLM cannot read it (architectures"),
    "positions": (put("max_position_embeddings", 99), "max_position_embeddings as 99"),
}


@pytest.mark.parametrize("fault", ZLAB_FAULTS)
def test_a_config_that_engines_read_otherwise_is_refused_by_name(exported, tmp_path, fault):
    change, words = ZLAB_FAULTS[fault]
    faults = verify(altered(exported, tmp_path / "altered", change))
    assert faults and words in "; ".join(faults) and not any("\n" in line for line in faults)


SPECULATORS_FAULTS = {
    "taps not raised": (put("aux_hidden_state_layer_ids", [1, 2, 3]), "vLLM reads taps as [0, 1, 2]"),
    "one draft too many": (
        lambda c: put("speculative_tokens", 8)(c["speculators_config"]["proposal_methods"][0]), "block_size as 9",
    ),
    "mask token": (put("mask_token_id", 261), "mask_token_id as 261"),
    "causal inside": (put("transformer_layer_config", "is_causal", True), "causal as [True]"),
    "causal by default": (
        lambda c: (c["transformer_layer_config"].pop("is_causal"), c.update(sliding_window_non_causal=False)),
        "causal as [True]",
    ),
    "pruned vocabulary": (put("draft_vocab_size", 100), "vocab_size as 100"),
}  # fmt: skip


@pytest.mark.parametrize("fault", SPECULATORS_FAULTS)
def test_a_speculators_config_that_vllm_reads_otherwise_is_refused(speculators, tmp_path, fault):
    change, words = SPECULATORS_FAULTS[fault]
    faults = verify(altered(speculators, tmp_path / "altered", change))
    assert faults and words in "; ".join(faults)


def scale_norm(tensors):
    tensors["norm.weight"] = tensors["norm.weight"] * 1.01


def cut_fc(tensors):
    tensors["fc.weight"] = tensors["fc.weight"][:, :128].contiguous()


TENSOR_FAULTS = {
    "other values": (scale_norm, "differ by"),
    "missing": (lambda t: t.pop("hidden_norm.weight"), "no hidden_norm.weight"),
    "added": (lambda t: t.update({"mask_hidden": torch.zeros(3)}), "mask_hidden is none of the format's"),
    "a table": (lambda t: t.update({"lm_head.weight": torch.zeros(512, 128)}), "lm_head.weight is none"),
    "shape": (cut_fc, "fc.weight is"),
    "dtype": (lambda t: t.update({"norm.weight": t["norm.weight"].float()}), "norm.weight is"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_that_are_not_those_of_the_format_are_refused(exported, tmp_path, fault):
    change, words = TENSOR_FAULTS[fault]
    (line, *_) = verify(altered(exported, tmp_path / "altered", tensors=change))
    assert words in line


def test_sound_exports_pass(exported, speculators, drafter):
    for folder in (exported, speculators):
        assert verify(folder) == [] and verify(folder, drafter) == []


def test_a_cache_of_other_taps_is_refused(drafter, tmp_path):
    with pytest.raises(ValueError, match=r"^export refused: taps: the cache holds those of layers \[2, 3, 4\]"):
        export(drafter, tmp_path / "export", TRAINING | {"captured_taps": [2, 3, 4]})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["geometry", "captured_taps"])
def test_an_export_that_does_not_say_what_was_trained_is_refused(exported, tmp_path, key):
    folder = altered(exported, tmp_path / "altered", lambda training: training.pop(key), inside="dflash_training.json")
    with pytest.raises(ValueError, match=rf"^path: .*dflash_training\.json has no {key}; export it again"):
        verify(folder)


def test_an_export_that_was_written_wrong_never_appears_and_the_older_one_stays(
    exported, drafter, tmp_path, monkeypatch
):
    older = shutil.copytree(exported, tmp_path / "export")
    whole = module.zlab_config
    monkeypatch.setattr(module, "zlab_config", lambda config: whole(config) | {"block_size": 7})
    with pytest.raises(ValueError, match=r"^export refused: .*block_size as 7, 8 was trained") as error:
        export(drafter, older, TRAINING | {"steps": 7})
    assert "\n" not in str(error.value) and [path.name for path in tmp_path.iterdir()] == ["export"]
    assert json.loads((older / "dflash_training.json").read_text())["steps"] == 120


def test_an_export_replaces_an_older_one_whole(exported, drafter, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "export")
    (folder / "stale.txt").write_text("old")
    export(drafter, folder, TRAINING | {"steps": 7})
    assert not (folder / "stale.txt").exists()
    assert json.loads((folder / "dflash_training.json").read_text())["steps"] == 7


def test_geometry_is_what_the_drafter_computes_with(drafter):
    found = geometry(drafter)
    assert (found["taps"], found["mask_token_id"], found["block_size"]) == ([1, 2, 3], 260, 8)
    assert found["causal"] == [False] and found["windows"] == [None] and found["rope_theta"] == THETA


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "fused", "tokens"])
def test_a_baseline_is_not_exported(tmp_path, kind):
    path = tmp_path / "checkpoints/step-000001"
    path.mkdir(parents=True)
    (path / "trainer.json").write_text(json.dumps({"config": {"drafter": {"kind": kind}}}))
    with pytest.raises(ValueError, match=rf"^path: {path} has a drafter of kind {kind}, expected dflash"):
        export_checkpoint(helpers.config(tmp_path, f"path={path}"))
    assert [found.name for found in tmp_path.rglob("export*")] == []
