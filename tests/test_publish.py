"""The Hub gets the drafter's files, byte for byte, and nothing else of the folder or the machine; what fails fails in
one line, whose command repeats it. References: the local files, the sanitised JSON written out, a stub of the Hub that
notes what it is sent. `publish` runs in a process of its own, where the Hub's client finds its settings.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from stub_hub import STEPS, StubHub

from data_prep.files import write_json
from train import publish as module

ROOT = Path(__file__).resolve().parent.parent
REPO, TOKEN, HOST = "me/drafter", "hf_" + "Abc123" * 6, "gpu-17.corp.net"
CLOSED = "http://127.0.0.1:9"  # where nobody listens
EXACT = ("config.json", "evaluation.json", "evaluation.png", "generate.py", "model.py", "model.safetensors",
         "probe.st", "training.png")  # fmt: skip
ALLOWED = {*EXACT, "README.md", "dflash_training.json"}
CARD = """---
base_model: Qwen/Qwen3-8B
---
Trained on chats.jsonl, see [the paper](https://arxiv.org/abs/2602.06036), [Qwen](https://huggingface.co/Qwen/Qwen3-8B).
vllm serve Qwen/Qwen3-8B --speculative-config '{"model": "PATH"}'; then http://localhost:8000/v1
AutoModel.from_pretrained("PATH", trust_remote_code=True)
"""
SCRIPT = f"""
import socket, sys, time
from pathlib import Path
socket.gethostname = lambda: "{HOST}"
time.sleep = lambda seconds: None  # the client's pauses between its tries
from train.publish import publish
try:
    publish(Path(sys.argv[1]), sys.argv[2], "private=true" in sys.argv, "dry_run=true" in sys.argv)
except (ValueError, OSError) as error:
    print(f"error: {{error}}", file=sys.stderr)
    raise SystemExit(1)
"""


@pytest.fixture
def folder(tmp_path):
    """An export of a run with everything that a run may leave there."""
    folder = tmp_path / "runs/one/export"
    folder.mkdir(parents=True)
    for name in ("model.py", "generate.py"):
        (folder / name).write_bytes((ROOT / "dflash" / name).read_bytes())
    for number, name in enumerate(("model.safetensors", "probe.st", "evaluation.png", "training.png")):
        (folder / name).write_bytes(bytes([number, 255, 10, 13]) * (1000 + number))
    write_json(folder / "config.json", {"architectures": ["DFlashDraftModel"], "block_size": 16})
    (folder / "evaluation.json").write_text('{"evaluate": {"sets": ["humaneval"]}, "device": "NVIDIA H200"}')
    (folder / "README.md").write_text(CARD)
    data = {
        "path": "/scratch/me/chats.jsonl",
        "sources": [{"path": "~/more/talks.jsonl"}, {"path": "org/set", "limit": 5}, {"path": "s3://bucket/x/rows"}],
        "server": ["http://gpu-18.corp.net:8000/v1", "http://10.0.0.3:8000/v1"],
    }
    model = {"target": "Qwen/Qwen3-8B", "init_from": "/home/me/released", "taps": [1, 9]}
    config = {"data": data, "cache": {"dir": ".cache", "python": "/opt/vllm/bin/python"}}
    training = {"target_name": "Qwen/Qwen3-8B", "model": model, "data": data, "config": config, "steps": 120}
    write_json(folder / "dflash_training.json", training)
    return folder


def publish(folder, *arguments, url=CLOSED, token=TOKEN):
    """(printed lines, the error or None); what goes wrong is told in one line, and the folder stays as it was."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    kept = {
        k: v for k, v in os.environ.items() if not k.lower().startswith(("hf_", "hugging")) and "proxy" not in k.lower()
    }
    settings = {
        "HF_ENDPOINT": url, "HF_HOME": str(folder.parents[1] / "hf"), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    settings |= {"HF_TOKEN": token} if token else {}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), *arguments], env=kept | settings, cwd=ROOT, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert TOKEN not in done.stdout + done.stderr
    assert TOKEN[:12] not in done.stderr and {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    if done.returncode == 0:
        return done.stdout.splitlines(), None
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and error.startswith("error: "), done.stderr
    return done.stdout.splitlines(), error


def repeated(error):
    """The arguments of the command that an error names."""
    command, words = error.split("python train/run.py ")[1], {}
    for word in shlex.split(command):
        key, _, value = word.partition("=")
        words[key] = value
    assert words.pop("stage") == "push"
    return [words.pop("path"), words.pop("push_to_hub"), *(f"{key}={value}" for key, value in words.items())]


def test_exactly_the_drafters_files_arrive_as_they_are(folder):
    for name in ("state.safetensors", "optimizer.pt", ".env", "model.py.bak", "log.jsonl"):
        (folder / name).write_text("private")
    (folder / "old/step-20").mkdir(parents=True)
    for name in ("config.json", "model-00001-of-00002.safetensors", "step-20/model.safetensors"):
        (folder / "old" / name).write_text("{}")
    with StubHub(TOKEN) as hub:
        printed, error = publish(folder, REPO, url=hub.url)
    assert error is None and hub.commits == 1 and hub.private is False
    assert hub.files.keys() == ALLOWED
    assert {name: hub.files[name] for name in EXACT} == {name: (folder / name).read_bytes() for name in EXACT}
    assert hub.files["README.md"].decode() == CARD.replace('"PATH"', '"me/drafter"')
    assert printed == [
        "publish: left out .env, log.jsonl, model.py.bak, old/, optimizer.pt, state.safetensors",
        f"publish: {folder} is at {hub.url}/{REPO}",
    ]


def test_shards_are_uploaded_and_nothing_is_sent_twice(folder):
    shard = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / shard)
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"fc.weight": shard}})
    with StubHub(TOKEN) as hub:
        assert publish(folder, REPO, url=hub.url)[1] is None
        assert hub.files.keys() == (ALLOWED - {"model.safetensors"}) | {shard, "model.safetensors.index.json"}
        assert publish(folder, REPO, url=hub.url)[1] is None and hub.commits == 1


