"""The doctor names the right rung. Reference: four faults planted one at a time, with recipes and manifests forged so
that nothing but acceptance can tell.
"""

import copy
import functools
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import run_helpers as helpers
import torch
from safetensors.torch import load_file, save_file

from data_prep.config import DataConfig
from data_prep.files import digest, read_json, write_json
from data_prep.prepare import Preparation
from data_prep.store import MANIFEST, Store
from dflash.model import DFlashDraftModel
from train.diagnose import _engine_tau, diagnose, first_fall
from train.export import export_checkpoint
from train.trainer import fit

THINK = "<think>zq!"  # this target knows Python alone, and goes on in words that no drafter of its code foresees


def make_target(folder):
    """The tiny target, its template with a thinking mode."""
    shutil.copytree(helpers.TINY, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    template = config["chat_template"]
    config["chat_template"] = template + "{% if enable_thinking %}{{ " + json.dumps(THINK) + " }}{% endif %}"
    path.write_text(json.dumps(config))
    return folder


def configured(folder, *overrides):
    made = helpers.config(
        folder, "cache.dtype=float32", "engine.dtype=float32", "data.max_new_tokens=48", "data.thinking=false",
        "optim.steps=240", "optim.lr=4e-3", "log.every=80", "evaluate.every=1000", f"model.target={folder}/target",
        *overrides,
    )  # fmt: skip
    made.path = made.folder / "export"
    return made


def prepared(made) -> Preparation:
    return Preparation(made.model, made.data, made.cache)


def forge(there: Preparation, here: Preparation) -> None:
    """Put the cache of one recipe where another's is looked for, with that one's recipe in its manifest."""
    for name in ("rows", "features"):
        source, place = getattr(there, f"{name}_folder"), getattr(here, f"{name}_folder")
        if source != place:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(source, place)
        manifest = read_json(place / MANIFEST)
        write_json(place / MANIFEST, manifest | {"recipe": getattr(here, f"{name}_recipe")})


def train(made, store, preparation) -> None:
    """A drafter on a store, and its export."""
    torch.manual_seed(0)
    drafter = DFlashDraftModel(preparation.drafter)
    ends = helpers.ends(preparation.drafter)
    fit(made, store, drafter, ends, torch.device("cpu"), preparation.provenance(store))
    whole = copy.copy(made)
    whole.path = None
    export_checkpoint(whole)


@functools.cache
def sound():
    """A folder with target, cache, run and export in which nothing is wrong."""
    folder = helpers.folder()
    make_target(folder / "target")
    made = configured(folder)
    preparation = prepared(made)
    train(made, preparation.features(), preparation)
    return folder


@pytest.fixture
def patient(tmp_path):
    """A copy of it, to be made ill: the config's paths are those of the copy, and its cache is forged to fit."""
    before = prepared(configured(sound()))
    shutil.copytree(sound(), tmp_path, dirs_exist_ok=True)
    made = configured(tmp_path)
    there = prepared(made)
    for name in ("rows", "features"):  # lies in the copy under the name that it had
        folder = getattr(before, f"{name}_folder")
        shutil.copytree(folder, getattr(there, f"{name}_folder"), dirs_exist_ok=True)
    forge(there, there)
    return made


def test_nothing_is_found_where_nothing_is_wrong(patient, capsys):
    found = diagnose(patient)
    taus = list(found["taus"].values())
    assert found["lost"] is None and list(found["taus"]) == ["cached", "live", "loop", "export"]
    assert min(taus) > 1.2, "a drafter that gets nothing right would not tell"
    assert max(taus) - min(taus) < 0.05 * (min(taus) - 1), taus  # all of it in fp32, the export's weights in bf16
    assert "no rung loses" in capsys.readouterr().out


def test_features_of_other_taps(tmp_path):
    """Trained, and good, on a cache that holds the outputs of other layers than its manifest says."""
    make_target(tmp_path / "target")
    made = configured(tmp_path)
    other = configured(tmp_path, "model.taps=[2,3,4]")
    there, here = prepared(other), prepared(made)
    there.features()
    here.encode()
    forge(there, here)
    train(made, Store(here.features_folder), here)
    found = diagnose(made)
    assert found["lost"] == "live" and found["taus"]["cached"] > 1.2


def test_a_thinking_mode_that_was_switched(patient, capsys):
    there = prepared(patient)
    patient.data = DataConfig(**{**vars(patient.data), "thinking": True})
    forge(there, prepared(patient))
    found = diagnose(patient)
    assert found["lost"] == "loop", found
    assert "prompts are not rendered to the tokens that stand in the cache" in capsys.readouterr().out


def test_an_export_with_another_mask_token(patient):
    path = patient.path / "config.json"
    config = read_json(path)
    config["dflash_config"]["mask_token_id"] = 120
    write_json(path, config)
    found = diagnose(patient)
    assert found["lost"] == "export", found


def test_a_target_that_is_coarser_than_at_capture(patient):
    """Every weight of it on a grid of a few values, a row's largest setting the step."""
    there = prepared(patient)
    whole = digest(there.features_recipe)
    path = f"{patient.model.target}/model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if weight.ndim == 2 and "layers" in name:
            step = weight.float().abs().amax(dim=1, keepdim=True) / 3
            weights[name] = ((weight.float() / step).round() * step).to(weight.dtype)
    save_file(weights, path, metadata={"format": "pt"})
    here = prepared(patient)
    assert digest(here.features_recipe) != whole  # what forging hides
    forge(there, here)
    found = diagnose(patient)
    assert found["lost"] == "live", found


class Vllm(BaseHTTPRequestHandler):
    """Speaks as vLLM does: every answer takes 10 drafts, of which 15 tokens are accepted."""

    asked = []

    def do_POST(self):
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.reply("{}")

    def do_GET(self):
        names = {"num_drafts": 10, "num_accepted_tokens": 15, "num_draft_tokens": 70}
        lines = [f'vllm:spec_decode_{n}_total{{model_name="m"}} {3 + v * len(self.asked)}' for n, v in names.items()]
        self.reply("\n".join(["# HELP vllm:spec_decode_num_drafts Number of drafts.", *lines, "vllm:other 9"]))

    def reply(self, text: str):
        self.send_response(200 if self.path in ("/metrics", "/v1/completions") else 404)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def test_an_engines_tau_comes_from_its_counters(patient):
    """It is asked the same prompts, greedily, with the target's stop tokens."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Vllm)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        prompts = [[256, 258, 65], [256, 258, 66, 67]]
        assert _engine_tau(f"{url}/v1/", "m", prompts, {257}, patient) == pytest.approx(2.5)
        assert [body["prompt"] for body in Vllm.asked] == prompts
        assert {(b["temperature"], tuple(b["stop_token_ids"]), b["model"]) for b in Vllm.asked} == {(0, (257,), "m")}
        with pytest.raises(OSError, match=r"^diagnose\.server: .* failed"):
            _engine_tau(f"{url}/elsewhere", "m", prompts, {257}, patient)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "taus, rung",
    [
        ({"cached": 3.0, "live": 2.91, "loop": 2.6, "export": 2.55, "engine": 2.45}, None),
        ({"cached": 3.0, "live": 3.1, "loop": 2.8, "export": 2.7}, "export"),
        ({"cached": 3.0, "live": 2.89, "loop": 1.0, "export": 1.0}, "live"),
        ({"cached": 3.0, "live": 3.0, "loop": 2.59, "export": 1.0}, "loop"),
        ({"cached": 1.01, "live": 1.0, "loop": 1.0, "export": 1.0}, "cached"),
        ({"live": 2.0, "loop": 2.0, "export": 2.0, "engine": 1.89}, "engine"),
    ],
)
def test_the_first_rung_that_loses_too_much(taus, rung):
    assert first_fall(taus) == rung


def test_an_export_without_its_cache_is_told_in_one_line(patient):
    patient.data = DataConfig(**{**vars(patient.data), "max_length": 99})
    with pytest.raises(ValueError, match=r"^cache\.dir: no .*features-.* found") as error:
        diagnose(patient)
    assert "\n" not in str(error.value)
