"""What a server's own counters tell of the evaluation's prompts. References: a stub whose answers and verifications are
written down here, and sums done by hand.

Two conversations, A of two turns and B of one. With DFlash every pass has 3 requests, 7 + 4 + 1 tokens and 4
verifications that accept 3, 1, 0 and 2 drafts: tau is 1 + 6/4; 3, 2 and 1 of 4 blocks have 1, 2, 3 drafts right. With
MTP, which drafts 2, it has 6 + 3 + 1 tokens and 4 verifications that accept 2, 0, 0 and 1: tau is 1 + 3/4.
"""

import functools
import hashlib
import json
from contextlib import ExitStack

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
from train.config import EvaluateConfig
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


def drafted_by_mtp(prompt):
    if prompt[2] == ord("B"):
        return [END], []
    return ([*ids("swift"), END], [2, 0, 0]) if prompt.count(USER) == 1 else ([*ids("ok"), END], [1])


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


def measure(fast, slow=None, mtp=None, concurrency=(1,), targets=("org/tiny",), **settings):
    """What is measured of the stubs, with one set named own."""
    stubs = {"mtp": mtp, "dflash": fast, "alone": slow}
    urls = {name: stub.url for name, stub in stubs.items() if stub is not None}
    config = EvaluateConfig(servers=urls, concurrency=list(concurrency), **settings)
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
    assert report["servers"]["dflash"] == {"engine": "vllm", "version": "stub 1.0", "model": "org/tiny"}
    assert (own["prompts"], own["turns"]) == (2, 3)
    prompts = [A1, a2("slow"), B1]  # the target alone said what came before
    assert own["prompts_sha256"] == hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    for stub in (fast, slow):
        assert sorted(asked(stub)[:3]) == sorted(asked(stub)[3:]) == sorted(prompts)
        assert stub.most == 2
    for p, at_once in zip(own["passes"], [2, 1]):
        assert (p["drafter"], p["concurrency"], p["requests"], p["tokens"]) == ("dflash", at_once, 3, 12)
        assert (p["drafts"], p["draft_tokens"], p["accepted"]) == (4, 12, 6)
        assert p["tau"] == 2.5 and p["tau_from"] == "accepted and drafts"
        assert p["slot_acceptance"] == [0.75, 0.5, 0.25] and p["block_size"] == 4
        assert p["failed"] == p["alone"]["failed"] == {} and p["remarks"] == []
        assert p["alone"]["tokens"] == 15 and p["tokens_per_second"] == pytest.approx(12 / p["seconds"])
        assert p["ratio"] == pytest.approx(12 / p["seconds"] / (15 / p["alone"]["seconds"]))
    two, one = own["passes"]
    assert one["seconds"] >= 0.15 and 0.1 <= two["seconds"] < one["seconds"]  # A's turns wait for each other


def test_each_drafter_is_measured_next_to_the_others():
    """Alone first, then the drafters as they were given, at each load; all of them hear what the target said alone."""
    order = []

    def noted(name, script):
        return lambda prompt: order.append(name) or script(prompt)

    with (
        StubEngine(noted("alone", alone), drafts=0) as slow,
        StubEngine(noted("mtp", drafted_by_mtp), drafts=2) as mtp,
        StubEngine(noted("dflash", drafted)) as fast,
    ):
        passes = measure(fast, slow, mtp, concurrency=[1, 2])["sets"]["own"]["passes"]
    names = ("alone", "mtp", "dflash")
    assert order == [name for count in (2, 3, 3) for name in names for _ in range(count)]  # two warm a server up
    for stub in (slow, mtp, fast):
        assert asked(stub)[:3] == [A1, a2("slow"), B1] and sorted(asked(stub)[3:]) == sorted(asked(stub)[:3])
    assert [(p["drafter"], p["concurrency"]) for p in passes] == [(n, k) for k in (1, 2) for n in names[1:]]
    figures = {"mtp": (10, 4, 8, 3, 1.75, [0.5, 0.25], 3), "dflash": (12, 4, 12, 6, 2.5, [0.75, 0.5, 0.25], 4)}
    words = ("tokens", "drafts", "draft_tokens", "accepted", "tau", "slot_acceptance", "block_size")
    for p in passes:
        assert tuple(p[word] for word in words) == figures[p["drafter"]] and p["remarks"] == []
        assert p["ratio"] == pytest.approx(p["tokens"] / p["seconds"] / (15 / p["alone"]["seconds"]))
    seconds = [p["alone"]["seconds"] for p in passes]
    assert seconds[0] == seconds[1] != seconds[2] == seconds[3]


