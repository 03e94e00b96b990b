"""Bad input ends in one line that names the field and what to do, exit code 1, no traceback; every target's config
composes and has the published geometry. Reference: the message's content, and z-lab's released config.json files.
"""

import json
import re

import pytest
import run_helpers as helpers

from data_prep.plan import check
from data_prep.prepare import Preparation
from data_prep.prompts import read_rows
from data_prep.run import PrepConfig, load_config
from data_prep.store import Store
from dflash.config import Kind
from dflash.objective import Objective
from train.config import Anchors, RunConfig
from train.data import Steps, split_rows

MODELS = sorted(path.stem for path in (helpers.ROOT / "configs/model").glob("*.yaml"))


def refused(*overrides):
    """The one line with which the command line is refused."""
    with pytest.raises(ValueError) as error:
        load_config("train", RunConfig, list(overrides))
    message = str(error.value)
    assert message and "\n" not in message
    return message


def prepared(tmp_path, *overrides):
    config = helpers.config(tmp_path, *overrides)
    return Preparation(config.model, config.data, config.cache)


@pytest.mark.parametrize("overrides", [(), ("+model=unknown",), ("model=qwen3_8b",), ("optim.lr=1",)])
def test_a_missing_or_unknown_model_lists_all(overrides):
    message = refused(*overrides)
    assert "+model=NAME" in message and all(name in message for name in MODELS), message


@pytest.mark.parametrize(
    "override, words",
    [
        ("optim.lrr=1", ["optim.lrr", "did you mean lr"]),
        ("optim.zzz=1", ["optim.zzz", "warmup", "weight_decay"]),
        ("optimizer.lr=1", ["optimizer", "optim"]),
        ("+optim.lrr=1", ["optim.lrr", "lr"]),
        ("optim.lr=fast", ["optim.lr", "fast"]),
        ("optim.lr=-1", ["optim.lr", "-1"]),
        ("optim.epochs=0", ["optim.epochs", "0"]),
        ("model.block_size=1", ["model.block_size", "1", "2 or more"]),
        ("model.taps=[3,3]", ["model.taps", "[3, 3]"]),
        ("model.taps=[5,3]", ["model.taps", "[5, 3]", "rising"]),
        ("model.taps=[1,5]", ["model.taps", "[1, 5]", "0..4"]),  # the tiny target has six layers; its last is refused
        ("model.taps=[-1,2]", ["model.taps", "[-1, 2]"]),
        ("model.mask_token_id=512", ["model.mask_token_id", "512"]),
        ("model.mask_token_id=-1", ["model.mask_token_id", "-1"]),
        ("model.num_layers=0", ["model.num_layers", "0"]),
        ("model.gamma=0", ["model.gamma", "0"]),
        ("engine.kind=foo", ["engine.kind", "foo", "auto", "torch", "deepspeed"]),
        ("engine.zero_stage=3", ["engine.zero_stage", "3", "0, 1 or 2"]),
        ("engine.dtype=float16", ["engine.dtype", "float16", "bfloat16"]),
        ("stage=trian", ["stage", "trian", "train", "evaluate", "export"]),
        ("cache.mode=ofline", ["cache.mode", "ofline", "offline", "online"]),
        ("cache.dtype=float8", ["cache.dtype", "float8", "bfloat16"]),
        ("data.dtype=half16", ["data.dtype", "half16", "float32"]),
        ("data.heldout=1.5", ["data.heldout", "1.5"]),
        ("data.max_length=1", ["data.max_length", "1"]),
        ("data.path=", ["data.path"]),
        ("batch.anchors_per_row=100", ["batch.bin_anchors", "64", "100"]),
        ("batch.rows_per_step=0", ["batch.rows_per_step", "0"]),
        ("launch.ranks=0", ["launch.ranks", "0"]),
        ("keep=0", ["keep", "0"]),
        ("save_every=0", ["save_every", "0"]),
        ("log.every=0", ["log.every", "0"]),
        ("evaluate.every=0", ["evaluate.every", "0"]),
        ("optim.lr", ["optim.lr"]),
        ("evaluate.servers={eagle3: http://h}", ["evaluate.servers.eagle3", "put a + before"]),
    ],
)
def test_a_bad_value_is_refused_by_name(override, words):
    message = refused("+model=tiny", override)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "override, words",
    [
        ("model.taps=[1,5]", ["model.taps", "0..4"]),
        ("model.mask_token_id=600", ["model.mask_token_id", "512"]),
        ("model.hidden_size=64", ["model.hidden_size", "128", "64"]),
        (f"model.mask_token_id={helpers.END}", ["model.mask_token_id", str(helpers.END), "stop"]),
        (f"model.mask_token_id={helpers.BOS}", ["model.mask_token_id", "bos"]),
        (f"model.mask_token_id={helpers.PAD}", ["model.mask_token_id", "pad"]),
    ],
)
def test_what_only_the_targets_config_tells_is_refused_before_weights(tmp_path, override, words, monkeypatch):
    monkeypatch.setattr(Preparation, "load_target", lambda *_: pytest.fail("loaded the target"))
    with pytest.raises(ValueError) as error:
        prepared(tmp_path, "model.target_layers=null", "model.vocab_size=null", override)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


