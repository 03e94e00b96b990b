"""Both sides read the same conversation and draw alike, what was asked is on record, and two evaluations compare prompt
by prompt. References: conversations written out in the tiny target's ids, sums done by hand, numbers of a seed.
"""

import copy
import hashlib
import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import run_helpers as helpers
import torch
from run_helpers import ASSISTANT, BOS, END, USER

from data_prep.config import DataConfig
from data_prep.prepare import Preparation
from dflash.generate import Generation
from train import evaluate as module
from train.compare import compare, main, table
from train.config import EvaluateConfig
from train.evaluate import (
    Prompt,
    evaluate,
    evaluation_prompts,
    looks_random,
    measure_speed,
    next_turn,
    render_turn,
)
from train.report import flagged, unlike_training

DATA, STOPS = DataConfig(path="x"), {END}


def ids(text):
    return list(text.encode())


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture
def answers(monkeypatch):
    """Generations that are told here: the target alone says one thing, the drafter's side another. Notes the calls."""
    calls = []

    def generate(target, input_ids, max_new_tokens, drafter=None, **options):
        calls.append((input_ids[0].tolist(), drafter, options))
        said = ids("alone") if drafter is None else ids("drafted")
        return Generation([*said, END], [3, 3] if drafter else [1] * 5, [], 1.0, 1.0, 2.0)

    monkeypatch.setattr(module, "generate", generate)
    return calls


def test_the_next_turn_holds_what_the_target_alone_said(answers):
    tokenizer = helpers.tokenizer()
    row = {"id": "talk", "category": "chat", "turns": [[{"role": "system", "content": "S"}, user("A")], [user("B")]]}
    prompts = [render_turn(tokenizer, DATA, r) for r in (row, {"id": "other", "turns": [[user("C")]]})]
    follow = partial(next_turn, tokenizer, DATA, STOPS)
    found = measure_speed(helpers.target(), "drafter", prompts, STOPS, EvaluateConfig(), follow)
    first = [BOS, *ids("S"), USER, *ids("A"), ASSISTANT]
    second = [*first, *ids("alone"), END, USER, *ids("B"), ASSISTANT]
    third = [BOS, USER, *ids("C"), ASSISTANT]
    assert [prompt.ids for prompt in prompts] == [first, second, third]
    assert [call[0] for call in answers] == [first, first, second, second, third, third]
    assert [(r.id, r.turn, r.category) for r in found] == [("talk", 1, "chat"), ("talk", 2, "chat"), ("other", 1, None)]
    assert [r.prompt_tokens for r in found] == [len(first), len(second), len(third)]
    assert found[1].prompt_sha256 == hashlib.sha256(json.dumps(second).encode()).hexdigest()


def test_ready_ids_are_asked_as_they_are(answers):
    row = {"id": "ids", "turns": [[7, 8, 9]]}
    assert render_turn(helpers.tokenizer(), DATA, row) == Prompt("ids", [7, 8, 9], 1, [], row)
    assert next_turn(helpers.tokenizer(), DATA, STOPS, Prompt("ids", [7, 8, 9], 1, [], row), [1]) is None


def test_both_sides_draw_from_one_seed_that_no_order_changes(answers):
    def seeds(names, seed):
        config = EvaluateConfig(temperature=0.8, top_p=0.9, top_k=5, seed=seed, sampled_proposals=True, block_size=4)
        answers.clear()
        measure_speed(helpers.target(), "drafter", [(name, [7, 8]) for name in names], STOPS, config)
        sizes = {None: None, "drafter": 4}
        for _, drafter, options in answers:
            assert (options["temperature"], options["top_p"], options["top_k"]) == (0.8, 0.9, 5)
            assert options["sampled_proposals"] and options["block_size"] == sizes[drafter]
        pairs = zip(names, answers[::2], answers[1::2])
        assert {one[1] for one in answers[:2]} == {None, "drafter"}
        found = {name: [call[2]["generator"].initial_seed() for call in both] for name, *both in pairs}
        assert all(one == other for one, other in found.values())
        return found

    first = seeds(["a", "b"], 0)
    assert first == seeds(["b", "a"], 0) and first["a"] != first["b"]
    assert first["a"] != seeds(["a"], 1)["a"]


