"""What a server's own counters tell of the evaluation's prompts. References: a stub whose answers and verifications are
written down here, and sums done by hand.

Two conversations, A of two turns and B of one. With the drafter every pass has 3 requests, 7 + 4 + 1 tokens and 4
verifications that accept 3, 1, 0 and 2 drafts: tau is 1 + 6/4; 3, 2 and 1 of 4 blocks have 1, 2, 3 drafts right.
"""

import functools
import hashlib
import json

import httpx
import pytest
import run_helpers as helpers
from run_helpers import ASSISTANT, BOS, END, USER
from stub_server import StubEngine

from data_prep import regenerate
from data_prep.config import DataConfig
from data_prep.files import read_json, write_json
from data_prep.prepare import describe
from train import server as module
from train.config import EvaluateConfig, RunConfig
from train.evaluate import next_turn, render_turn
from train.evaluate_server import evaluate_server, measure_servers

DATA, STOPS = DataConfig(path="x"), {END}


def ids(text):
    return list(text.encode())


A1 = [BOS, USER, *ids("A"), ASSISTANT]
B1 = [BOS, USER, *ids("B"), ASSISTANT]


def a2(said):
    return [*A1, *ids(said), END, USER, *ids("C"), ASSISTANT]


def drafted(prompt):
    if prompt[2] == ord("B"):
        return [END], []  # the prefill's token was the last one
    first = prompt.count(USER) == 1  # the second turn's last block reaches a token behind its end
    return ([*ids("quick!"), END], [3, 1]) if first else ([*ids("yes"), END], [0, 2])


def alone(prompt):
    return [*ids("slow"), END], []


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(regenerate.time, "sleep", lambda seconds, sleep=regenerate.time.sleep: sleep(min(seconds, 0.1)))


def rows():
    asked = {"a": ["A", "C"], "b": ["B"]}
    return [
        {"id": name, "turns": [[{"role": "user", "content": text}] for text in texts]} for name, texts in asked.items()
    ]


def measure(fast, slow=None, concurrency=(1,), targets=("org/tiny",), **settings):
    """What is measured of the stubs, with one set named own."""
    urls = {"server": fast.url} | ({"server_alone": slow.url} if slow is not None else {})
    config = EvaluateConfig(**urls, concurrency=list(concurrency), **settings)
    tokenizer = helpers.tokenizer()
    prompts = [render_turn(tokenizer, DATA, row) for row in rows()]
    follow = functools.partial(next_turn, tokenizer, DATA, STOPS)
    return measure_servers(config, {"own": prompts}, tokenizer, STOPS, list(targets), follow)


def asked(stub):
    """The prompts that a stub was asked, behind the two that warmed it up."""
    assert [body["prompt"] for body in stub.asked[:2]] == [A1, B1]
    return [body["prompt"] for body in stub.asked[2:]]


def test_figures_are_those_of_the_script():
    with StubEngine(drafted, pause=0.05) as fast, StubEngine(alone, drafts=0, pause=0.05) as slow:
        report = measure(fast, slow, concurrency=[2, 1])
    own = report["sets"]["own"]
    assert report["engine"] == {"name": "vLLM", "version": "stub 1.0"} and report["model"] == "org/tiny"
    assert (own["prompts"], own["turns"]) == (2, 3)
    prompts = [A1, a2("slow"), B1]  # the target alone said what came before
    assert own["prompts_sha256"] == hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    for stub in (fast, slow):
        assert sorted(asked(stub)[:3]) == sorted(asked(stub)[3:]) == sorted(prompts)
        assert stub.most == 2
    for p, at_once in zip(own["passes"], [2, 1]):
        assert (p["concurrency"], p["requests"], p["tokens"]) == (at_once, 3, 12)
        assert (p["drafts"], p["draft_tokens"], p["accepted"]) == (4, 12, 6)
        assert p["tau"] == 2.5 and p["tau_from"] == "accepted and drafts"
        assert p["slot_acceptance"] == [0.75, 0.5, 0.25]
        assert p["failed"] == p["alone"]["failed"] == {} and p["remarks"] == []
        assert p["alone"]["tokens"] == 15 and p["tokens_per_second"] == pytest.approx(12 / p["seconds"])
        assert p["ratio"] == pytest.approx(12 / p["seconds"] / (15 / p["alone"]["seconds"]))
    two, one = own["passes"]
    assert one["seconds"] >= 0.15 and 0.1 <= two["seconds"] < one["seconds"]  # A's turns wait for each other


