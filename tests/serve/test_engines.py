"""Exports on engines that nobody here wrote: z-lab's `dflash` 0.1.0, Transformers' DFlash generation, vLLM for CPUs.

A drafter is trained on the tiny target's own greedy answers for a minute and exported in both formats; all in fp32.
References: the target's plain greedy answers by Transformers; verify steps and accepted drafts of `dflash.generate`
with the drafter rounded to bf16, as an export is; the target's own distribution. An engine that read a config wrongly
would give the target's words all the same, so exports with one wrong value must cost each engine at least a fifth more
verify steps: what is compared here is known to see them.

Prompts are left out, and counted, whose answers stop early or are decided by less than 2e-4 between two logits, of the
target or of the drafter: engines differ in rounding.
"""

import contextlib
import copy
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import run_helpers as helpers
import torch
from helpers import greedy
from safetensors.torch import load_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from data_prep.prepare import Preparation
from data_prep.prompts import read_rows
from data_prep.regenerate import render
from dflash.generate import generate
from dflash.model import DFlashDraftModel, TargetEnds
from dflash.target import load_target
from train.config import EvaluateConfig
from train.evaluate import Prompt
from train.evaluate_server import measure_servers
from train.export import Format, export
from train.trainer import fit

ZLAB, VLLM = helpers.ROOT / ".venv/zlab", helpers.ROOT / ".venv/vllm/bin/python"
PROMPTS, NEW, S, TIE = 8, 96, 8, 2e-4
SAMPLED_PROMPTS, SAMPLED_NEW = 16, 256
FAULTS = ("taps", "causality", "mask token", "rotary base")
FALL = 1.2  # verify steps of a broken export over those of the sound one, at least
RUNS = [("z-lab", Format.zlab), ("vLLM", Format.zlab), ("vLLM", Format.speculators)]


def ask(python: Path, script: str, request: dict, folder: Path, timeout=480, **env) -> dict:
    """What `script`, run in that Python, answers. Its process group does not outlive the call, and what it leaves lying
    about lies in `folder`."""
    folder.mkdir()
    (folder / "request").write_text(json.dumps(request))
    env = helpers.environment(TMPDIR=str(folder), **env)
    command = [python, Path(__file__).parent / script, folder / "request", folder / "answer"]
    with (folder / "log").open("w") as log, subprocess.Popen(
        command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
    ) as process:  # fmt: skip
        try:
            code = process.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, (folder / "log").read_text()[-3000:]
    return json.loads((folder / "answer").read_text())


@pytest.fixture(scope="module")
def target():
    target = load_target(str(helpers.TINY), dtype=torch.float32)
    target.generation_config.eos_token_id = None
    return target


@pytest.fixture(scope="module")
def trained():
    """(drafter rounded to bf16, all prompts). Two layers: in a single one the slots behind a slot hold mask embeddings
    and nothing else, and hiding them costs nothing."""
    made = helpers.config(
        helpers.folder(), "cache.dtype=float32", "engine.dtype=float32", f"data.max_new_tokens={NEW}",
        "data.max_length=512", "model.num_layers=2", "batch.anchors_per_row=32", "batch.bin_anchors=256",
        "optim.steps=500", "optim.lr=4e-3", "evaluate.every=1000",
    )  # fmt: skip
    prepared = Preparation(made.model, made.data, made.cache)
    store = prepared.features()
    torch.manual_seed(0)
    drafter = DFlashDraftModel(prepared.drafter)
    fit(made, store, drafter, helpers.ends(prepared.drafter), torch.device("cpu"), prepared.provenance(store))
    # On CPUs vLLM 0.32.0 norms the context's keys of every layer by the first layer's k_norm: rms_norm reads one row of
    # the stacked weights there, as it did on XPUs (vllm-xpu-kernels#573). So all layers get the same one.
    for layer in drafter.layers[1:]:
        layer.self_attn.k_norm.load_state_dict(drafter.layers[0].self_attn.k_norm.state_dict())
    prompts = [render(prepared.tokenizer, row["messages"], prepared.data) for row in read_rows(prepared.data)]
    return drafter.bfloat16().float().eval(), prompts


def played(target, drafter, ids):
    """Our generation, and the smallest distance between two best logits in it."""
    ends, gaps = TargetEnds.of(target, drafter.config), []

    def look(logits):
        best = logits.topk(2).values
        gaps.append(float((best[..., 0] - best[..., 1]).min()))

    handles = [
        target.register_forward_hook(lambda module, inputs, output: look(output.logits)),
        drafter.register_forward_hook(lambda module, inputs, output: look(ends.logits(output[0, 1:]))),
    ]
    made = generate(target, torch.tensor([ids]), NEW, drafter)
    for handle in handles:
        handle.remove()
    return made, min(gaps)


