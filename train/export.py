"""A trained drafter as a Hugging Face checkpoint in z-lab's format, compared after a reload in a fresh process.

config.json             DFlashDraftModel on Qwen3's fields; block_size twice, rope_theta and rope_parameters
model.safetensors       bf16; no embedding, no head: the target's are used
model.py, generate.py   the code, for AutoModel.from_pretrained(..., trust_remote_code=True)
dflash_training.json    target, template, taps, data and cache, steps, versions
README.md               the card, with the measured numbers
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import dflash.generate
import dflash.model
from data_prep.files import read_json, sampled_digest, write_json, write_text
from dflash.model import DFlashDraftModel, rope_theta
from train import checkpoint
from train.config import RunConfig
from train.evaluate import table

CODE = (dflash.model.__file__, dflash.generate.__file__)
PROBE_TOLERANCE = 1e-4

# Runs where neither this project nor its path can be imported: the export must stand alone.
_RELOAD = """
import sys
for name in ("dflash", "data_prep", "train"):
    sys.modules[name] = None
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel
path, probe, out = sys.argv[1:]
model, info = AutoModel.from_pretrained(path, trust_remote_code=True, dtype=torch.float32, output_loading_info=True)
wrong = {key: value for key, value in info.items() if value}
assert not wrong, f"loading: {wrong}"
inputs = load_file(probe)
with torch.no_grad():
    save_file({"hidden": model.eval()(inputs["embeds"], inputs["features"], inputs["positions"])}, out)
"""


def export_config(drafter: DFlashDraftModel) -> dict:
    """config.json: flat and nested rotary fields agree, causality is explicit, dtype is that of the tensors."""
    theta = rope_theta(drafter.config)
    config = {k: v for k, v in drafter.config.to_dict().items() if k not in ("_name_or_path", "rope_scaling")}
    return config | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "model.DFlashDraftModel"},
        "model_type": "qwen3",
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "is_causal": False,
        "dtype": "bfloat16",
    }


def probe(drafter: DFlashDraftModel, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random inputs of one block behind 24 context tokens, by which two loads of a drafter are compared."""
    generator = torch.Generator().manual_seed(seed)
    context, size, width = 24, drafter.block_size, drafter.config.hidden_size
    return {
        "embeds": torch.randn(1, size, width, generator=generator),
        "features": torch.randn(1, context, len(drafter.taps) * width, generator=generator),
        "positions": torch.arange(context + size)[None],
    }


def export(drafter: DFlashDraftModel, folder: Path, training: dict) -> Path:
    """Write the export, reload it in a fresh process and compare; the folder appears only when both agree.

    training: what `dflash_training.json` says. Raises ValueError where the reloaded export differs.
    """
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    write_json(part / "config.json", export_config(drafter))
    for source in CODE:
        shutil.copy(source, part)
    write_json(part / "dflash_training.json", training)
    verify_reload(drafter, part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return folder


def verify_reload(drafter: DFlashDraftModel, folder: Path) -> float:
    """Largest difference of hidden states between `drafter` rounded to bf16 and the export in a fresh process."""
    mine = DFlashDraftModel(drafter.config).float().eval()
    mine.load_state_dict({k: v.to(torch.bfloat16).float() for k, v in drafter.state_dict().items()})
    inputs = probe(mine)
    with torch.no_grad():
        expected = mine(inputs["embeds"], inputs["features"], inputs["positions"])
    with tempfile.TemporaryDirectory() as temporary:
        script, inputs_path, out = (Path(temporary) / name for name in ("reload.py", "probe.safetensors", "out"))
        script.write_text(_RELOAD)
        save_file(inputs, inputs_path)
        environment = {**os.environ, "HF_MODULES_CACHE": f"{temporary}/modules", "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            [sys.executable, script, folder.resolve(), inputs_path, out],
            env=environment, cwd=temporary, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise ValueError(
                f"export: {folder} does not load in a fresh process: {done.stderr.strip().splitlines()[-1]}"
            )
        difference = float((load_file(out)["hidden"] - expected).abs().max())
    if not difference <= PROBE_TOLERANCE:
        raise ValueError(
            f"export: hidden states of the reloaded {folder} differ by {difference:.2e}, expected {PROBE_TOLERANCE:.0e}"
        )
    return difference


def export_checkpoint(config: RunConfig) -> Path:
    """Export `path` (a checkpoint), or the run's best one, to runs/NAME/export."""
    path = config.path or checkpoint.best(config.folder / "checkpoints")
    if path is None:
        raise ValueError(f"path: no complete checkpoint in {config.folder / 'checkpoints'}; train first")
    if not (path / "trainer.json").exists():
        raise ValueError(f"path: {path} is not a complete checkpoint, expected a trainer.json in it")
    trainer, folder = read_json(path / "trainer.json"), path.parents[1] / "export"
    weights = sampled_digest(path / "state.safetensors")
    training = trainer["training"] | {"steps": trainer["step"], "checkpoint": {"name": path.name, "hash": weights}}
    if (folder / "dflash_training.json").exists() and read_json(folder / "dflash_training.json") == training:
        print(f"export: {folder} is that of {path} already", flush=True)
        return folder
    export(checkpoint.load_drafter(path), folder, training)
    print(f"export: {path} -> {folder}, reloaded in a fresh process and equal", flush=True)
    return folder


def write_card(folder: Path, report: dict) -> None:
    """README.md of the export: what it is, what was measured, how to run it."""
    training, config = read_json(folder / "dflash_training.json"), read_json(folder / "config.json")
    target = training["target_name"]
    size = config["block_size"]
    text = f"""---
library_name: transformers
base_model: {training["target_id"]}
tags: [dflash, speculative-decoding]
---

# DFlash drafter for {target}

Drafts {size - 1} tokens in one forward pass for the target to verify ([arXiv 2602.06036](https://arxiv.org/abs/2602.06036));
the target's words do not change. {config["num_hidden_layers"]} layers, block size {size}, taps
{config["dflash_config"]["target_layer_ids"]}, mask token {config["dflash_config"]["mask_token_id"]}. Trained for
{training["steps"]} steps on {training["rows"]} rows of the target's own answers. It has no embedding and no head: both
are the target's.

## Measured

Greedy, {report["evaluate"]["max_new_tokens"]} new tokens a prompt, bf16, target alone and with drafter alternately
in one run, on {report["device"]}; identity in fp32.

```
{table(report["sets"])}
```

![tau, speed and slot acceptance of each set](evaluation.png)

## Use

```python
from transformers import AutoModel, AutoModelForCausalLM

drafter = AutoModel.from_pretrained("PATH", trust_remote_code=True, dtype="auto")
target = AutoModelForCausalLM.from_pretrained("{training["target_id"]}", dtype="auto")
ids = drafter.spec_generate(
    target=target, input_ids=input_ids, max_new_tokens=256, stop_token_ids=[...], temperature=0.0
)
```
"""
    write_text(folder / "README.md", text)
