"""Each public set asks what its publishers wrote, from the Hub, a package or a local copy; own rows keep their turns.
References: rows with the columns that the sets' cards on the Hub name, and the questions written out by hand.
"""

import json
import re
from itertools import pairwise

import datasets
import pytest
import run_helpers as helpers

from train import sets
from train.sets import load_set

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CODE = "def f(x):\n    "
# name: columns as published, and what the target is asked
PUBLIC = {
    "gsm8k": ({"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}, "1 + 1?" + BOXED),
    "math500": (
        {"problem": "Let $x_{1}=2$.", "solution": "s", "answer": "2", "subject": "Algebra", "level": 1,
         "unique_id": "test/a/1.json"},
        "Let $x_{1}=2$." + BOXED,
    ),
    "aime24": (
        {"id": 60, "problem": "Find n.", "solution": "s", "answer": "204", "url": "u", "year": "2024"},
        "Find n." + BOXED,
    ),
    "aime25": ({"problem": "Find m.", "answer": "70", "id": "0"}, "Find m." + BOXED),
    "mbpp": (
        {"source_file": "f", "task_id": 11, "prompt": "Write f.", "code": "c", "test_imports": [], "test_list": ["t"]},
        "Write f.",
    ),
    "livecodebench": (
        {"question_title": "t", "question_content": "Given n {", "platform": "leetcode", "question_id": "3700",
         "contest_id": "c", "contest_date": "d", "starter_code": "class Solution:\n    pass", "difficulty": "hard",
         "public_test_cases": "[]", "private_test_cases": "eJw=", "metadata": "{}"},
        "Given n {\n\nclass Solution:\n    pass",
    ),
    "alpaca": (
        {"instruction": "Add up.", "input": "1, 2", "output": "3", "text": "Below is ..."}, "Add up.\n\n1, 2",
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": CODE, "canonical_solution": "", "test": "", "entry_point": "f"},
        f"Complete the following Python function.\n\n```python\n{CODE}```",
    ),
    "mt_bench": ({"question_id": 81, "category": "writing", "turns": ["One?", "Two?"], "reference": []}, "One?"),
}  # fmt: skip
CATEGORIES = {"math500": "Algebra", "livecodebench": "hard", "mt_bench": "writing"}


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def asked(row):
    return [[message["content"] for message in turn] for turn in row["turns"]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize("name", PUBLIC)
def test_a_local_copy_of_a_public_set(name, kind, tmp_path):
    columns, question = PUBLIC[name]
    path = jsonl(tmp_path / "rows.jsonl", [columns, columns])
    if kind != "jsonl":
        rows = datasets.Dataset.from_list([columns, columns])
        path = str(tmp_path / f"copy.{kind}")
        if kind == "parquet":
            rows.to_parquet(path)
        else:
            datasets.DatasetDict({sets.BENCHMARKS[name].split: rows}).save_to_disk(path)
    if name == "mt_bench":  # named by its own ids
        found = load_set(name, 1, tmp_path, {name: jsonl(tmp_path / "one.jsonl", [columns])})
        assert [row["id"] for row in found] == ["mt_bench-81"] and asked(found[0]) == [["One?"], ["Two?"]]
        return
    found = load_set(name, 2, tmp_path, {name: path})
    assert [row["id"] for row in found] == [f"{name}-0", f"{name}-1"]
    assert asked(found[1]) == [[question]] and found[1]["turns"][0][0]["role"] == "user"
    assert found[1]["category"] == CATEGORIES.get(name)


def test_an_empty_input_leaves_nothing_behind(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"instruction": "Hi.", "input": empty, "output": ""} for empty in ("", None)])
    assert [asked(row) for row in load_set("alpaca", 2, tmp_path, {"alpaca": path})] == [[["Hi."]]] * 2


def test_what_the_hub_is_asked_for(monkeypatch, tmp_path):
    """Repository, configuration and split of each set; livecodebench's newest file, without its script."""
    calls = []

    def load_dataset(path, subset, split, **_):
        calls.append((path, subset, split))
        return [dict.fromkeys(("question", "problem", "prompt", "instruction", "input"), "text")]

    def download(repo, name, repo_type):
        calls.append((repo, name, repo_type))
        return jsonl(tmp_path / "test6.jsonl", [PUBLIC["livecodebench"][0]])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sets, "hf_hub_download", download)
    for name in ("gsm8k", "math500", "aime24", "aime25", "mbpp", "alpaca", "livecodebench"):
        load_set(name, 1, tmp_path)
    assert calls == [
        ("openai/gsm8k", "main", "test"),
        ("HuggingFaceH4/MATH-500", None, "test"),
        ("HuggingFaceH4/aime_2024", None, "train"),
        ("math-ai/aime25", None, "test"),
        ("google-research-datasets/mbpp", "sanitized", "test"),
        ("tatsu-lab/alpaca", None, "train"),
        ("livecodebench/code_generation_lite", "test6.jsonl", "dataset"),
    ]