@pytest.fixture(scope="module")
def ours(target, trained):
    """{prompts, runs: our generations of them, tie, stop: how many were left out}."""
    drafter, prompts = trained
    out = {"prompts": [], "runs": [], "tie": 0, "stop": 0}
    for ids in prompts:
        made, gap = played(target, drafter, ids)
        if helpers.END in made.tokens or gap < TIE:
            out["tie" if gap < TIE else "stop"] += 1
        elif len(out["runs"]) < PROMPTS:
            out["prompts"].append(ids)
            out["runs"].append(made)
    assert len(out["runs"]) == PROMPTS and out["tie"] < len(prompts) / 4
    return out


def broken(config: dict, fault: str) -> dict:
    """The config with one value wrong, in either format."""
    config = copy.deepcopy(config)
    layers, inner = config.get("transformer_layer_config", config), config.get("dflash_config", config)
    if fault == "taps":  # what forgetting that hidden_states[0] is the embedding does
        name = "target_layer_ids" if "target_layer_ids" in inner else "aux_hidden_state_layer_ids"
        inner[name] = [tap - 1 for tap in inner[name]]
    elif fault == "causality":
        layers["is_causal"] = True
    elif fault == "mask token":  # a token that was trained: all unused rows of a tied embedding are alike
        inner["mask_token_id"] = helpers.ASSISTANT
    elif fault == "rotary base":
        layers["rope_theta"] *= 10
        layers["rope_parameters"]["rope_theta"] *= 10
    return config


@pytest.fixture(scope="module")
def folders(trained, tmp_path_factory):
    """{(format, fault): export}; fault None is the sound one."""
    place, out = tmp_path_factory.mktemp("exports"), {}
    training = {"target_id": "tiny", "target_architectures": [], "captured_taps": trained[0].taps}
    for form in Format:
        out[form, None] = sound = export(trained[0], place / form.value, training, form)
        for fault in FAULTS:
            out[form, fault] = shutil.copytree(sound, place / f"{form.value}-{fault}")
            config = broken(json.loads((sound / "config.json").read_text()), fault)
            (out[form, fault] / "config.json").write_text(json.dumps(config))
    return out


def verify_steps(accepted: list[int]) -> int:
    """How many began before `NEW` tokens were out; the first token is the prefill's."""
    return sum(1 + sum(accepted[:step]) < NEW for step in range(len(accepted)))


@pytest.fixture(scope="module")
def zlab(ours, trained, folders, tmp_path_factory):
    """z-lab's engine on the sound and broken exports, and its sampled run. It shortens a block that reaches over the
    limit, and so changes what a bidirectional drafter sees: it is asked for a block more than counts."""
    request = {"prompts": ours["prompts"], "new": NEW + S, "temperature": 0.0}
    wanted = {key: folder for key, folder in folders.items() if key[0] == Format.zlab}
    jobs = [{"drafter": str(folder)} | request for folder in wanted.values()]
    sampled = {"prompts": trained[1][:SAMPLED_PROMPTS], "new": SAMPLED_NEW, "temperature": 1.0}
    jobs.append({"drafter": str(folders[Format.zlab, None])} | sampled)
    answer = ask(
        Path(sys.executable), "engine_zlab.py", {"target": str(helpers.TINY), "jobs": jobs},
        tmp_path_factory.mktemp("zlab") / "run", PYTHONPATH=str(ZLAB),
    )  # fmt: skip
    assert Path(answer["engine"]).is_relative_to(ZLAB)
    *greedy_jobs, sampled = answer["jobs"]
    for job in greedy_jobs:
        for run in job:
            run["tokens"], run["drafts"] = run["tokens"][:NEW], verify_steps(run["accepted"])
            run["accepted"] = sum(run["accepted"][: run["drafts"]]) - run["drafts"]
    return dict(zip(wanted, greedy_jobs, strict=True)) | {"sampled": sampled}


