"""What is told of an export: evaluation.json, two plots, and README.md, the card that the Hub shows.

Every number of the card is taken from evaluation.json or dflash_training.json.
"""

import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from data_prep.files import read_json, write_json, write_text
from data_prep.prepare import Preparation, describe
from data_prep.regenerate import template_arguments
from dflash.model import DFlashDraftModel
from dflash.target import default_device
from train.config import RunConfig
from train.evaluate import evaluate, evaluation_prompts, next_turn
from train.verify import TRAINING, is_speculators, read_training

OF_SERVERS = ("servers", "concurrency")  # keys of evaluate.* that do not change what is measured here


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(sets: dict) -> str:
    """The report as the tables that a user reads."""
    head = (
        f"{'set':14} {'prompts':>7} {'tau':>5} {'alone':>7} {'drafted':>8} {'ratio':>6} {'no loops':>8} {'looping':>8}"
    )
    lines = [f"{head} {'identical (fp32)':>17} {'ms/token':>14} {'draft, verify':>13}  slot acceptance"]
    for name, r in sets.items():
        same, steady = r["identity"], r["ratio_without_looping"]
        identical = f"{same['identical']}/{same['prompts']}" + (
            f" +{same['near_ties']} ties" if same["near_ties"] else ""
        )
        per_token = f"{r['ms_per_token_alone']:.1f} > {r['ms_per_token']:.1f}"
        lines.append(
            f"{name:14} {prompts_and_turns(r):>7} {number(r['tau']):>5} {r['tokens_per_second_alone']:>7.1f}"
            f" {r['tokens_per_second']:>8.1f} {r['ratio']:>6.2f} {number(steady):>8}"
            f" {r['looping']:>8.0%} {identical:>17} {per_token:>14} {_shares(r):>13}"
            f"  {' '.join(f'{p:.2f}' for p in r['slot_acceptance'])}"
        )
    lines.append("alone, drafted: tokens/s of the target alone and with the drafter, bf16, prefill included")
    for name, r in sets.items():
        kinds = {f"to {c['up_to']}": c for c in r["tau_by_context"]} | r["tau_by_category"]
        parts = ", ".join(f"{kind}: {number(c['tau'])} ({c['verify_steps']})" for kind, c in kinds.items())
        lines.append(f"{name}: tau (verifications) by tokens of context, and category if any: {parts}")
    return "\n".join(lines)


def prompts_and_turns(r: dict) -> str:
    return f"{r['prompts']}" + (f" ({r['turns']})" if r["turns"] > r["prompts"] else "")


def _shares(r: dict) -> str:
    return f"{r['time_shares']['draft']:.0%}, {r['time_shares']['verify']:.0%}"


def flagged(sets: dict) -> list[str]:
    """A line for each thing that makes a set's figures worth less than they look."""
    reasons = {
        "random_looking": "look like random ids, not text",
        "looping": "got an answer that loops",
        "without_verification": "ended before anything was drafted",
    }
    lines = []
    for name, r in sets.items():
        found = {reason: r["flags"][flag] for flag, reason in reasons.items() if r["flags"][flag]}
        lines += [f"{name}: {count} of {r['turns']} prompts {reason}" for reason, count in found.items()]
        if r["flags"]["no_draft_accepted"]:
            lines.append(f"{name}: zero drafts accepted in {r['verify_steps']} verifications; stage=diagnose tells why")
    return lines


def unlike_training(config: RunConfig, trained: dict) -> list[str]:
    """A line for each setting of the evaluation that is not that of the training; trained: its data config."""
    then = SimpleNamespace(**vars(config.data) | trained)
    pairs = {"template arguments (data.thinking)": (template_arguments(config.data), template_arguments(then))}
    if trained.get("answers") == "target":
        pairs["evaluate.temperature"] = (config.evaluate.temperature, trained.get("temperature"))
    return [
        f"{name}: found {now}, the training had {then}; the drafter did not learn such text"
        for name, (now, then) in pairs.items()
        if now != then
    ]