@pytest.mark.parametrize("name", ["gsm8k", "livecodebench"])
def test_without_the_hub_one_line_says_what_to_do(name, monkeypatch, tmp_path):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(sets, "hf_hub_download", unreachable)
    with pytest.raises(ValueError, match=f"^evaluate.sets: {name} .*Couldn't reach the Hub") as caught:
        load_set(name, 1, tmp_path)
    assert "\n" not in str(caught.value) and f"+evaluate.local.{name}=PATH" in str(caught.value)


def test_packages_carry_two_sets():
    cache = helpers.ROOT / ".cache/sets"
    rows = load_set("mt_bench", 80, cache)
    assert {len(row["turns"]) for row in rows} == {2} and len({row["category"] for row in rows}) == 8
    assert rows[0]["id"] == "mt_bench-81" and asked(rows[0])[1][0].startswith("Rewrite your previous response.")
    assert len(load_set("humaneval", 164, cache)) == 164
    drawn = [row["id"] for row in load_set("humaneval", 30, cache)]
    assert drawn == [row["id"] for row in load_set("humaneval", 30, cache)] and len(set(drawn)) == 30
    steps = [int(b.split("-")[1]) - int(a.split("-")[1]) for a, b in pairwise(drawn)]
    assert min(steps) == 1 and max(steps) > 10, "every n-th would fall in step with what goes round"
    assert len(load_set("arithmetic", 5, cache)) == 5


def test_own_rows_keep_their_turns(tmp_path):
    say = lambda role, content: {"role": role, "content": content}  # noqa: E731
    talk = [say("system", "S"), say("user", "A"), say("assistant", "x"), say("user", "B"), say("assistant", "y")]
    tool = [say("user", "A"), say("assistant", "call"), say("tool", "42"), say("assistant", "z"), say("user", "C")]
    rows = [{"id": "talk", "messages": talk, "category": "chat"}, {"id": "tool", "messages": tool}]
    rows += [{"id": "same", "messages": talk}, {"id": "ids", "input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}]
    found = {row["id"]: row for row in load_set(jsonl(tmp_path / "own.jsonl", rows), 4, tmp_path)}
    assert found["talk"]["turns"] == found["same"]["turns"] == [talk[:2], [talk[3]]]
    assert found["talk"]["category"] == "chat" and "category" not in found["same"]
    assert found["tool"]["turns"] == [[tool[0]]], "what a tool said to another answer cannot be said to the target's"
    assert found["ids"]["turns"] == [[5, 6]]
    rows = [{"id": 7, "turns": ["A", "B"], "category": "x"}, {"turns": ["C"]}]
    first, second = load_set(jsonl(tmp_path / "turns.jsonl", rows), 2, tmp_path)
    assert first == {"id": "7", "category": "x", "turns": [[say("user", "A")], [say("user", "B")]]}
    assert second["id"] == "1" and second["category"] is None


REFUSED = {
    "another column": ("gsm8k", [{"query": "1?"}], "row 1: found columns ['query'], expected 'question'"),
    "no text": ("mt_bench", [{"turns": ["A", ""]}], "row 1: found ['A', ''], expected a list of texts"),
    "no object": ("gsm8k", ["1?"], "row 1: found columns 1?"),
    "too few": ("gsm8k", [{"question": "1?"}] * 0, "evaluate.prompts: found 1, expected at most 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_copy_of_another_form_is_refused(case, tmp_path):
    name, rows, words = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        load_set(name, 1, tmp_path, {name: jsonl(tmp_path / "rows.jsonl", rows)})
    assert "\n" not in str(caught.value)


def test_names_and_paths_that_do_not_exist_are_refused(tmp_path):
    for name, local, words in (
        ("gsm9k", {}, "evaluate.sets: found gsm9k, expected one of ['aime24', "),
        ("gsm8k", {"gsm9k": "x"}, "evaluate.local: found ['gsm9k'], expected names of"),
        ("gsm8k", {"gsm8k": "/no/where"}, "evaluate.local.gsm8k: /no/where not found"),
        ("/no/where.jsonl", {}, "evaluate.sets: "),
        (jsonl(tmp_path / "twice.jsonl", [{"id": 1, "turns": ["A"]}] * 2), {}, "an id that stands twice"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)) as caught:
            load_set(name, 1, tmp_path, local)
        assert "\n" not in str(caught.value)