@pytest.fixture(scope="module")
def vllm(ours, folders, tmp_path_factory):
    jobs = [
        {"drafter": str(folder), "drafts": S - 1, "prompts": ours["prompts"], "new": NEW} for folder in folders.values()
    ]
    request = {"target": str(helpers.TINY), "jobs": jobs}
    answer = ask(VLLM, "engine_vllm.py", request, tmp_path_factory.mktemp("vllm") / "run")
    return dict(zip(folders, answer["jobs"], strict=True))


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory):
    """The URL of a vLLM server with the sound export, which asks one prompt at a time."""
    folder, url = tmp_path_factory.mktemp("server"), f"http://127.0.0.1:{(port := helpers.free_port())}"
    drafter = {"method": "dflash", "model": str(folders[Format.zlab, None]), "num_speculative_tokens": S - 1}
    command = [
        VLLM, "-m", "vllm.entrypoints.openai.api_server", "--model", helpers.TINY, "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "1", "--enforce-eager",
        "--no-enable-prefix-caching", "--speculative-config", json.dumps(drafter),
    ]  # fmt: skip
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}
    env = helpers.environment(TMPDIR=str(folder), **settings)
    with (folder / "log").open("w") as log, subprocess.Popen(
        command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
    ) as process:  # fmt: skip
        try:
            deadline = time.monotonic() + 300
            while not answers(f"{url}/health"):
                assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
                time.sleep(0.5)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, trust_env=False).status_code == 200
    return False


@pytest.fixture
def engine(request):
    """What an engine gave, by (format, fault)."""
    return lambda name: request.getfixturevalue({"z-lab": "zlab", "vLLM": "vllm"}[name])


def total(runs: list[dict], what="drafts") -> int:
    return sum(run[what] for run in runs)


def test_the_drafter_accepts_enough_to_tell(target, ours):
    for ids, run in zip(ours["prompts"], ours["runs"]):
        assert run.tokens == greedy(target, ids, NEW)
    steps = [len(run.accepted) for run in ours["runs"]]
    assert PROMPTS * (NEW - 1) / sum(steps) > 1.8
    assert max(steps) - min(steps) > 3, "prompts of all the same length hide a mistake"


@pytest.mark.parametrize("name, form", RUNS)
def test_an_engine_agrees_with_ours(ours, engine, name, form):
    """In tokens, verify steps and accepted drafts of every prompt; drafts behind the limit count."""
    found, runs = engine(name)[form, None], ours["runs"]
    assert [run["tokens"] for run in found] == [run.tokens for run in runs]
    assert [run["drafts"] for run in found] == [len(run.accepted) for run in runs]
    assert [run["accepted"] for run in found] == [sum(run.accepted_raw) - len(run.accepted_raw) for run in runs]


def test_a_servers_own_counters_agree_with_ours(ours, server, monkeypatch):
    """What stage=evaluate reports of a server, against our loop: tokens, drafts, acceptance of each slot, tau."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    prompts = [Prompt(str(number), ids) for number, ids in enumerate(ours["prompts"])]
    settings = EvaluateConfig(servers={"dflash": server}, concurrency=[1, 2], max_new_tokens=NEW)
    targets = [str(helpers.TINY)]
    report = measure_servers(settings, {"own": prompts}, helpers.tokenizer(), set(), targets, lambda *_: None)
    raw = [n for run in ours["runs"] for n in run.accepted_raw]
    about = report["servers"]["dflash"]
    assert about["engine"] == "vllm" and about["model"] == str(helpers.TINY)
    for found in report["sets"]["own"]["passes"]:
        assert (found["requests"], found["tokens"], found["failed"]) == (PROMPTS, PROMPTS * NEW, {})
        assert (found["drafts"], found["accepted"]) == (len(raw), sum(raw) - len(raw))
        assert found["slot_acceptance"] == pytest.approx([sum(n > k for n in raw) / len(raw) for k in range(1, S)])
        assert found["tau"] == pytest.approx(sum(raw) / len(raw)) and found["remarks"] == []
        assert (found["drafter"], found["block_size"]) == ("dflash", S)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name, form", RUNS)
def test_a_broken_export_shows(ours, engine, name, form, fault):
    found = engine(name)[form, fault]
    assert [run["tokens"] for run in found] == [run.tokens for run in ours["runs"]]
    assert total(found) >= FALL * total(engine(name)[form, None])


def transformers_sampled(target, folder: Path, prompts: list[list[int]]) -> list[dict]:
    """Transformers' own DFlash generation at temperature 1. Its one class is another drafter's, with z-lab's
    mathematics: it takes the export's tensors under its own names."""
    found, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    fields = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    fields += ("head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "layer_types", "hidden_act")
    inside = {name: found["dflash_config"][name] for name in ("block_size", "mask_token_id", "target_layer_ids")}
    config = MuseGlimmerAssistantConfig(**{name: found[name] for name in fields}, **inside, sliding_window=2048)
    config._attn_implementation = "sdpa"
    assistant = MuseGlimmerAssistantModel(config).float().eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    assistant.load_state_dict({names.get(name, name): tensor for name, tensor in tensors.items()}, strict=True)
    torch.manual_seed(0)
    forwards, out = [], []
    handle = target.register_forward_hook(lambda *_: forwards.append(1))
    for ids in prompts:
        forwards.clear()
        made = target.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), assistant_model=assistant,
            speculation_type="dflash", do_sample=True, temperature=1.0, top_k=0, max_new_tokens=SAMPLED_NEW,
            pad_token_id=0,
        )  # fmt: skip
        out.append({"tokens": made[0, len(ids) :].tolist(), "drafts": len(forwards) - 1})
    handle.remove()
    return out