def test_without_a_server_alone_the_drafters_answers_stand_before_later_turns():
    with StubEngine(drafted) as fast:
        (p,) = measure(fast)["sets"]["own"]["passes"]
    assert asked(fast) == [A1, a2("quick!"), B1] and fast.most == 1
    assert p["alone"] is None and p["ratio"] is None and p["tau"] == 2.5


def test_the_settings_are_those_of_the_evaluation():
    seeds = []
    for seed in (3, 3, 4):
        with StubEngine(drafted) as fast:
            measure(fast, temperature=0.7, top_p=0.9, seed=seed, max_new_tokens=77)
        for body in fast.asked:
            expected = {"max_tokens": 77, "temperature": 0.7, "top_p": 0.9, "top_k": -1, "stop_token_ids": [END]}
            expected |= {"model": "org/tiny", "repetition_penalty": 1, "min_p": 0, "path": "/v1/completions"}
            assert {key: body[key] for key in expected} == expected
        assert len({body["cache_salt"] for body in fast.asked[2:]}) == 1
        assert fast.asked[0]["cache_salt"] != fast.asked[2]["cache_salt"]
        seeds.append([body["seed"] for body in fast.asked[2:]])
    assert seeds[0] == seeds[1] and not {*seeds[0]} & {*seeds[2]} and len({*seeds[0]}) == 3
    with StubEngine(drafted) as fast:
        measure(fast)
    assert {body["temperature"] for body in fast.asked} == {0} and not any("seed" in body for body in fast.asked)


def test_sglang_counts_verifications():
    """12 tokens of 3 requests, of which the prefill gave one each, in 4 verifications."""
    with StubEngine(drafted, kind="sglang") as fast, StubEngine(alone, drafts=0, kind="sglang") as slow:
        report = measure(fast, slow)
    (p,) = report["sets"]["own"]["passes"]
    assert p["tau"] == 9 / 4 and p["tau_from"] == "tokens and verifications" and p["drafts"] == 4
    assert p["slot_acceptance"] == [] and p["accepted"] is None and p["draft_tokens"] is None and p["remarks"] == []
    assert report["engine"] == {"name": "SGLang", "version": "stub 2.0"}


def test_an_average_is_reported_as_such():
    with StubEngine(drafted, kind="sglang gauge") as fast:
        (p,) = measure(fast)["sets"]["own"]["passes"]
    assert p["tau"] == 2.75 and p["tau_from"] == "the engine's average" and p["drafts"] == 0
    (line,) = p["remarks"]
    assert "not that of these prompts" in line


@pytest.mark.parametrize("foreign, more", [(11, None), (12, 1), (40, 29)])
def test_foreign_requests_are_flagged(foreign, more):
    """Ours explain 9 tokens, the counters tell of 4 + 6; a block of 4 for each of 3 requests is allowed."""
    with StubEngine(drafted, foreign=foreign) as fast:
        (p,) = measure(fast)["sets"]["own"]["passes"]
    expected = [] if more is None else [f"the engine counted {more} tokens more than we can have got; does anyone else"]
    assert [line.rsplit(" ask", 1)[0] for line in p["remarks"]] == expected


def test_tokens_without_a_draft_are_flagged():
    """Of 3 x 29 emitted tokens the one verification of each explains one; a block of 4 for each request is allowed."""
    with StubEngine(lambda prompt: ([*ids("x" * 29), END], [0])) as fast:
        (p,) = measure(fast)["sets"]["own"]["passes"]
    assert p["remarks"] == ["84 of 87 tokens came without a draft; tau does not know them"]