def test_sampled_answers_repeat(monkeypatch):
    """Through the real loop: one seed, one answer; another seed, another."""
    target, drafter = helpers.target(), helpers.trained_drafter()
    said = []
    real = module.generate
    monkeypatch.setattr(module, "generate", lambda *a, **k: said.append(real(*a, **k)) or said[-1])
    for seed in (0, 0, 1):
        config = EvaluateConfig(temperature=1.0, seed=seed, max_new_tokens=24)
        measure_speed(target, drafter, [("a", [BOS, USER, *ids("def f(x):"), ASSISTANT])], STOPS, config)
    alone, drafted = [[g.tokens for g in said[side::2]] for side in (0, 1)]
    assert alone[0] == alone[1] != alone[2] and drafted[0] == drafted[1] != drafted[2]


def test_random_ids_do_not_look_like_text():
    """With 1/10 for each token and 100 in the vocabulary, perplexity is 10, the bound itself; then a real target."""

    def guessing(share):
        def forward(input_ids):
            logits = torch.full((1, input_ids.shape[1], 100), math.log((1 - share) / 99))
            logits.scatter_(2, input_ids.roll(-1, dims=1)[..., None], math.log(share))
            return SimpleNamespace(logits=logits)

        return forward

    some = torch.tensor([[3, 1, 4, 1, 5]])
    assert not looks_random(guessing(0.11), some) and looks_random(guessing(0.09), some)
    assert not looks_random(guessing(0.09), some[:, :1])
    prompts = [json.loads(line)["messages"] for line in helpers.PROMPTS.read_text().splitlines()]
    texts = [render_turn(helpers.tokenizer(), DATA, {"id": "", "turns": [messages]}).ids for messages in prompts]
    assert not any(looks_random(helpers.target(), torch.tensor([text])) for text in texts)
    drawn = torch.randint(0, 256, (20, 40), generator=torch.Generator().manual_seed(0)).tolist()
    ready = [torch.tensor([[BOS, USER, *row, ASSISTANT]]) for row in drawn]
    assert all(looks_random(helpers.target(), row) for row in ready)


def test_an_evaluation_records_what_it_asked():
    """Through real models, three prompts of two conversations: counts, hash, identity on the turns that were asked."""
    tokenizer, drafter = helpers.tokenizer(), helpers.trained_drafter()
    rows = [
        {"id": "two", "turns": [[user("def f(x):")], [user("import")]]},
        {"id": "one", "turns": [[user("class A:")]]},
    ]
    prompts = [render_turn(tokenizer, DATA, row) for row in rows]
    asked, follow = [], partial(next_turn, tokenizer, DATA, STOPS)

    def noting(prompt, answer):
        asked.append(prompt.ids)
        return follow(prompt, answer)

    load = lambda dtype: helpers.target(torch.float32)  # noqa: E731
    config = EvaluateConfig(max_new_tokens=24, identity_prompts=3, identity_tokens=16)
    report = evaluate(load, lambda dtype: drafter, {"own": prompts}, STOPS, config, noting)["own"]
    assert (report["prompts"], report["turns"], len(report["per_prompt"])) == (2, 3, 3) and len(asked) == 3
    assert report["prompts_sha256"] == hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    assert [(r["id"], r["turn"]) for r in report["per_prompt"]] == [("two", 1), ("two", 2), ("one", 1)]
    assert report["identity"]["identical"] + report["identity"]["near_ties"] == 3
    assert sum(bucket["verify_steps"] for bucket in report["tau_by_context"]) == report["verify_steps"]
    assert len(prompts) == 2, "the caller's prompts stay as they are"