def device_name() -> str:
    """The GPU, or the number of CPU threads."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"


def evaluate_export(config: RunConfig, folder: Path) -> None:
    """Evaluate an export on the configured sets; write its figures, plots and card, and print the table."""
    from train.plots import plot_evaluation, plot_training

    require_own_model(config, folder)
    path = folder / "evaluation.json"
    report = read_json(path) if path.exists() else None
    asked = {name: value for name, value in describe(config.evaluate).items() if name not in OF_SERVERS}
    known = {"evaluate": asked, "template_arguments": template_arguments(config.data)}
    if report is None or any(report.get(key) != value for key, value in known.items()):
        report = known | measure(config, folder)
        write_json(path, report)
    plot_evaluation(report["sets"], folder / "evaluation.png")
    if (log := folder.parent / "log.jsonl").exists():
        plot_training(log, folder / "training.png")
    write_card(folder, report)
    other = folder.with_name("export-speculators")
    if other.exists() and read_json(other / TRAINING)["checkpoint"] == read_json(folder / TRAINING)["checkpoint"]:
        for name in ("evaluation.json", "evaluation.png", "training.png"):
            if (folder / name).exists():
                shutil.copy(folder / name, other)
        write_card(other, report)
    print(table(report["sets"]))
    for line in [*report["unlike_training"], *flagged(report["sets"])]:
        print(f"evaluate: warning: {line}")
    different = {name: r["identity"]["different"] for name, r in report["sets"].items() if r["identity"]["different"]}
    if different:
        raise ValueError(f"evaluate: outputs with the drafter differ from the target's own in fp32: {different}")


def require_own_model(config: RunConfig, folder: Path) -> None:
    """Raise ValueError for an export of another model than the config's."""
    training = read_json(folder / TRAINING)["model"]
    for key in ("target", "block_size", "mask_token_id"):
        if training[key] != (found := describe(config.model)[key]):
            raise ValueError(f"model.{key}: found {found}, expected {training[key]} as in {folder}; use its own +model")