def test_without_the_target_alone_the_first_drafters_answers_stand_before_later_turns():
    with StubEngine(drafted) as fast:
        (p,) = measure(fast)["sets"]["own"]["passes"]
    assert asked(fast) == [A1, a2("quick!"), B1] and fast.most == 1
    assert p["alone"] is None and p["ratio"] is None and p["tau"] == 2.5
    with StubEngine(drafted) as fast, StubEngine(drafted_by_mtp, drafts=2) as mtp:
        measure(fast, mtp=mtp)
    assert asked(fast) == asked(mtp) == [A1, a2("swift"), B1]


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
    with StubEngine(drafted, kind="sglang") as fast, StubEngine(alone, drafts=0, models=[("tiny", None)]) as slow:
        report = measure(fast, slow)
    (p,) = report["sets"]["own"]["passes"]
    assert p["tau"] == 9 / 4 and p["tau_from"] == "tokens and verifications" and p["drafts"] == 4
    assert p["slot_acceptance"] == [] and p["accepted"] is None and p["draft_tokens"] is None and p["remarks"] == []
    assert p["block_size"] is None and report["servers"] == {
        "alone": {"engine": "vllm", "version": "stub 1.0", "model": "tiny"},
        "dflash": {"engine": "sglang", "version": "stub 2.0", "model": "org/tiny"},
    }


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
        ({"fast": {"drafts": 0}}, "dflash: no speculative counters found"),
        ({"fast": {"drafts": 0, "kind": "sglang"}}, "dflash: no speculative counters found"),
        ({"fast": {"kind": "none"}}, "dflash: no speculative counters found"),
        ({"fast": {}, "mtp": {"drafts": 0}}, "mtp: no speculative counters found"),
        ({"fast": {}, "slow": {}}, "alone: found speculative counters"),
        ({"fast": {}, "slow": {"kind": "sglang"}}, "alone: found speculative counters"),
        ({"fast": {"models": [("org/other", "/m/other")]}}, "dflash: found a server of ['org/other'],"),
        ({"fast": {}, "slow": {"models": []}}, "alone: found a server of []"),
    ],
)
def test_a_server_of_another_kind_is_refused_in_one_line(engines, said):
    with ExitStack() as stack, pytest.raises(ValueError) as error:
        measure(**{name: stack.enter_context(StubEngine(drafted, **options)) for name, options in engines.items()})
    assert str(error.value).startswith(f"evaluate.servers.{said}") and "\n" not in str(error.value)


@pytest.mark.parametrize("models", [[("m", "org/Tiny")], [("x", "y"), ("/data/tiny", "/data/tiny")], [("tiny", None)]])
def test_the_target_is_known_by_the_last_part_of_its_name(models):
    with StubEngine(drafted, models=models) as fast:
        assert measure(fast)["servers"]["dflash"]["model"] == models[-1][0]
    assert {body["model"] for body in fast.asked} == {models[-1][0]}