def test_flags_and_settings_unlike_training_are_lines():
    flags = {"random_looking": 1, "looping": 2, "without_verification": 3, "no_draft_accepted": True}
    report = {"turns": 5, "verify_steps": 9, "flags": flags}
    lines = flagged({"a": report, "b": report | {"flags": dict.fromkeys(flags, 0)}})
    assert [line.split(";")[0] for line in lines] == [
        "a: 1 of 5 prompts look like random ids, not text",
        "a: 2 of 5 prompts got an answer that loops",
        "a: 3 of 5 prompts ended before anything was drafted",
        "a: zero drafts accepted in 9 verifications",
    ]
    config = SimpleNamespace(data=DataConfig(path="x", thinking=False), evaluate=EvaluateConfig(temperature=0.6))
    trained = {"thinking": None, "temperature": 0.0, "answers": "target"}
    thinking, heat = unlike_training(config, trained)
    assert "found {'enable_thinking': False}, the training had {}" in thinking
    assert heat.startswith("evaluate.temperature: found 0.6, the training had 0.0;")
    assert unlike_training(config, {"thinking": False, "temperature": 0.6, "answers": "target"}) == []
    assert unlike_training(config, {"thinking": False, "temperature": 0.0, "answers": "data"}) == []


def evaluation(accepted, draft_seconds, **settings):
    """Of conversations a, b ...: what each step emitted, and seconds; each answer has 10 tokens, 4 s alone."""
    per_prompt = [
        {"id": name, "turn": 1, "alone_tokens": 10, "alone_seconds": 4.0, "draft_tokens": 10, "loops": False,
         "draft_seconds": seconds, "accepted": taken, "time_shares": {}, "category": None, "prompt_tokens": 3,
         "prompt_sha256": name * 3, "random": False}
        for name, taken, seconds in zip("abcd", accepted, draft_seconds)
    ]  # fmt: skip
    known = {"template_arguments": {}, "thinking": None, "sampling": {"temperature": 0}, "max_new_tokens": 9,
             "stop_ids": [1], "block_size": 8, "sampled_proposals": False}  # fmt: skip
    return {"target": "t", "device": "d", "sets": {"s": {"per_prompt": per_prompt, "settings": known | settings}}}


def test_identical_evaluations_differ_by_nothing():
    one = evaluation([[1, 2], [4, 4], [3]], [2.0, 3.0, 4.0])
    (found,) = compare(one, one).values()
    assert found["tau"] == [2.8, 2.8] and found["tau_difference"] == 0 and found["tau_interval"] == [0, 0]
    assert found["ratio_difference"] == 0 and found["ratio_interval"] == [0, 0]
    assert (found["higher"], found["equal"], found["lower"]) == (0, 3, 0) and found["prompts"] == 3


def test_a_comparison_by_hand():
    """tau 6/4 against 12/4; 20 tokens in 8 s alone, in 5 s and 4 s with a drafter: ratios 8/5 and 8/4. Of two
    conversations, a quarter of the draws is the one twice: 95 % lie between the differences of each."""
    one, other = evaluation([[1, 1], [2, 2]], [4.0, 1.0]), evaluation([[2, 2], [4, 4]], [2.0, 2.0], block_size=16)
    (found,) = compare(one, other).values()
    assert found["tau"] == [1.5, 3.0] and found["tau_difference"] == 1.5
    assert found["tau_interval"] == pytest.approx([1, 2])  # 2 - 1 and 4 - 2
    assert found["ratio"] == pytest.approx([1.6, 2.0]) and found["ratio_difference"] == pytest.approx(0.4)
    assert found["ratio_interval"] == pytest.approx([2 - 4, 2 - 1])
    assert (found["higher"], found["equal"], found["lower"]) == (2, 0, 0)
    (back,) = compare(other, one).values()
    assert back["tau_difference"] == -1.5 and back["lower"] == 2
    text = table({"s": found})
    assert " 1.50  3.00 +1.500 (+1.000 to +2.000)" in text and "2/0/0" in text