def test_what_training_tells_names_no_place(folder):
    """Paths and URLs become their last part, servers their number, wherever they stand."""
    with StubHub(TOKEN) as hub:
        publish(folder, REPO, url=hub.url)
    data = {
        "path": "chats.jsonl",
        "sources": [{"path": "talks.jsonl"}, {"path": "org/set", "limit": 5}, {"path": "rows"}],
        "server": 2,
    }
    assert json.loads(hub.files["dflash_training.json"]) == {
        "target_name": "Qwen/Qwen3-8B",
        "model": {"target": "Qwen/Qwen3-8B", "init_from": "released", "taps": [1, 9]},
        "data": data,
        "config": {"data": data, "cache": {"dir": ".cache", "python": "python"}},
        "steps": 120,
    }


def test_an_evaluation_tells_sets_by_name_and_not_where_they_lay(folder):
    told = {"evaluate": {"sets": ["/scratch/me/own.jsonl"], "local": {"gsm8k": "/scratch/me/gsm8k"}}, "device": "H200"}
    write_json(folder / "evaluation.json", told)
    public = json.loads(module.contents_of(folder, REPO, None)["evaluation.json"])
    assert public["evaluate"] == {"sets": ["own.jsonl"], "local": {"gsm8k": "gsm8k"}} and public["device"] == "H200"


def test_what_was_published_can_be_published_again(folder, tmp_path):
    with StubHub(TOKEN) as hub:
        publish(folder, REPO, url=hub.url)
        again = tmp_path / "snapshot"
        again.mkdir()
        for name, content in hub.files.items():
            (again / name).write_bytes(content)
        assert publish(again, REPO, url=hub.url)[1] is None and hub.commits == 1


SECRETS = {
    "a token": ("README.md", f"hf_{'x' * 30}"),
    "an OAuth token": ("evaluation.json", f"hf_oauth_{'x' * 30}"),
    "the token in use": ("generate.py", "another-kind-of-token"),
    "the export's folder": ("README.md", "{folder}/model.safetensors"),
    "the home": ("README.md", "/export/me/x"),
    "the current folder": ("model.py", str(ROOT / "x")),
    "a home": ("config.json", "/home/me/Qwen3-8B"),
    "somebody's folder": ("README.md", "/root/models"),
    "a source": ("README.md", "/scratch/me/chats.jsonl"),
    "this host": ("README.md", HOST),
    "this host, short": ("evaluation.json", "gpu-17"),
    "a server": ("README.md", "gpu-18.corp.net"),
    "a server's address": ("config.json", "10.0.0.3"),
    "another server": ("evaluation.json", "http://elsewhere:8000"),
    "a password": ("README.md", "https://me:word@elsewhere"),
}


@pytest.mark.parametrize("secret", SECRETS)
def test_what_tells_too_much_is_refused(folder, monkeypatch, secret):
    """In one line that names the file, before the Hub is asked anything."""
    name, text = SECRETS[secret]
    text, path = text.format(folder=folder), folder / name
    if name.endswith(".json"):
        write_json(path, json.loads(path.read_text()) | {"note": f"on={text} it was"})
    else:
        path.write_text(f"{path.read_text()}\n# on={text} it was\n")
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    monkeypatch.setenv("HOME", "/export/me")
    monkeypatch.setenv("HF_TOKEN", "another-kind-of-token")
    monkeypatch.setattr(module, "HfApi", lambda **_: pytest.fail("asked the Hub"))
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        module.publish(folder, REPO, private=False, dry_run=False)
    (line,) = str(caught.value).splitlines()
    found = "a token" if "token" in secret else text
    assert line.startswith(f"push_to_hub: found {found} in {path}") and ("token" not in secret or text not in line)


