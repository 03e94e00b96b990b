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
from train.export import export, verify_reload

THETA = 50000.0  # neither Transformers' default nor the tiny target's: a lost value shows
NEW = 40
WAYS = [{"temperature": 0.0}, {"temperature": 0.0, "block_size": 4}, {"temperature": 0.8}]
TRAINING = {"target_name": "tiny", "steps": 120}

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
    assert not config.get("sliding_window") and "rope_scaling" not in config and "_name_or_path" not in config


def test_files_are_complete_and_the_code_is_ours(exported):
    names = {"config.json", "model.safetensors", "model.py", "generate.py", "dflash_training.json"}
    assert {path.name for path in exported.iterdir()} == names
    for name in ("model.py", "generate.py"):
        assert (exported / name).read_bytes() == (helpers.ROOT / "dflash" / name).read_bytes()
    assert json.loads((exported / "dflash_training.json").read_text()) == TRAINING


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


def test_an_export_that_was_written_wrong_never_appears(drafter, tmp_path, monkeypatch):
    def corrupting(tensors, path, **options):
        if path.name == "model.safetensors":
            tensors["norm.weight"] = tensors["norm.weight"] * 1.01
        save_file(tensors, path, **options)

    monkeypatch.setattr(module, "save_file", corrupting)
    with pytest.raises(ValueError, match=r"differ by \d\.\d+e[-+]\d+, expected 1e-04") as error:
        export(drafter, tmp_path / "export", TRAINING)
    assert "\n" not in str(error.value) and not (tmp_path / "export").exists()


@pytest.mark.parametrize("fault", ["rope", "missing"])
def test_an_altered_export_is_refused(exported, drafter, tmp_path, fault):
    folder = shutil.copytree(exported, tmp_path / "altered")
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    if fault == "rope":
        config["rope_theta"] = config["rope_parameters"]["rope_theta"] = THETA * 2
    else:
        del tensors["hidden_norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"does not load|differ by") as error:
        verify_reload(drafter, folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    assert fault != "missing" or "hidden_norm" in str(error.value)


def test_an_export_replaces_an_older_one_whole(exported, drafter, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "verify_reload", lambda *_: 0.0)
    folder = shutil.copytree(exported, tmp_path / "export")
    (folder / "stale.txt").write_text("old")
    export(drafter, folder, TRAINING | {"steps": 7})
    assert not (folder / "stale.txt").exists()
    assert json.loads((folder / "dflash_training.json").read_text())["steps"] == 7