def test_a_mask_token_that_stands_in_the_data_is_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    answer = {"role": "assistant", "content": "yes"}
    rows = [{"id": i, "messages": [{"role": "user", "content": f"hi {i}"}, answer]} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prep = prepared(tmp_path, f"data.path={path}", "data.answers=data", f"model.mask_token_id={ord('y')}")
    with pytest.raises(ValueError, match=r"^model\.mask_token_id: 121 stands in the data"):
        prep.encode()


USER = '"messages": [{"role": "user", "content": "hi"}]'


@pytest.mark.parametrize(
    "lines, words",
    [
        (None, ["data.path", "not found"]),
        ("", ["data.path", "no rows"]),
        ('{"id": 1, "text": "hi"}', ["row 1", "messages", "text"]),
        (f"{{{USER}}}\nnot json", ["row 2", "not JSON"]),
        (f"{{{USER}}}\n[1, 2]", ["row 2"]),
        (2 * f'{{"id": "x", {USER}}}\n', ["row 2", "'x'", "twice"]),
        ('{"messages": []}', ["row 1", "messages"]),
        ('{"messages": ["hi"]}', ["row 1"]),
        ('{"messages": [{"role": "user", "content": null}]}', ["row 1", "text"]),
        ('{"messages": [{"role": "wizard", "content": "hi"}]}', ["row 1", "wizard", "assistant"]),
        ('{"messages": [{"role": "assistant", "content": "hi"}]}', ["no rows", "no user message", "1"]),
    ],
)
def test_a_bad_row_is_refused_by_number(tmp_path, lines, words):
    path = tmp_path / "chats.jsonl"
    if lines is not None:
        path.write_text(lines)
    with pytest.raises(ValueError) as error:
        list(read_rows(helpers.config(tmp_path, f"data.path={path}").data))
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


def test_data_without_answers_is_refused_when_answers_are_expected(tmp_path):
    with pytest.raises(ValueError, match=r"row py-001: no answer found.*data\.answers=target"):
        prepared(tmp_path, "data.answers=data").encode()


def test_too_short_a_max_length_prints_a_line_about_cuts(tmp_path, capsys):
    rows = [json.loads(line) for line in helpers.PROMPTS.read_text().splitlines()]
    path = tmp_path / "answered.jsonl"
    for row in rows:
        row["messages"].append({"role": "assistant", "content": "x" * 40})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = prepared(tmp_path, f"data.path={path}", "data.answers=data", "data.max_length=120").encode()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data.max_length")]
    lengths = [len(row["messages"][0]["content"].encode()) + 40 + 4 for row in rows]
    cut = sum(length > 120 for length in lengths)
    assert cut > 0 and f"{cut} rows were cut" in line and f"{max(lengths)} tokens" in line and "120" in line
    assert store.manifest["report"]["rows cut at data.max_length"] == cut


def test_a_bin_smaller_than_the_longest_row_is_refused(tmp_path):
    store = helpers.make_store(tmp_path / "store", [[0] * 5 + [1] * 20, [0] * 9 + [1] * 51], heldout=[0])
    config = helpers.config(tmp_path, "batch.bin_tokens=59")
    with pytest.raises(ValueError, match=r"^batch\.bin_tokens: found 59, expected at least 60"):
        Steps(Store(store.folder), split_rows(store, 0.1)[0], config.model, config.batch, seed=0)


@pytest.mark.parametrize("flag", ["--local_rank=0", "--local-rank=1"])
def test_the_launchers_local_rank_is_tolerated(flag):
    assert load_config("train", RunConfig, [flag, "+model=tiny"]) == load_config("train", RunConfig, ["+model=tiny"])


def test_overrides_reach_the_typed_config():
    config = load_config("train", RunConfig, ["+model=qwen3_8b", "optim.lr=3e-4", "data.path=chats.jsonl", "seed=4"])
    assert isinstance(config, RunConfig) and config.optim.lr == 3e-4 and config.seed == 4
    assert config.data.path == "chats.jsonl" and config.model.gamma == 7.0 and config.batch.rows_per_step == 64


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("entry, schema", [("train", RunConfig), ("data_prep", PrepConfig)])
def test_every_models_file_composes(name, entry, schema):
    config = load_config(entry, schema, [f"+model={name}"])
    assert isinstance(config, schema) and config.model.target and config.model.taps


ABLATIONS = {  # file of configs/ablation: what it changes
    "plain": {}, "fused": {"drafter.kind": Kind.fused}, "tokens": {"drafter.kind": Kind.tokens},
    "fixed_blocks": {"batch.anchors": Anchors.fixed}, "depth_1": {"model.num_layers": 1},
    "depth_5": {"model.num_layers": 5}, "no_decay": {"model.gamma": 1e9}, "dpace": {"optim.objective": Objective.dpace},
}  # fmt: skip


def test_an_ablation_changes_one_thing():
    """Against the demo with the paper's objective; all files are here."""
    assert sorted(ABLATIONS) == sorted(path.stem for path in (helpers.ROOT / "configs/ablation").glob("*.yaml"))
    for name, changes in ABLATIONS.items():
        config = load_config("train", RunConfig, ["+model=demo", f"+ablation={name}", "stage=train"])
        plain = load_config("train", RunConfig, ["+model=demo", "optim.objective=decay", "stage=train"])
        for key, value in changes.items():
            group, field = key.split(".")
            assert getattr(getattr(config, group), field) == value != getattr(getattr(plain, group), field)
            setattr(getattr(plain, group), field, value)
        assert config == plain
    assert "ablation/fusd" in refused("+model=demo", "+ablation=fusd")


def test_baselines_are_trained_and_no_more():
    assert load_config("train", RunConfig, ["+model=tiny", "drafter.kind=mtp", "stage=train"]).drafter.kind == Kind.mtp
    assert "eagle3 with stage=all, expected dflash" in refused("+model=tiny", "drafter.kind=eagle3")
    for unfit in ("engine.checkpoint=true", "model.init_from=somewhere", "cache.codec=lowrank"):
        found = refused("+model=tiny", "stage=train", "drafter.kind=mtp", unfit)
        assert f"mtp with {unfit.removesuffix('=somewhere')}, expected dflash" in found


def test_an_unknown_key_in_a_file_is_named(tmp_path):
    saved = {"config": {"model": {"target": "tiny", "taps": [1], "hidden_size": 8, "blok_size": 8}}}
    (tmp_path / "trainer.json").write_text(json.dumps(saved))
    assert "Key 'blok_size' not in 'ModelConfig'" in refused(f"path={tmp_path}", "stage=verify")


@pytest.mark.parametrize(
    "name, layers, taps, block, mask, depth",
    [  # z-lab's released checkpoints and the paper's settings (arXiv 2602.06036)
        ("qwen3_8b", 36, [1, 9, 17, 25, 33], 16, 151669, 5),
        ("qwen3_4b", 36, [1, 9, 17, 25, 33], 16, 151669, 5),
        ("qwen3_coder_30b", 48, [1, 12, 23, 34, 45], 16, 151669, 8),
        ("llama31_8b", 32, [1, 8, 15, 22, 29], 10, 128002, 5),
    ],
)
def test_published_geometry(name, layers, taps, block, mask, depth):
    model = load_config("train", RunConfig, [f"+model={name}"]).model
    assert (model.target_layers, model.taps, model.block_size) == (layers, taps, block)
    assert (model.mask_token_id, model.num_layers) == (mask, depth)
    model.taps, model.num_taps = [], len(taps)
    assert model.resolve_taps(layers) == taps  # z-lab's rule gives the same


def test_check_says_what_it_could_not_check(tmp_path, capsys):
    config = load_config("train", RunConfig, ["+model=qwen3_8b", f"cache.dir={tmp_path}"])
    check(config.model, config.data, config.cache)
    out = capsys.readouterr().out
    assert re.search(r"not checked: .*Qwen/Qwen3-8B", out) and re.search(r"not checked: .*ultrachat_200k", out)


def test_check_of_a_local_target_checks_its_template_and_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Preparation, "load_target", lambda *_: pytest.fail("loaded the target"))
    config = helpers.config(tmp_path)
    check(config.model, config.data, config.cache)
    out = capsys.readouterr().out
    assert "not checked" not in out and "48 rows" in out and "template" in out and "[257]" in out


@pytest.mark.parametrize(
    "script, arguments, words",
    [
        ("train/run.py", ["optim.lr=1"], ["+model=NAME", *MODELS]),
        ("train/run.py", ["+model=tiny", "data.path=nowhere.jsonl"], ["data.path", "nowhere.jsonl", "not found"]),
        ("data_prep/run.py", ["+model=tiny", "stage=encod"], ["stage", "encode"]),
    ],
)
def test_the_command_line_ends_in_one_line_and_code_one(tmp_path, script, arguments, words):
    done = helpers.run(helpers.ROOT / script, *arguments, env=helpers.environment(TMPDIR=str(tmp_path)))
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and all(word in line for word in words), line


def test_the_command_line_checks_offline(tmp_path):
    done = helpers.run("train/run.py", "+model=qwen3_8b", "check=true", f"cache.dir={tmp_path}", "--local_rank=0")
    assert done.returncode == 0 and "not checked" in done.stdout and "Traceback" not in done.stderr, done.stderr