def test_more_requests_than_conversations_are_told():
    with StubEngine(drafted) as fast:
        passes = measure(fast, concurrency=[2, 3])["sets"]["own"]["passes"]
    assert [p["remarks"] for p in passes] == [[], ["2 conversations were never more requests at a time"]]


@pytest.mark.parametrize(
    "engines, said",
    [
        ({"fast": {"drafts": 0}}, "evaluate.server: no speculative counters found"),
        ({"fast": {"drafts": 0, "kind": "sglang"}}, "evaluate.server: no speculative counters found"),
        ({"fast": {"kind": "none"}}, "evaluate.server: no speculative counters found"),
        ({"fast": {}, "slow": {}}, "evaluate.server_alone: found speculative counters"),
        ({"fast": {}, "slow": {"kind": "sglang"}}, "evaluate.server_alone: found speculative counters"),
        ({"fast": {"models": [("org/other", "/m/other")]}}, "evaluate.server: found a server of ['org/other'],"),
        ({"fast": {}, "slow": {"models": []}}, "evaluate.server_alone: found a server of []"),
    ],
)  # fmt: skip
def test_a_server_of_another_kind_is_refused_in_one_line(engines, said):
    stubs = {name: StubEngine(drafted, **options) for name, options in engines.items()}
    with stubs["fast"] as fast, stubs.get("slow", fast), pytest.raises(ValueError) as error:
        measure(fast, stubs.get("slow"))
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


@pytest.mark.parametrize("models", [[("m", "org/Tiny")], [("x", "y"), ("/data/tiny", "/data/tiny")], [("tiny", None)]])
def test_the_target_is_known_by_the_last_part_of_its_name(models):
    with StubEngine(drafted, models=models) as fast:
        assert measure(fast)["model"] == models[-1][0]
    assert {body["model"] for body in fast.asked} == {models[-1][0]}


def test_nobody_listens():
    with StubEngine(drafted) as gone:
        pass
    with pytest.raises(OSError, match=r"^evaluate\.server: http://.* does not tell its models \(.*\); is it up\?$"):
        measure(gone)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"server": "localhost:8000"}, "evaluate.server: found 'localhost:8000', expected a base URL"),
        ({"server": "http://h/v1?x"}, "evaluate.server: found"),
        ({"server": "http://h", "server_alone": "ftp://h"}, "evaluate.server_alone: found 'ftp://h'"),
        ({"server_alone": "http://h"}, "evaluate.server: nothing found"),
        ({"concurrency": []}, "evaluate.concurrency: found []"),
        ({"concurrency": [4, 0]}, "evaluate.concurrency: found [4, 0]"),
        ({"concurrency": [4, 4]}, "evaluate.concurrency: found [4, 4]"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(change, said):
    with pytest.raises(ValueError) as error:
        EvaluateConfig(**change)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_a_server_is_for_the_stage_that_measures_it(tmp_path):
    with pytest.raises(ValueError, match=r"^evaluate\.server: found http://h with stage=all, expected stage=evaluate"):
        helpers.config(tmp_path, "evaluate.server=http://h")
    assert isinstance(helpers.config(tmp_path, "evaluate.server=http://h", "stage=evaluate"), RunConfig)


@pytest.fixture
def export(tmp_path):
    """(config without servers' URLs, folder): of an export, what an evaluation reads of it."""
    made = helpers.config(tmp_path, "stage=evaluate", "evaluate.concurrency=[1]", "evaluate.prompts=2")
    path = tmp_path / "own.jsonl"
    path.write_text(
        "".join(json.dumps({"id": r["id"], "turns": [t[0]["content"] for t in r["turns"]]}) + "\n" for r in rows())
    )
    made.evaluate.sets = [str(path)]
    training = {"model": describe(made.model), "config": {"data": describe(made.data)}, "target_id": "org/tiny"}
    write_json(tmp_path / "dflash_training.json", training | {"geometry": {}, "captured_taps": []})
    return made, tmp_path


def test_the_report_is_written_and_printed(export, capsys):
    config, folder = export
    with StubEngine(drafted) as fast, StubEngine(alone, drafts=0) as slow:
        config.evaluate.server, config.evaluate.server_alone = fast.url.removesuffix("/v1") + "/", slow.url
        evaluate_server(config, folder)
    report = read_json(folder / "evaluation-server.json")
    assert report["engine"]["name"] == "vLLM" and report["target"] == config.model.target
    own = report["sets"]["own"]
    assert own["settings"] == {
        "template_arguments": {}, "thinking": None, "max_new_tokens": 48, "stop_ids": [END],
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0},
        "block_size": 4, "sampled_proposals": None,
    }  # fmt: skip
    assert "http" not in (folder / "evaluation-server.json").read_text()
    (p,) = own["passes"]
    head, line = capsys.readouterr().out.splitlines()[-3:-1]
    assert head.split()[:8] == ["set", "prompts", "at", "once", "tau", "alone", "drafted", "ratio"]
    speeds = [f"{p['alone']['tokens_per_second']:.1f}", f"{p['tokens_per_second']:.1f}", f"{p['ratio']:.2f}"]
    assert line.split() == ["own", "2", "(3)", "1", "2.50", *speeds, "12", "4", "0", "0.75", "0.50", "0.25"]


