"""kill -9 at random moments of a capture and of a regeneration, then again with other processes: nothing is lost,
doubled or altered. References: the bytes of a capture that nobody disturbed, and the stub server's answers, which are a
function of the prompt. Processes are forks of this one, so that torch is imported once.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import run_helpers as helpers
from stub_server import answer
from test_store import files, fork

from data_prep.files import JsonLines
from data_prep.run import PrepConfig, load_config, main

NEW = 34


def config(stage, cache_dir, *overrides):
    own = [f"stage={stage}", f"model.target={helpers.TINY}", f"cache.dir={cache_dir}", "cache.threads=1", *overrides]
    return load_config("data_prep", PrepConfig, ["+model=tiny", *own])


@contextlib.contextmanager
def forks(*jobs):
    """One process a job; all of them end with the block."""
    made = [fork(job) for job in jobs]
    try:
        for process in made:
            process.start()
        yield made
    finally:
        for process in made:
            process.kill()
            process.join()


def joined(processes, timeout=120):
    for process in processes:
        process.join(timeout)
    return [process.exitcode for process in processes]


def wait_for(found, processes, timeout=60):
    end = time.time() + timeout
    while not (seen := found()):
        assert time.time() < end and any(process.is_alive() for process in processes), "nothing came"
        time.sleep(0.002)
    return seen


@pytest.fixture(scope="module")
def whole():
    """(config of the capture, its features folder, its undisturbed bytes, seconds that two workers take)."""
    cache_dir = helpers.folder()
    made = config("capture", cache_dir, f"data.path={helpers.PROMPTS}", "cache.shard_tokens=150")
    job = lambda: main(made)  # noqa: E731
    with forks(job) as processes:
        assert joined(processes) == [0]
    (folder,) = cache_dir.glob("features-*")
    expected = files(folder)
    assert 30 <= sum(name.startswith("shard") for name in expected) <= 60
    shutil.rmtree(folder)
    with forks(job, job) as processes:
        wait_for(lambda: list(folder.glob("*.claim@*")), processes)
        start = time.time()
        wait_for(lambda: (folder / "manifest.json").exists(), processes)
        seconds = time.time() - start
        assert joined(processes) == [0, 0]
    assert files(folder) == expected
    return made, folder, expected, seconds


def test_thirty_kills_of_a_capture(whole):
    """Of both workers, or of one while the other goes on; then one, two or three go on from there."""
    made, folder, expected, seconds = whole
    rng, in_the_midst, job = random.Random(0), 0, lambda: main(made)
    for number in range(30):
        shutil.rmtree(folder)
        with forks(job, job) as processes:
            wait_for(lambda: list(folder.glob("*.claim@*")), processes)
            time.sleep(rng.uniform(0, 0.8 * seconds))
            killed = rng.choice([processes, processes, processes[:1], processes[1:]])
            for process in killed:
                os.kill(process.pid, signal.SIGKILL)
            for process in killed:
                process.join()
            in_the_midst += any(list(folder.glob(f"*@{process.pid}")) for process in killed)
            with forks(*[job] * (1 + number % 3)) as more:
                assert joined(more) == [0] * len(more)
            assert set(joined(processes)) <= {0, -signal.SIGKILL}
        assert files(folder) == expected, number
    print(f"{in_the_midst} of 30 kills left a claim or a half file")
    assert in_the_midst >= 20


@pytest.fixture
def servers(monkeypatch):
    """The URLs of two servers, in processes of their own, that fail, stall and cut what they send at random."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    started = []
    try:
        for seed in (1, 2):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = [sys.executable, helpers.ROOT / "tests/stub_server.py", str(port), str(seed)]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        yield [server.stdout.readline().strip() for server in started]
    finally:
        for server in started:
            server.kill()
            server.wait()
            server.stdout.close()


def test_a_regeneration_that_is_killed_again_and_again(servers, tmp_path):
    """Each row once, in order, with the answer to its own prompt."""
    prompts = [f"{row['messages'][0]['content']} {n}" for n in range(12) for row in JsonLines(helpers.PROMPTS)]
    path, expected = tmp_path / "prompts.jsonl", []
    with path.open("w") as out:
        for i, prompt in enumerate(prompts):
            out.write(json.dumps({"id": f"p/{i}", "prompt": prompt}) + "\n")
            ids, finish = answer([helpers.BOS, helpers.USER, *prompt.encode(), helpers.ASSISTANT], NEW)
            said = bytes(token for token in ids if token < 256).decode()
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": said}]
            about = {"answer_ids": ids, "finish": finish, "num_tokens": len(ids)}
            expected.append({"id": f"p/{i}", "messages": messages, **about})
    known = {row["id"]: row for row in expected}
    urls = f"data.server=[{','.join(servers)}]"
    made = config("regenerate", tmp_path, f"data.path={path}", urls, "data.concurrency=8", f"data.max_new_tokens={NEW}")
    rng, kills, codes, sizes = random.Random(0), 0, [], []
    part_of = lambda: next(tmp_path.glob("answers-*/answers.part.jsonl"), None)  # noqa: E731
    size = lambda: part_of().stat().st_size if part_of() else 0  # noqa: E731
    while 0 not in codes:
        assert len(codes) < 40
        with forks(lambda: main(made)) as (process,):
            if kills < 15:
                before = size()
                wait_for(lambda before=before: size() > before or not process.is_alive(), [process])
                process.join(rng.uniform(0, 0.6))
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                    kills += 1
            codes += joined([process])
        if part_of():
            *lines, _ = part_of().read_bytes().split(b"\n")  # the last one may be half there
            rows = [json.loads(line) for line in lines]
            assert len({row["id"] for row in rows}) == len(rows) and all(row == known[row["id"]] for row in rows)
            sizes.append(len(rows))
    (final,) = tmp_path.glob("answers-*/answers.jsonl")
    assert list(JsonLines(final)) == expected
    assert kills >= 10 and sizes == sorted(sizes) and sizes[0] > 0
