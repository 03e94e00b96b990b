"""Answers are the target's own greedy ones, each prompt is answered once whatever interrupts it, and the shipped data
is what it says. References: Transformers' `generate` of one prompt at a time, the run that was not interrupted, a stub
of a server on the loopback that notes what it is asked.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import run_helpers as helpers
import torch

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


class Server:
    """A stub of a chat-completions server; `plan` holds the status codes of its first replies."""

    def __init__(self, plan=()):
        self.plan, self.asked = list(plan), []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.asked.append((self.path, body))
                status = stub.plan.pop(0) if stub.plan else 200
                last = body["messages"][-1]["content"]
                message = {"role": "assistant", "content": f"echo {last}"}
                choice = {"message": message, "finish_reason": "length" if len(last) > 60 else "stop"}
                reply = json.dumps({"choices": [choice], "usage": {"completion_tokens": 7}}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_servers_answer_and_a_failed_request_is_asked_again(rows, tmp_path, no_waiting):
    no_target = lambda: pytest.fail("loaded the target")  # noqa: E731
    with Server(plan=[500]) as one, Server() as other:
        settings = config(server=[one.url, other.url + "/"], thinking=False)
        answered = read(regenerate(rows, settings, no_target, "org/model", tmp_path))
    assert [row["id"] for row in answered] == [row["id"] for row in rows]
    for row, asked in zip(answered, rows):
        last = asked["messages"][-1]["content"]
        assert row["messages"] == [*asked["messages"], {"role": "assistant", "content": f"echo {last}"}]
        assert row["finish"] == ("length" if len(last) > 60 else "stop") and row["num_tokens"] == 7
        assert "answer_ids" not in row
    assert len(one.asked) == 11 and len(other.asked) == 10  # half each, and the failed one again
    for path, body in one.asked + other.asked:
        assert path == "/v1/chat/completions" and body["model"] == "org/model"
        assert body["temperature"] == 0 and body["max_tokens"] == NEW
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert json.loads((tmp_path / "manifest.json").read_text())["answer_tokens"] == 7 * 20


def test_a_server_that_stays_broken_ends_in_one_line(rows, tmp_path, no_waiting):
    """ValueError and OSError are what the command line turns into one line; what was answered stays."""
    with Server(plan=[500] * 10**4) as broken, pytest.raises((ValueError, OSError)) as error:
        regenerate(rows, config(server=[broken.url]), helpers.target, "m", tmp_path)
    assert "data.server" in str(error.value) and "\n" not in str(error.value)
    with Server() as sound:
        answered = read(regenerate(rows, config(server=[sound.url]), helpers.target, "m", tmp_path))
    assert len(answered) == 20


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