def test_failed_requests_are_counted_and_end_it_behind_the_report(export, capsys):
    """One refused, one broken, at the drafter's side; one at the other's. The rest is reported: A's second turn alone,
    4 tokens in verifications that accept 0 and 2; of it, B's one token."""
    config, folder = export
    config.evaluate.concurrency = [1, 2]
    a_second = lambda body: body["prompt"].count(USER) == 2  # noqa: E731
    with StubEngine(drafted, plan=["", "", "500", ""]) as fast, StubEngine(alone, drafts=0) as slow:
        fast.refuse = lambda body: a_second(body) and len(fast.asked) > 5
        slow.refuse = lambda body: not a_second(body) and len(slow.asked) > 6
        config.evaluate.server, config.evaluate.server_alone = fast.url, slow.url
        with pytest.raises(
            OSError, match=r"^evaluate\.server: 3 requests failed: the server refused: .*too long"
        ) as error:
            evaluate_server(config, folder)
    assert "\n" not in str(error.value) and len(fast.asked) == 8, "nothing is asked twice"
    first, second = read_json(folder / "evaluation-server.json")["sets"]["own"]["passes"]
    ((reason, count),) = first["failed"].items()
    assert "500" in reason and count == 1 and "http://1" not in reason and first["alone"]["failed"] == {}
    assert (first["requests"], first["tokens"], first["drafts"], first["accepted"], first["tau"]) == (2, 5, 2, 2, 2.0)
    ((reason, count),) = second["failed"].items()
    assert "too long" in reason and count == 1 and list(second["alone"]["failed"].values()) == [1]
    assert (second["requests"], second["tokens"], second["tau"]) == (2, 8, 1 + 4 / 2)
    told = capsys.readouterr().out
    assert "evaluate: 2 requests failed: the server refused" in told and "evaluate: 1 requests failed: " in told


def test_counters_are_read_to_the_letter():
    """Two processes are summed; accepted tokens are not those of a position, nor the time at which a counter began."""
    with StubEngine(drafted) as fast:
        fast.accepted = [3, 1, 0]
        counts = module.read_counters(httpx, fast.url)
    wanted = {"drafts": 3 + 7 + 5, "accepted": 4 + 7, "draft_tokens": 9 + 7, 0: 2 + 7, 1: 1 + 7, 2: 1 + 7}
    assert {key: value for key, value in counts.items() if value} == wanted
