"""An interrupted run equals an uninterrupted one bit for bit, and only complete checkpoints of the same run are taken.
References: the run that was not interrupted, the learning rates written out by hand, and plain files planted on disk.
"""

import json
import math
import os
import shutil
import signal

import pytest
import run_helpers as helpers
import torch
from safetensors.torch import load_file

from data_prep.store import Store
from train import checkpoint, trainer
from train.config import OptimConfig, Schedule
from train.trainer import fit, learning_rate, read_ahead


class Killed(Exception):
    pass


def settings(folder, *overrides):
    common = ["cache.dtype=float32", "engine.dtype=float32", "data.max_new_tokens=48", "optim.steps=40", "log.every=1"]
    return helpers.config(folder, *common, "save_every=20", "evaluate.every=20", "keep=3", *overrides)


def train(config, killed_in_step=None, monkeypatch=None, training=None, store=None):
    """One process's life: from what lies in the run's folder to the end, or to the step in which it is killed."""
    _, prepared_store, prepared = helpers.tiny_run()
    calls = []

    def step(*arguments):
        calls.append(arguments)
        if len(calls) == killed_in_step:
            raise Killed
        return real(*arguments)

    real = trainer.train_step
    if killed_in_step:
        monkeypatch.setattr(trainer, "train_step", step)
    drafter = helpers.new_drafter(seed=config.seed)
    training = training or prepared.provenance(prepared_store)
    try:
        fit(config, store or prepared_store, drafter, helpers.ends(prepared.drafter), torch.device("cpu"), training)
    finally:
        monkeypatch and monkeypatch.setattr(trainer, "train_step", real)
    return drafter


def losses(config):
    """step -> losses logged for it, in order; a step that was done again stands twice."""
    found = {}
    for line in (config.folder / "log.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "loss" in values:
            found.setdefault(values["step"], []).append(values["loss"])
    return found


@pytest.fixture(scope="module")
def whole():
    """Forty steps without interruption."""
    config = settings(helpers.folder())
    train(config)
    return config


def test_killed_and_resumed_equals_uninterrupted(whole, tmp_path, monkeypatch):
    config = settings(tmp_path)
    with pytest.raises(Killed):
        train(config, killed_in_step=28, monkeypatch=monkeypatch)
    assert [path.name for path in checkpoint.complete(config.folder / "checkpoints")] == ["step-000020"]
    train(config)
    files = [run.folder / "checkpoints/step-000040/state.safetensors" for run in (whole, config)]
    expected, found = map(load_file, files)
    assert found.keys() == expected.keys() and sum("/exp_avg" in name for name in found) == len(found) * 2 // 3
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    once, again = losses(whole), losses(config)
    assert list(once) == list(range(1, 41)) and sorted(again) == sorted(once)
    assert {step for step, logged in again.items() if len(logged) == 2} == set(range(21, 28))
    assert all(loss == once[step][0] for step, logged in again.items() for loss in logged)


def test_a_finished_run_does_nothing_more(whole, monkeypatch):
    before = (whole.folder / "log.jsonl").read_text()
    monkeypatch.setattr(trainer, "train_step", lambda *_: pytest.fail("trained a finished run"))
    train(whole)
    assert (whole.folder / "log.jsonl").read_text() == before


def test_resume_takes_the_newest_complete_checkpoint(whole, tmp_path, monkeypatch, capsys):
    config = settings(tmp_path)
    folder = config.folder / "checkpoints"
    shutil.copytree(whole.folder / "checkpoints/step-000020", folder / "step-000020")
    for name in ("step-000038", "step-000040.part"):  # killed while it wrote, before and after its trainer.json
        shutil.copytree(whole.folder / "checkpoints/step-000040", folder / name)
    (folder / "step-000038/trainer.json").unlink()
    (folder / "step-000038/state.safetensors").write_bytes(b"half")
    assert checkpoint.latest(folder).name == "step-000020"
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        checkpoint.load(folder / "step-000038")
    train(config)
    assert "resumed from " + str(folder / "step-000020") in capsys.readouterr().out
    expected, found = (load_file(c.folder / "checkpoints/step-000040/state.safetensors") for c in (whole, config))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "override, word",
    [
        ("model.block_size=6", "model"),
        ("model.mask_token_id=300", "model"),
        ("data.heldout=0.3", "data"),
        ("optim.objective=dpace", "optim"),
        ("seed=1", "seed"),
        ("batch.rows_per_step=4", "batch"),
        ("batch.anchors_per_row=8", "batch"),
    ],
)
def test_another_runs_checkpoint_is_refused(whole, override, word):
    other = settings(whole.runs.parent, override)
    assert other.folder == whole.folder
    with pytest.raises(ValueError) as error:
        train(other)
    assert "\n" not in str(error.value) and str(error.value).startswith(word) and "step-000040" in str(error.value)


