"""Answers are the target's own greedy ones, each prompt is answered once whatever interrupts it, and the shipped data
is what it says. References: Transformers' `generate` of one prompt at a time, the run that was not interrupted, a stub
of a server on the loopback that notes what it is asked.
"""

import json

import httpx
import pytest
import run_helpers as helpers
import torch
from stub_server import FAULTS, StubServer, answer

from data_prep import regenerate as module
from data_prep.config import DataConfig
from data_prep.prompts import prompt_of, read_rows

NEW = 34
PART = "answers.part.jsonl"


def read(lines):
    return [json.loads(line) for line in getattr(lines, "path", lines).read_text().splitlines()]


@pytest.fixture(scope="module")
def rows():
    return list(read_rows(DataConfig(path=str(helpers.PROMPTS), limit=20)))


def config(**changes):
    return DataConfig(**{"path": "unused", "max_new_tokens": NEW, "batch_size": 6, **changes})


def regenerate(rows, config, load, name, folder):
    return module.regenerate(rows, config, helpers.tokenizer(), {helpers.END}, load, name, folder)


@pytest.fixture(scope="module")
def expected(rows):
    """id -> the target's greedy answer to the prompt alone, by Transformers."""
    answers = {}
    for row in rows:
        text = "".join(f"<|user|>{message['content']}" for message in row["messages"])
        ids = torch.tensor([[helpers.BOS, helpers.USER, *text.removeprefix("<|user|>").encode(), helpers.ASSISTANT]])
        out = helpers.target().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
            eos_token_id=helpers.END, pad_token_id=helpers.PAD,
        )  # fmt: skip
        answers[row["id"]] = out[0, ids.shape[1] :].tolist()
    assert {answer[-1] == helpers.END for answer in answers.values()} == {True, False}  # both ways of finishing
    return answers


def test_batched_answers_equal_single_ones(rows, expected, tmp_path):
    answered = read(regenerate(rows, config(), helpers.target, "tiny", tmp_path))
    assert [row["id"] for row in answered] == [row["id"] for row in rows]
    for row, asked in zip(answered, rows):
        assert row["answer_ids"] == expected[row["id"]] and row["num_tokens"] == len(row["answer_ids"])
        ended = row["answer_ids"][-1] == helpers.END
        assert row["finish"] == ("stop" if ended else "length") and (ended or row["num_tokens"] == NEW)
        text = bytes(token for token in row["answer_ids"] if token < 256).decode(errors="replace")
        assert row["messages"] == [*prompt_of(asked), {"role": "assistant", "content": text}]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    stopped = sum(answer[-1] == helpers.END for answer in expected.values())
    assert manifest["finish"] == {"stop": stopped, "length": 20 - stopped} and manifest["temperature"] == 0
    assert manifest["answer_tokens"] == sum(map(len, expected.values())) and manifest["target"] == "tiny"
    assert not (tmp_path / PART).exists()


def test_the_datas_own_answers_and_later_turns_are_not_used(rows, expected, tmp_path):
    talk = [{"role": "assistant", "content": "old"}, {"role": "user", "content": "again"}]
    longer = [{**row, "messages": row["messages"] + talk} for row in rows[:3]]
    answered = read(regenerate(longer, config(), helpers.target, "tiny", tmp_path))
    assert [row["answer_ids"] for row in answered] == [expected[row["id"]] for row in rows[:3]]
    assert all(len(row["messages"]) == 2 for row in answered)


class Dying:
    """The target, which raises in its n-th batch and notes the prompts that it answered before."""

    def __init__(self, dies_in=None):
        self.dies_in, self.batches, self.seen = dies_in, 0, []
        self.device, self.generation_config = helpers.target().device, helpers.target().generation_config

    def generate(self, input_ids, attention_mask, **options):
        self.batches += 1
        if self.batches == self.dies_in:
            raise RuntimeError("out of memory")
        self.seen += [tuple(ids[mask.bool()].tolist()) for ids, mask in zip(input_ids, attention_mask)]
        return helpers.target().generate(input_ids=input_ids, attention_mask=attention_mask, **options)


@pytest.mark.parametrize("half_a_line", ["", '{"id": "py-020", "mess'])
def test_an_interrupted_run_goes_on_and_answers_nothing_twice(rows, tmp_path, half_a_line):
    whole = read(regenerate(rows, config(), helpers.target, "tiny", tmp_path / "whole"))
    folder, first, second = tmp_path / "answers", Dying(dies_in=2), Dying()
    with pytest.raises(RuntimeError, match="out of memory"):
        regenerate(rows, config(), lambda: first, "tiny", folder)
    assert len(read(folder / PART)) == 6 and not (folder / "answers.jsonl").exists()
    with (folder / PART).open("a") as part:
        part.write(half_a_line)
    answered = regenerate(rows, config(), lambda: second, "tiny", folder)
    assert read(answered) == whole
    assert len(first.seen) == 6 and len(second.seen) == 14 and len({*first.seen, *second.seen}) == 20
    assert regenerate(rows, config(), lambda: pytest.fail("answered again"), "tiny", folder).path == answered.path


