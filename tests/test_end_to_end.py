"""The one command that the README promises, on an empty cache: two ranks under DeepSpeed train, the export is
evaluated, and a second call has nothing to prepare. References: exit codes, the files, and what the first call
left on disk.
"""

import json
import time

import pytest
import run_helpers as helpers

OVERRIDES = ["launch.ranks=2", "optim.steps=12", "optim.lr=4e-3", "save_every=6", "evaluate.prompts=2"]
OVERRIDES += ["export.speculators=true", "push_to_hub=me/tiny", "dry_run=true"]
FILES = ["config.json", "model.safetensors", "model.py", "generate.py", "dflash_training.json", "probe.st", "README.md"]
FILES += ["evaluation.json", "evaluation.png", "training.png"]


@pytest.fixture(scope="module")
def calls():
    """Two calls of the same command: [(outcome, seconds)], and the folder."""
    folder, done = helpers.folder(), []
    for _ in range(2):
        started = time.perf_counter()
        arguments = ["train/run.py", "+model=tiny", f"cache.dir={folder}/cache", f"runs={folder}/runs", *OVERRIDES]
        done.append((helpers.run(*arguments, timeout=150), time.perf_counter() - started))
        assert done[-1][0].returncode == 0, done[-1][0].stdout[-1500:] + done[-1][0].stderr[-3000:]
    return done, folder


def test_the_command_prepares_trains_evaluates_and_exports(calls):
    (first, _), folder = calls[0][0], calls[1]
    run, export = folder / "runs/tiny", folder / "runs/tiny/export"
    assert "12/12" in first.stdout and "reloaded in a fresh process and equal" in first.stdout
    assert sorted(path.name for path in export.iterdir()) == sorted(FILES)
    other = run / "export-speculators"
    assert sorted(path.name for path in other.iterdir()) == sorted({*FILES} - {"model.py", "generate.py"})
    assert (other / "evaluation.json").read_bytes() == (export / "evaluation.json").read_bytes()
    assert "vllm serve" in (other / "README.md").read_text() and "sglang" not in (other / "README.md").read_text()
    pushed = [line.split()[1] for line in first.stdout.splitlines() if line.startswith("publish: ") and "bytes" in line]
    assert sorted(pushed) == sorted([*FILES, "dry"])  # the last line: dry run, ... bytes
    assert "for me/tiny, nothing uploaded" in first.stdout
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-000006", "step-000012"]
    steps = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 12 and any("heldout/tau" in values for values in steps)
    assert len({values["step"] for values in steps if "loss" in values}) == len([s for s in steps if "loss" in s])


def test_the_evaluation_shows_identical_outputs_and_the_card_its_figures(calls):
    export = calls[1] / "runs/tiny/export"
    (report,) = json.loads((export / "evaluation.json").read_text())["sets"].values()
    identity = report["identity"]
    assert identity["prompts"] == 2 and identity["different"] == 0
    assert identity["identical"] + identity["near_ties"] == 2
    assert 1 <= report["tau"] <= 8 and report["verify_steps"] > 0 and report["prompts"] == 2
    card = (export / "README.md").read_text()
    (low, high), (slow, fast) = report["tau_interval"], report["ratio_interval"]
    row = f"| prompts | 2 | {report['tau']:.2f} ({low:.2f} to {high:.2f}) |"
    row += f" {report['ratio']:.2f} ({slow:.2f} to {fast:.2f}) |"
    row += f" {report['tokens_per_second_alone']:.1f} | {report['tokens_per_second']:.1f} | "
    assert row in card and "spec_generate" in card and "| taps | [1, 2, 3]: " in card
    assert low <= report["tau"] <= high and slow <= report["ratio"] <= fast


def test_what_is_prepared_is_not_prepared_again(calls):
    (first, seconds), (second, seconds_again) = calls[0]
    folder = calls[1]
    assert "regenerate:" in first.stdout and "capture" in first.stderr
    assert "regenerate:" not in second.stdout and "capture" not in second.stderr
    assert len(list((folder / "cache").glob("features-*"))) == len(list((folder / "cache").glob("answers-*"))) == 1
    assert "resumed from" in second.stdout and "step 1/12" not in second.stdout
    assert seconds_again < seconds