def test_budgets_and_logging_may_change_on_resume(whole, tmp_path):
    config = settings(tmp_path, "batch.bin_tokens=300", "log.every=7", "batch.chunk_slots=100", "evaluate.every=11")
    shutil.copytree(whole.folder / "checkpoints/step-000020", config.folder / "checkpoints/step-000020")
    train(config)
    expected, found = (load_file(c.folder / "checkpoints/step-000040/state.safetensors") for c in (whole, config))
    weights = {name: tensor for name, tensor in expected.items() if "/" not in name}
    assert helpers.relative(found, weights) < 1e-4


def test_another_content_of_the_data_is_refused(whole, tmp_path):
    """The same path and settings, but other rows behind them: the order of rows would silently be another one."""
    _, store, prepared = helpers.tiny_run()
    path = tmp_path / "store"
    shutil.copytree(store.folder, path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["recipe"]["rows"] = "0123456789ab"
    (path / "manifest.json").write_text(json.dumps(manifest))
    other = Store(path)
    with pytest.raises(ValueError, match="checkpoint"):
        train(whole, store=other, training=prepared.provenance(other))


def plant(folder, step, tau):
    path = folder / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "trainer.json").write_text(json.dumps({"step": step, "tau": tau}))
    return path


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    taus = {10: 1.2, 20: 1.9, 30: 1.4, 40: 1.5, 50: 1.3}
    for step, tau in taus.items():
        plant(tmp_path, step, tau)
    (tmp_path / "step-000060").mkdir()  # half-written: neither counted nor touched
    assert checkpoint.best(tmp_path).name == "step-000020" and checkpoint.latest(tmp_path).name == "step-000050"
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(path.name for path in checkpoint.complete(tmp_path)) == ["step-000020", "step-000040", "step-000050"]
    checkpoint.prune(tmp_path, keep=1)
    assert sorted(path.name for path in checkpoint.complete(tmp_path)) == ["step-000020", "step-000050"]
    plant(tmp_path, 70, 1.9)  # of equals the newest is the best
    assert checkpoint.best(tmp_path).name == "step-000070"


def test_keep_prunes_during_a_run(tmp_path, monkeypatch):
    taus = iter([2.0, 1.0, 1.1, 1.2, 1.3, 1.4])
    measures = lambda *_: {"tau": next(taus), "tau_anchor": 1.0, "slot_acceptance": [0.0]}  # noqa: E731
    monkeypatch.setattr(trainer, "heldout_measures", measures)
    config = settings(tmp_path, "optim.steps=12", "save_every=2", "keep=2", "evaluate.every=100")
    train(config)
    names = [path.name for path in checkpoint.complete(config.folder / "checkpoints")]
    assert names == ["step-000002", "step-000010", "step-000012"]


def test_a_checkpoint_holds_fp32_and_survives_reading(whole):
    path = whole.folder / "checkpoints/step-000040"
    state, saved = checkpoint.load(path)
    assert saved["step"] == 40 and {t.dtype for t in state.values()} == {torch.float32}
    drafter = checkpoint.load_drafter(path)
    assert drafter.state_dict().keys() == {name for name in state if "/" not in name}
    assert all(torch.equal(value, state[name]) for name, value in drafter.state_dict().items())


def test_logged_learning_rates_are_those_of_the_schedule(whole):
    """lr 2e-3, 40 steps, 4 % of them warm-up: 2 steps up, then half a cosine over 38."""
    lines = [json.loads(line) for line in (whole.folder / "log.jsonl").read_text().splitlines()]
    rates = [values["lr"] for values in lines if "loss" in values]
    expected = [1e-3, 2e-3] + [1e-3 * (1 + math.cos(math.pi * i / 38)) for i in range(38)]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_learning_rate_golden_values():
    optim = OptimConfig(lr=1e-3, warmup=0.1)
    rates = [learning_rate(step, 100, optim) for step in range(100)]
    golden = {0: 1e-4, 4: 5e-4, 9: 1e-3, 10: 1e-3, 55: 5e-4, 40: 7.5e-4, 70: 2.5e-4}
    assert all(math.isclose(rates[step], value, rel_tol=1e-12) for step, value in golden.items())
    assert math.isclose(rates[99], 0.5e-3 * (1 - math.cos(math.pi / 90)), rel_tol=1e-9) and 0 < rates[99] < 1e-6
    assert max(rates) == rates[10] and rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(0, 100, OptimConfig(lr=1e-3, warmup=0.0)) == 1e-3
    assert learning_rate(0, 1, OptimConfig(lr=1e-3)) == 1e-3