def test_sampled_answers_do_not_depend_on_interruptions(rows, tmp_path):
    """And on nothing but the seed: other seeds, other answers."""
    sampled = config(temperature=0.9, top_p=0.9, seed=3)
    whole = read(regenerate(rows, sampled, helpers.target, "tiny", tmp_path / "whole"))
    with pytest.raises(RuntimeError, match="out of memory"):
        regenerate(rows, sampled, lambda: Dying(dies_in=3), "tiny", tmp_path / "again")
    lines = (tmp_path / "again" / PART).read_text().splitlines(keepends=True)
    assert len(lines) == 12
    (tmp_path / "again" / PART).write_text("".join(lines[:9]))  # as if killed inside a batch
    torch.manual_seed(99)
    assert read(regenerate(rows, sampled, helpers.target, "tiny", tmp_path / "again")) == whole
    other = read(regenerate(rows, config(temperature=0.9, top_p=0.9, seed=4), helpers.target, "tiny", tmp_path / "x"))
    greedy = read(regenerate(rows, config(), helpers.target, "tiny", tmp_path / "greedy"))
    assert all(sum(a != b for a, b in zip(one, whole)) > 10 for one in (other, greedy))
    manifest = json.loads((tmp_path / "whole/manifest.json").read_text())
    assert (manifest["temperature"], manifest["top_p"], manifest["seed"]) == (0.9, 0.9, 3)


def prompt_ids(row):
    """What the tiny template makes of a conversation whose messages are all the user's."""
    turns = [[helpers.USER, *message["content"].encode()] for message in row["messages"]]
    return [helpers.BOS, *(token for turn in turns for token in turn), helpers.ASSISTANT]


def text_of(ids):
    return bytes(token for token in ids if token < 256).decode()


@pytest.fixture
def no_waiting(monkeypatch):
    """Pauses between tries take no time; returns their lengths."""
    pauses = []
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    return pauses


def not_here():
    pytest.fail("loaded the target")


def serve_and_read(rows, folder, *servers, **changes):
    settings = config(server=[server.url for server in servers], **changes)
    return read(regenerate(rows, settings, not_here, "org/model", folder))


def assert_answered(answered, rows, bytes_only=False):
    """Every row once, in order, with the server's own tokens."""
    assert [row["id"] for row in answered] == [row["id"] for row in rows]
    for row, asked in zip(answered, rows):
        ids, finish = answer(prompt_ids(asked), NEW, bytes_only)
        assert row["answer_ids"] == ids and row["finish"] == finish and row["num_tokens"] == len(ids)
        assert row["messages"] == [*asked["messages"], {"role": "assistant", "content": text_of(ids)}]
    assert {row["finish"] for row in answered} == {"stop", "length"}


def test_servers_get_the_prompts_ids_and_their_tokens_are_taken_verbatim(rows, tmp_path, no_waiting):
    with StubServer() as one, StubServer() as other:
        answered = serve_and_read(rows, tmp_path, one, other)
    assert_answered(answered, rows)
    assert any(token >= 300 for row in answered for token in row["answer_ids"])  # which no text becomes
    assert (len(one.asked), len(other.asked)) == (10, 10) and not no_waiting
    asked = {tuple(body["prompt"]): body for body in one.asked + other.asked}
    assert asked.keys() == {tuple(prompt_ids(row)) for row in rows}
    for body in asked.values():
        assert body.pop("prompt") and body == {
            "path": "/v1/completions", "model": "org/model", "max_tokens": NEW, "temperature": 0,
            "stop_token_ids": [helpers.END], "skip_special_tokens": False, "return_token_ids": True,
        }  # fmt: skip
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["by"] == ["stub 1.0", "stub 1.0"] and manifest["target"] == "org/model"
    assert manifest["rows"] == 20 and manifest["answer_tokens"] == sum(len(row["answer_ids"]) for row in answered)
    assert manifest["max_new_tokens"] == NEW and manifest["temperature"] == 0 and "seed" not in manifest


def test_sampling_is_asked_for_with_a_seed_of_each_row(rows, tmp_path, no_waiting):
    seeds = []
    for seed, name in ((7, "a"), (7, "b"), (8, "c")):
        with StubServer() as server:
            serve_and_read(rows, tmp_path / name, server, temperature=0.7, top_p=0.8, top_k=20, seed=seed)
        assert all((b["temperature"], b["top_p"], b["top_k"]) == (0.7, 0.8, 20) for b in server.asked)
        seeds.append({tuple(body["prompt"]): body["seed"] for body in server.asked})
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        assert [manifest[key] for key in ("temperature", "top_p", "top_k", "seed")] == [0.7, 0.8, 20, seed]
    assert seeds[0] == seeds[1] and not set(seeds[0].values()) & set(seeds[2].values())
    assert len(set(seeds[0].values())) == 20