def test_nobody_listens():
    with StubEngine(drafted) as gone:
        pass
    with pytest.raises(OSError, match=r"^evaluate\.servers\.dflash: http://.* does not tell its models \(.*\); is it"):
        measure(gone)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"servers": {"mtp": "localhost:8000"}}, "evaluate.servers.mtp: found 'localhost:8000', expected a base URL"),
        ({"servers": {"mtp": "http://h/v1?x"}}, "evaluate.servers.mtp: found"),
        ({"servers": {"mtp": "http://h", "alone": "ftp://h"}}, "evaluate.servers.alone: found 'ftp://h'"),
        ({"servers": {"a": {"b": "http://h"}}}, "evaluate.servers.a: found {'b'"),  # {a: {b: http://h}}
        ({"servers": {"": "http://h"}}, "evaluate.servers: found the name ''"),
        ({"servers": {"a b": "http://h"}}, "evaluate.servers: found the name 'a b'"),
        ({"servers": {"alone": "http://h"}}, "evaluate.servers: found alone only"),
        ({"concurrency": []}, "evaluate.concurrency: found []"),
        ({"concurrency": [4, 0]}, "evaluate.concurrency: found [4, 0]"),
        ({"concurrency": [4, 4]}, "evaluate.concurrency: found [4, 4]"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(change, said):
    with pytest.raises(ValueError) as error:
        EvaluateConfig(**change)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_servers_are_for_the_stage_that_measures_them(tmp_path):
    servers = "+evaluate.servers={alone: http://HOST:8001/v1, dflash: http://HOST:8002/v1}"  # as in docs/evaluation.md
    with pytest.raises(ValueError, match=r"^evaluate\.servers: found alone, dflash with stage=all, expected stage="):
        helpers.config(tmp_path, servers)
    made = helpers.config(tmp_path, servers, "stage=evaluate")
    assert made.evaluate.servers == {"alone": "http://HOST:8001/v1", "dflash": "http://HOST:8002/v1"}


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
    config.evaluate.concurrency = [3]
    with StubEngine(drafted) as fast, StubEngine(alone, drafts=0) as slow:
        config.evaluate.servers = {"dflash": fast.url.removesuffix("/v1") + "/", "alone": slow.url}
        evaluate_server(config, folder)
    report = read_json(folder / "evaluation-server.json")
    assert report["servers"]["alone"]["engine"] == "vllm" and report["target"] == config.model.target
    own = report["sets"]["own"]
    assert own["settings"] == {
        "template_arguments": {}, "thinking": None, "max_new_tokens": 48, "stop_ids": [END],
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0},
    }  # fmt: skip
    assert "http" not in (folder / "evaluation-server.json").read_text()
    (p,) = own["passes"]
    head, line, _, warning = capsys.readouterr().out.splitlines()[-4:]
    assert warning == "evaluate: warning: own, dflash, 3 at once: 2 conversations were never more requests at a time"
    assert head.split()[:9] == ["set", "prompts", "drafter", "at", "once", "tau", "alone", "drafted", "ratio"]
    speeds = [f"{p['alone']['tokens_per_second']:.1f}", f"{p['tokens_per_second']:.1f}", f"{p['ratio']:.2f}"]
    assert line.split() == ["own", "2", "(3)", "dflash", "3", "2.50", *speeds, "12", "4", "0", "0.75", "0.50", "0.25"]


def test_failed_requests_are_counted_and_end_it_behind_the_report(export, capsys):
    """One refused, one broken, at DFlash's side; one at the target's alone, which two drafters are compared with. The
    rest is reported: A's second turn alone, 4 tokens in verifications that accept 0 and 2; of it, B's one token."""
    config, folder = export
    config.evaluate.concurrency = [1, 2]
    a_second = lambda body: body["prompt"].count(USER) == 2  # noqa: E731
    with (
        StubEngine(drafted, plan=["", "", "500", ""]) as fast,
        StubEngine(drafted_by_mtp, drafts=2) as mtp,
        StubEngine(alone, drafts=0) as slow,
    ):
        fast.refuse = lambda body: a_second(body) and len(fast.asked) > 5
        slow.refuse = lambda body: not a_second(body) and len(slow.asked) > 6
        config.evaluate.servers = {"dflash": fast.url, "mtp": mtp.url, "alone": slow.url}
        with pytest.raises(OSError, match=r"^evaluate\.servers\.dflash: 1 requests failed: ") as error:
            evaluate_server(config, folder)
    assert "\n" not in str(error.value) and len(fast.asked) == 8, "nothing is asked twice"
    first, _, second, other = read_json(folder / "evaluation-server.json")["sets"]["own"]["passes"]
    ((reason, count),) = first["failed"].items()
    assert "500" in reason and count == 1 and "http://1" not in reason and first["alone"]["failed"] == {}
    assert (first["requests"], first["tokens"], first["drafts"], first["accepted"], first["tau"]) == (2, 5, 2, 2, 2.0)
    ((reason, count),) = second["failed"].items()
    assert "too long" in reason and count == 1 and list(second["alone"]["failed"].values()) == [1]
    assert other["failed"] == {} and other["alone"] == second["alone"]
    assert (second["requests"], second["tokens"], second["tau"]) == (2, 8, 1 + 4 / 2)
    told = [line for line in capsys.readouterr().out.splitlines() if "requests failed" in line]
    servers = sorted(line.split(": ")[0].removeprefix("evaluate.servers.") for line in told)
    assert servers == ["alone", "dflash", "dflash"]
    assert all(": 1 requests failed: " in line for line in told) and str(error.value) in told


def test_counters_are_read_to_the_letter():
    """Two processes are summed; accepted tokens are not those of a position, nor the time at which a counter began."""
    with StubEngine(drafted) as fast:
        fast.accepted = [3, 1, 0]
        counts = module.read_counters(httpx, fast.url)
    wanted = {"drafts": 3 + 7 + 5, "accepted": 4 + 7, "draft_tokens": 9 + 7, 0: 2 + 7, 1: 1 + 7, 2: 1 + 7}
    assert {key: value for key, value in counts.items() if value} == wanted