def recorded_settings(config: RunConfig, stops: set[int]) -> dict:
    """What every set of an evaluation records of how it was asked."""
    settings = config.evaluate
    return {
        "template_arguments": template_arguments(config.data),
        "thinking": config.data.thinking,
        "sampling": {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k", "seed")},
        "max_new_tokens": settings.max_new_tokens,
        "stop_ids": sorted(stops),
    }


def measure(config: RunConfig, folder: Path) -> dict:
    """The evaluation of an export, and what it was measured on."""
    preparation = Preparation(config.model, config.data, config.cache)
    sets, stops, settings = evaluation_prompts(config, preparation), preparation.stops, config.evaluate
    load_drafter = lambda dtype: DFlashDraftModel.from_pretrained(folder, dtype=dtype).to(default_device()).eval()  # noqa: E731
    follow = partial(next_turn, preparation.tokenizer, config.data, stops)
    measured = evaluate(preparation.load_target, load_drafter, sets, stops, settings, follow)
    recorded = recorded_settings(config, stops) | {
        "sampled_proposals": settings.sampled_proposals,
        "block_size": settings.block_size or config.model.block_size,
    }
    return {
        "target": preparation.target_name(),
        "device": device_name(),
        "unlike_training": unlike_training(config, read_training(folder)["config"]["data"]),
        "sets": {name: figures | {"settings": recorded} for name, figures in measured.items()},
    }


def write_card(folder: Path, report: dict) -> None:
    """README.md of an export: what it is, what was measured, how to run it. `PATH` stands for where it will lie."""
    training = read_training(folder)
    shape, ways = training["geometry"], training["config"]
    speculators = is_speculators(read_json(folder / "config.json"))
    target, target_id, size = training["target_name"], training["target_id"], shape["block_size"]
    data, optim, evaluate_config = ways["data"], ways["optim"], report["evaluate"]
    by = {"data": "stood in the data as its own", "target": "were generated by it for this training"}[data["answers"]]
    sampled = f"at temperature {data['temperature']}" if data["temperature"] else "greedily"
    thinking = {None: "left to the template", True: "on", False: "off"}[data["thinking"]]
    sources = ", ".join(Path(s["path"]).name if s["path"].startswith("/") else s["path"] for s in data["sources"])
    revision = f" at revision `{training['model']['revision']}`" if training["model"].get("revision") else ""
    licence = f"license: {training['licence']}\n" if training.get("licence") else ""
    blocks, rate = ways["batch"]["anchors_per_row"], f"peak learning rate {optim['lr']:g}"
    steps = f"{training['steps']} steps of {ways['batch']['rows_per_step']} rows, up to {blocks} blocks a row"
    curves = "\n![loss and tau over training](training.png)\n" if (folder / "training.png").exists() else ""
    heat = evaluate_config["temperature"]
    how = f"At temperature {heat:g}" if heat else "Greedy"
    remarks = "".join(f"\n- {line}" for line in [*report["unlike_training"], *flagged(report["sets"])])
    remarks += "\n" * bool(remarks)
    text = f"""---
library_name: transformers
base_model: {target_id}
{licence}tags: [dflash, speculative-decoding]
---

# DFlash drafter for {target}

Drafts {size - 1} tokens in one forward pass, which the target verifies in one of its own
([arXiv 2602.06036](https://arxiv.org/abs/2602.06036)). The target's words do not change; it only says them sooner.
It has no embedding and no head: both are the target's.

| | |
|---|---|
| target | [{target}](https://huggingface.co/{target_id}){revision}, {shape["num_target_layers"]} layers |
| drafter | {shape["num_hidden_layers"]} layers of width {shape["hidden_size"]}, bf16 |
| block size | {size} (the anchor counted) |
| taps | {shape["taps"]}: outputs of these target layers, 0-based |
| mask token | {shape["mask_token_id"]} |
| data | {training["rows"]} rows of {sources}; the target's answers {by}, {sampled}; thinking mode {thinking} |
| longest row in training | {data["max_length"]} tokens |
| training | {steps}, objective {optim["objective"]}, {rate} |
| features | cached as {ways["cache"]["codec"]} |

## Measured

| set | prompts | tau | speed-up | tokens/s alone | drafted | draft, verify | slot acceptance | identical | looping |
|---|---|---|---|---|---|---|---|---|---|
{_measured(report["sets"])}

{how}, {evaluate_config["max_new_tokens"]} new tokens a prompt, bf16, target alone and with drafter alternately in one
run, prefill included, on {report["device"]}. *prompts*: conversations, in brackets all their turns. *tau*: tokens a
verification, the bonus token counted; in brackets 95 % intervals, from 1,000 draws of the conversations with
replacement. *draft, verify*: shares of the time with drafter. *slot acceptance*: share of blocks whose first 1, 2, ...
drafts were all right. *identical*: greedy outputs equal token for token to the target's own, in fp32. *looping*:
answers that end in a phrase said again and again, which are easy to draft.
{remarks}
![tau, speed and slot acceptance of each set](evaluation.png)
{curves}
## Use

{_launch(target_id, size, speculators)}

## Limits

It was trained for {target} in the precision and with the chat template named above: another quantisation, template or
thinking mode costs acceptance (never correctness). Sets far from its training text gain less, as the table shows; a
speed-up depends on hardware and load, and falls with the batch size.

Made with dflash-trainer. Versions: torch {training["versions"]["torch"]}, transformers
{training["versions"]["transformers"]}.
"""
    write_text(folder / "README.md", text)


def _measured(sets: dict) -> str:
    """The rows of the card's table."""

    def with_interval(r: dict, name: str) -> str:
        low, high = r[f"{name}_interval"]
        return f"{number(r[name])} ({low:.2f} to {high:.2f})"

    return "\n".join(
        f"| {name} | {prompts_and_turns(r)} | {with_interval(r, 'tau')} | {with_interval(r, 'ratio')}"
        f" | {r['tokens_per_second_alone']:.1f} | {r['tokens_per_second']:.1f} | {_shares(r)}"
        f" | {' '.join(f'{p:.2f}' for p in r['slot_acceptance'])}"
        f" | {r['identity']['identical']}/{r['identity']['prompts']} | {r['looping']:.0%} |"
        for name, r in sets.items()
    )


def _launch(target_id: str, size: int, speculators: bool) -> str:
    """Lines that run the drafter, engine by engine."""
    flag = f'{{"method": "dflash", "model": "PATH", "num_speculative_tokens": {size - 1}}}'
    vllm = f"""vLLM (it needs the number of drafts, {size - 1}, and does not check it):

```bash
vllm serve {target_id} --speculative-config '{flag}'
```"""
    if speculators:
        return vllm
    return f"""{vllm}

SGLang:

```bash
python -m sglang.launch_server --model-path {target_id} --speculative-algorithm DFLASH \\
    --speculative-draft-model-path "PATH" --speculative-num-draft-tokens {size}
```

Transformers:

```python
from transformers import AutoModel, AutoModelForCausalLM

drafter = AutoModel.from_pretrained("PATH", trust_remote_code=True, dtype="auto")
target = AutoModelForCausalLM.from_pretrained("{target_id}", dtype="auto")
ids = drafter.spec_generate(
    target=target, input_ids=input_ids, max_new_tokens=256, stop_token_ids=[...], temperature=0.0
)
```"""