def test_links_relative_paths_and_common_words_tell_of_no_machine(folder, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "drafter")
    text = "https://huggingface.co/tmp/x runs/home/x ../tmp/x tokens/s 10 127.0.0.1 http://localhost:8000 the drafter"
    (folder / "README.md").write_text(CARD + text)
    assert text.encode() in module.contents_of(folder, REPO, None)["README.md"]


def test_a_dry_run_counts_the_bytes_that_would_go(folder):
    """It needs neither network nor token, and refuses what the real one refuses."""
    (folder / "optimizer.pt").write_text("private")
    printed, error = publish(folder, REPO, "dry_run=true", token=None)
    with StubHub(TOKEN) as hub:
        publish(folder, REPO, url=hub.url)
    sizes = {name: len(content) for name, content in hub.files.items()}
    assert error is None and printed[0] == "publish: left out optimizer.pt"
    assert set(printed[1:-1]) == {f"publish: {name} {size:,} bytes" for name, size in sizes.items()}
    assert printed[-1] == f"publish: dry run, {sum(sizes.values()):,} bytes for {REPO}, nothing uploaded"
    (folder / "README.md").write_text("/home/me/x")
    assert "found /home/me/x in" in publish(folder, REPO, "dry_run=true", token=None)[1]


@pytest.mark.parametrize(
    "step, status", [*((step, 403) for step in STEPS), ("create", 500), ("put", 500), ("commit", 0)]
)
def test_a_failure_at_any_step_is_one_line_and_can_be_repeated(folder, step, status):
    private = ["private=true"] if step == "info" or status == 403 else []
    with StubHub(TOKEN, fail=step, status=status, times=99) as hub:
        _, error = publish(folder, REPO, *private, url=hub.url)
        assert step in hub.asked and hub.files == {} and hub.commits == 0
        assert str(folder) in error and "is intact" in error
        assert status == 0 or f" {status} broken for " in error
        assert (status == 403) == ("`hf auth login`" in error)
        hub.fail = None
        path, *arguments = repeated(error)
        assert path == str(folder) and arguments == [REPO, *private]
        assert publish(Path(path), *arguments, url=hub.url)[1] is None
    assert hub.files.keys() == ALLOWED and hub.private is bool(private)
    assert {name: hub.files[name] for name in EXACT} == {name: (folder / name).read_bytes() for name in EXACT}


def test_without_hub_or_token_the_error_says_so(folder):
    _, error = publish(folder, REPO)
    assert "Connection refused" in error and repeated(error) == [str(folder), REPO]
    _, error = publish(folder, REPO, "private=true", token=None)
    assert "set HF_TOKEN or run `hf auth login`" in error and repeated(error) == [str(folder), REPO, "private=true"]
    with StubHub("hf_another") as hub:
        _, error = publish(folder, REPO, url=hub.url)
    assert "401 Invalid username or password." in error and "`hf auth login`" in error and hub.files == {}


def test_the_hubs_answer_may_be_no_json(folder, monkeypatch):
    monkeypatch.setattr(StubHub, "validate", lambda *_: (502, b"<html>Bad gateway</html>"))
    with StubHub(TOKEN) as hub:
        assert "uploading failed: the answer is not JSON;" in publish(folder, REPO, url=hub.url)[1]
    (folder / "README.md").write_text("no metadata")
    monkeypatch.undo()
    with StubHub(TOKEN) as hub:
        assert "400 no metadata" in publish(folder, REPO, url=hub.url)[1]


def test_a_private_drafter_does_not_go_to_a_public_repository(folder):
    with StubHub(TOKEN) as hub:
        hub.private = False
        _, error = publish(folder, REPO, "private=true", url=hub.url)
        assert error.startswith("error: private: me/drafter is public already") and hub.files == {}
        hub.private = True
        assert publish(folder, REPO, "private=true", url=hub.url)[1] is None and hub.files.keys() == ALLOWED


@pytest.mark.parametrize("name", ["", "drafter", "me/", "/drafter", "a/b/c", "me/x y", "me/-x", "me/x.", "https://x/y"])
def test_a_name_that_is_no_repositorys_is_refused(folder, name):
    with pytest.raises(ValueError, match=r"^push_to_hub: found .*, expected me/name$"):
        module.publish(folder, name, private=False, dry_run=True)
    module.check_repository("me/Qwen3-8B_DFlash.v2")


@pytest.mark.parametrize("missing", ["config.json", "dflash_training.json", "model.safetensors", "export"])
def test_a_folder_that_is_no_export_is_refused(folder, missing):
    folder.rename(folder.parent / "gone") if missing == "export" else (folder / missing).unlink()
    with pytest.raises(ValueError, match=f"^path: {re.escape(str(folder))} is no export, expected config.json"):
        module.publish(folder, REPO, private=False, dry_run=True)