def test_other_schedules_golden_values():
    wsd = OptimConfig(lr=1e-3, warmup=0.1, schedule=Schedule.wsd, decay=0.25)
    golden = {0: 1e-4, 9: 1e-3, 10: 1e-3, 74: 1e-3, 75: 1e-3, 80: 8e-4, 99: 4e-5}  # 25 steps down to zero
    assert all(math.isclose(learning_rate(step, 100, wsd), value) for step, value in golden.items())
    constant = OptimConfig(lr=1e-3, warmup=0.1, schedule=Schedule.constant)
    assert [learning_rate(step, 100, constant) for step in (4, 10, 99)] == [5e-4, 1e-3, 1e-3]


def test_a_finished_run_is_extended_with_the_longer_runs_rates(whole, tmp_path):
    config = settings(tmp_path, "optim.steps=44", "optim.schedule=constant")
    shutil.copytree(whole.folder / "checkpoints/step-000040", config.folder / "checkpoints/step-000040")
    train(config)
    assert list(losses(config)) == [41, 42, 43, 44]
    assert checkpoint.latest(config.folder / "checkpoints").name == "step-000044"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_at_the_end_of_the_step_and_the_run_goes_on(whole, tmp_path, monkeypatch, number):
    config, real = settings(tmp_path), trainer.train_step
    calls = []

    def step(*arguments):
        calls.append(1)
        if len(calls) == 27:
            os.kill(os.getpid(), number)
        return real(*arguments)

    monkeypatch.setattr(trainer, "train_step", step)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit, match="step 27 of 40"):
        train(config)
    assert signal.getsignal(number) == before
    assert checkpoint.latest(config.folder / "checkpoints").name == "step-000027"
    monkeypatch.setattr(trainer, "train_step", real)
    train(config)
    expected, found = (load_file(c.folder / "checkpoints/step-000040/state.safetensors") for c in (whole, config))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert checkpoint.best(config.folder / "checkpoints").name != "step-000027", "it was not measured"


def poison(monkeypatch, steps):
    """The loss of these calls of the step is NaN, from the features on."""
    real, calls = trainer.train_step, []

    def step(engine, now, *rest):
        calls.append(1)
        if len(calls) in steps:
            now.batches[0].features_TF = now.batches[0].features_TF * float("nan")
        return real(engine, now, *rest)

    monkeypatch.setattr(trainer, "train_step", step)


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path, monkeypatch):
    """After steps 1 and 2 of three, of which the second is NaN, everything is as after the first."""
    one, skipped = settings(tmp_path / "one", "optim.steps=1"), settings(tmp_path / "two", "optim.steps=2")
    for config in (one, skipped):
        config.optim.schedule, config.optim.warmup = Schedule.constant, 0.0
    train(one)
    poison(monkeypatch, {2})
    train(skipped)
    files = [c.folder / f"checkpoints/step-{c.optim.steps:06d}/state.safetensors" for c in (one, skipped)]
    expected, found = map(load_file, files)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert json.loads((files[1].parent / "trainer.json").read_text())["skipped"] == 1


def test_too_many_such_steps_in_a_row_end_the_run(tmp_path, monkeypatch):
    config = settings(tmp_path, "optim.max_skips=3")
    poison(monkeypatch, {5, 6, 8, 9, 10, 11})
    with pytest.raises(ValueError, match=r"^optim\.max_skips: 3 steps in a row before step 10 .* not finite"):
        train(config)
    assert not checkpoint.complete(config.folder / "checkpoints")


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_reading_ahead_changes_neither_steps_nor_their_order(depth):
    class Numbers:
        def __getitem__(self, number):
            return number * 10

    assert [now for now, _ in read_ahead(Numbers(), 3, 9, depth)] == [30, 40, 50, 60, 70, 80]