def test_a_paired_interval_is_narrower_than_what_prompts_differ_by():
    """Every conversation gains exactly 1, though tau goes from 1 to 7 among them."""
    one = evaluation([[1], [3], [5], [7]], [1.0] * 4)
    other = evaluation([[2], [4], [6], [8]], [1.0] * 4)
    assert compare(one, other)["s"]["tau_interval"] == [1, 1]


def test_only_what_both_have_is_compared():
    one, other = evaluation([[1], [3]], [1.0, 1.0]), evaluation([[1], [3], [9]], [1.0] * 3)
    found = compare(one, other)["s"]
    assert (found["prompts"], found["left_out"], found["tau_difference"]) == (2, 1, 0)
    for side, text in ((one, "said"), (other, "said otherwise")):  # a second turn after answers that differ in bf16
        later = copy.deepcopy(side["sets"]["s"]["per_prompt"][0]) | {"turn": 2, "prompt_sha256": text, "accepted": [5]}
        side["sets"]["s"]["per_prompt"].append(later)
    found = compare(one, other)["s"]
    assert (found["prompts"], found["left_out"], found["tau"]) == (2, 3, [2, 2])
    assert "3 turns without their like" in table({"s": found})


UNLIKE = {
    "target": "target: found t and u",
    "device": "device: found d and u",
    "max_new_tokens": "s: max_new_tokens: found 9 and 8",
    "thinking": "s: thinking: found None and True",
    "sampling": "s: sampling: found {'temperature': 0} and {'temperature': 1}",
    "stop_ids": "s: stop_ids: found [1] and [2]",
    "template_arguments": "s: template_arguments: found {} and {'a': 1}",
    "prompt": "s: prompt b, sha256: found bbb and xyz",
    "ids": "s: no prompt in common",
    "sets": "sets: found ['s'] and ['r'], expected one in common",
}


@pytest.mark.parametrize("what", UNLIKE)
def test_what_does_not_compare_is_refused_in_one_line(what, tmp_path, capsys):
    one = evaluation([[1], [2]], [1.0, 1.0])
    values = {"max_new_tokens": 8, "thinking": True, "sampling": {"temperature": 1}, "stop_ids": [2]}
    values |= {"template_arguments": {"a": 1}}
    other = evaluation([[1], [2]], [1.0, 1.0], **{k: v for k, v in values.items() if k == what})
    rows = other["sets"]["s"]["per_prompt"]
    if what in ("target", "device"):
        other[what] = "u"
    elif what == "prompt":
        rows[1]["prompt_sha256"] = "xyz"
    elif what == "ids":
        for row in rows:
            row["id"] += "'"
    elif what == "sets":
        other["sets"] = {"r": other["sets"]["s"]}
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, value in zip(paths, (one, other)):
        path.write_text(json.dumps(value))
    with pytest.raises(SystemExit):
        main([str(path) for path in paths])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {UNLIKE[what]}")


def test_compare_runs_as_a_script(tmp_path):
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(evaluation([[1, 2]], [1.0])))
    done = helpers.run("train/compare.py", path, path)
    assert done.returncode == 0 and "+0.000 (+0.000 to +0.000)" in done.stdout, done.stderr
    assert helpers.run("train/compare.py", path).stderr.startswith("error: found 1 arguments")


def test_a_set_can_name_its_own_number_of_prompts(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"hello {n}"]}) + "\n" for n in range(9)))
    sets = [f"{path}:7", "arithmetic"]
    config = helpers.config(tmp_path, "evaluate.prompts=3")
    config.evaluate.sets = sets
    found = evaluation_prompts(config, Preparation(config.model, config.data, config.cache))
    assert {name: len(prompts) for name, prompts in found.items()} == {"own": 7, "arithmetic": 3}