@pytest.fixture(scope="module")
def sampled(target, trained, folders, zlab):
    """{engine: its runs at temperature 1 without stop tokens}."""
    prompts = trained[1][:SAMPLED_PROMPTS]
    theirs = [{"tokens": run["tokens"], "drafts": len(run["accepted"])} for run in zlab["sampled"]]
    return {"z-lab": theirs, "Transformers": transformers_sampled(target, folders[Format.zlab, None], prompts)}


def surprise(target, prompts, answers) -> tuple[float, float]:
    """Mean over all tokens of -log p(token) less the entropy of p at its place, and its standard error.

    The expected value is zero for a token drawn from p, whatever came before it: so is that of the mean, and the terms
    are uncorrelated, so that their spread gives the error. p: the target's distribution at temperature 1.
    """
    terms = []
    for ids, answer in zip(prompts[:SAMPLED_PROMPTS], answers, strict=True):
        with torch.no_grad():
            logits = target(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        log_probs = logits.double().log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        terms.append(-log_probs.gather(-1, torch.tensor(answer)[:, None])[:, 0] - entropy)
    terms = torch.cat(terms)
    return float(terms.mean()), float(terms.std()) / math.sqrt(len(terms))


@pytest.mark.parametrize("name", ["z-lab", "Transformers"])
def test_sampled_tokens_follow_the_target(target, trained, sampled, name):
    """Within 4 standard errors; with drafts accepted, or it would be plain decoding."""
    runs = sampled[name]
    assert {len(run["tokens"]) for run in runs} == {SAMPLED_NEW}
    assert total(runs) < 0.9 * SAMPLED_PROMPTS * (SAMPLED_NEW - 1)
    mean, error = surprise(target, trained[1], [run["tokens"] for run in runs])
    assert error < 0.025 and abs(mean) < 4 * error


def test_tokens_of_another_temperature_show(target, trained):
    """The measure's own test: plain decoding by Transformers at temperature 0.9."""
    torch.manual_seed(0)
    answers = []
    for ids in trained[1][:SAMPLED_PROMPTS]:
        made = target.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=True,
            temperature=0.9, top_k=0, max_new_tokens=SAMPLED_NEW, pad_token_id=0,
        )  # fmt: skip
        answers.append(made[0, len(ids) :].tolist())
    mean, error = surprise(target, trained[1], answers)
    assert abs(mean) > 4 * error


def figures(target, prompts, ours: dict, engines: dict, sampled: dict) -> str:
    steps = sum(len(run.accepted) for run in ours["runs"])
    accepted = sum(sum(run.accepted_raw) for run in ours["runs"]) - steps
    lines = [
        f"{PROMPTS} prompts x {NEW} tokens, greedy, fp32; ours: {steps} verify steps, {accepted} drafts accepted, tau"
        f" {PROMPTS * (NEW - 1) / steps:.2f}; prompts left out: {ours['tie']} near-ties, {ours['stop']} that stop;",
        "verify steps and accepted drafts of the engines, and how many more steps an export costs that is wrong in",
        f"{'engine':8}{'format':13}{'same words':>11}{'steps':>7}{'accepted':>10}"
        + "".join(f"{fault:>13}" for fault in FAULTS),
    ]
    for name, form in RUNS:
        sound = engines[name][form, None]
        same = sum(run["tokens"] == mine.tokens for run, mine in zip(sound, ours["runs"]))
        falls = [total(engines[name][form, fault]) / total(sound) - 1 for fault in FAULTS]
        lines.append(
            f"{name:8}{form.value:13}{f'{same} of {PROMPTS}':>11}{total(sound):>7}{total(sound, 'accepted'):>10}"
            + "".join(f"{fall:>+13.0%}" for fall in falls)
        )
    for name, runs in sampled.items():
        mean, error = surprise(target, prompts, [run["tokens"] for run in runs])
        tokens = len(runs) * (SAMPLED_NEW - 1)
        lines.append(
            f"{name}, temperature 1: -log p less entropy {mean:+.3f}, standard error {error:.3f}; {tokens} tokens in"
            f" {total(runs)} verify steps"
        )
    return "\n".join(lines)


def test_the_figures(capsys, target, trained, ours, zlab, vllm, sampled):
    text = figures(target, trained[1], ours, {"z-lab": zlab, "vLLM": vllm}, sampled)
    with capsys.disabled():
        print(f"\n{text}")