def test_text_becomes_tokens_with_the_stop_token_behind_it(rows, tmp_path, no_waiting):
    with StubServer(gives_ids=False) as server:
        assert_answered(serve_and_read(rows, tmp_path, server), rows, bytes_only=True)
    assert json.loads((tmp_path / "manifest.json").read_text())["tokenised_here"] == len(rows)


@pytest.mark.parametrize("fault, stall", [*((fault, 0.1) for fault in FAULTS), ("stall", 9)])
def test_a_failed_request_goes_to_the_next_server(rows, tmp_path, no_waiting, monkeypatch, fault, stall):
    """The first requests of the one fail, at whatever point; those rows are asked of the other."""
    if stall > 1:  # longer than the client waits
        client = httpx.Client
        monkeypatch.setattr(httpx, "Client", lambda **options: client(**{**options, "timeout": 2}))
    with StubServer(plan=[fault] * 3, stall=stall) as one, StubServer() as other:
        answered = serve_and_read(rows, tmp_path, one, other, concurrency=2)
    assert_answered(answered, rows)
    assert len(one.asked) == 10 and len(other.asked) == 13 and no_waiting == [1, 1, 1]


def test_one_server_alone_is_asked_again_after_longer_and_longer_pauses(rows, tmp_path, no_waiting):
    with StubServer(plan=["500"] * (module.TRIES - 1)) as server:
        answered = serve_and_read(rows[:1] + rows[5:], tmp_path, server, concurrency=1)
    assert_answered(answered, rows[:1] + rows[5:])
    assert len(server.asked) >= 16 + 4 and set(no_waiting) <= {1, 2, 4, 8} and len(no_waiting) == 4


def test_refused_rows_are_named_and_asked_again_by_the_next_run(rows, tmp_path, no_waiting):
    long = [tuple(prompt_ids(row)) for row in (rows[4], rows[11])]
    with StubServer(refuse=lambda body: tuple(body["prompt"]) in long) as strict, pytest.raises(OSError) as error:
        serve_and_read(rows, tmp_path, strict)
    message = str(error.value)
    assert message.startswith("data.server: 2 of 20 rows got no answer") and "too long" in message
    assert "\n" not in message and (rows[4]["id"] in message or rows[11]["id"] in message)
    assert len(strict.asked) == 20 and not no_waiting  # a refusal is final
    assert len(read(tmp_path / PART)) == 18 and not (tmp_path / "answers.jsonl").exists()
    with StubServer() as sound:
        assert_answered(serve_and_read(rows, tmp_path, sound), rows)
    assert sorted(tuple(body["prompt"]) for body in sound.asked) == sorted(long)


def test_a_server_that_stays_broken_is_given_up(rows, tmp_path, no_waiting, monkeypatch):
    """In one line; what was answered stays."""
    monkeypatch.setattr(module, "GIVE_UP", 5)
    with StubServer(plan=["500"] * 10**4) as broken, pytest.raises(OSError) as error:
        serve_and_read(rows, tmp_path, broken, concurrency=1)
    assert str(error.value).startswith("data.server: 5 rows in a row got no answer") and "\n" not in str(error.value)
    assert len(broken.asked) <= (5 + 2 + 1) * module.TRIES  # and those on their way
    with StubServer() as sound:
        assert_answered(serve_and_read(rows, tmp_path, sound), rows)


def test_nobody_listens(rows, tmp_path, no_waiting):
    with StubServer() as gone:
        pass
    with pytest.raises(OSError, match=r"^data\.server: 3 of 3 rows got no answer .*run again") as error:
        serve_and_read(rows[:3], tmp_path, gone)
    assert "\n" not in str(error.value) and gone.url in str(error.value)


DEMO = helpers.ROOT / "data_prep/demo"


def test_shipped_answers_are_to_the_shipped_prompts():
    assert (DEMO / "answers.jsonl").exists(), "data_prep/demo/answers.jsonl is missing"
    prompts = {row["id"]: row["messages"] for row in read(DEMO / "prompts.jsonl")}
    answers = read(DEMO / "answers.jsonl")
    assert answers and len({row["id"] for row in answers}) == len(answers)
    for row in answers:
        assert row["messages"][:-1] == prompts[row["id"]] and row["messages"][-1]["role"] == "assistant"
        assert row["finish"] in ("stop", "length") and row["num_tokens"] == len(row["answer_ids"])


def test_heldout_arithmetic_is_no_training_prompt():
    trained = {json.dumps(row["messages"]) for row in read(DEMO / "prompts.jsonl")}
    heldout = read(DEMO / "heldout_arithmetic.jsonl")
    assert heldout and len({row["id"] for row in heldout}) == len(heldout)
    assert not trained & {json.dumps(row["messages"]) for row in heldout}
    words = lambda text: frozenset("".join(c if c.isalpha() else " " for c in text.lower()).split())  # noqa: E731
    shapes = {words(row["messages"][-1]["content"]) for row in read(DEMO / "prompts.jsonl")}
    assert not shapes & {words(row["messages"][-1]["content"]) for row in heldout}  # not the same but for numbers
