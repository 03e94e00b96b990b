"""An export on the Hugging Face Hub: what makes the drafter, in one commit, and nothing that tells of the machine."""

import contextlib
import json
import re
import shlex
import socket
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import CommitOperationAdd, HfApi, get_token

from data_prep.files import read_json

FILES = (
    "config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "model.py",
    "generate.py", "dflash_training.json", "probe.st", "README.md", "evaluation.json", "evaluation.png",
    "training.png",
)  # fmt: skip
PATH_OR_URL = re.compile(r"(~\w*)?/[\w.]|[\w+.-]+://")
TOKEN = r"hf_(?:oauth_)?[A-Za-z0-9]{20,}"
SERVER = r"https?://(?!localhost|127\.0\.0\.1)[^\s/]*[:@][^\s/]+"  # a page has no port; loopback tells of no machine
TOPS = {"home", "mnt", "root", "tmp", "work", "Users"}  # below these, an absolute path is somebody's
START = r"(?<![\w./~])"  # of an absolute path, not of the rest of a link or of a relative one


def check_repository(repo: str) -> None:
    """Raises ValueError for what is no repository's name."""
    if not re.fullmatch(r"\w([\w.-]*\w)?/\w([\w.-]*\w)?", repo, re.ASCII):
        raise ValueError(f"push_to_hub: found {repo}, expected me/name")


def publish(folder: Path, repo: str, private: bool, dry_run: bool) -> None:
    """Upload the export in `folder` to `repo`; dry_run: print what would go and its bytes, without network or token.

    Raises ValueError for what the user must mend, before anything is uploaded, and OSError for what failed on the way,
    with the command that repeats it. Each is one line without the token. The folder stays as it is.
    """
    check_repository(repo)
    again = f"python train/run.py stage=push {shlex.quote(f'path={folder}')} push_to_hub={repo}"
    again += " private=true" if private else ""
    token = None

    @contextlib.contextmanager
    def step(failure: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of many kinds, by the hub's version
            reason = _reason(error, token)
            raise OSError(f"push_to_hub: {failure}: {reason}; {folder} is intact, repeat with: {again}") from None

    if not dry_run:
        with step("no token"):
            token = get_token()
        if token is None:
            raise ValueError(f"push_to_hub: no token found, set HF_TOKEN or run `hf auth login`, then: {again}")
    contents = contents_of(folder, repo, token)
    if left := [path.name + "/" * path.is_dir() for path in sorted(folder.iterdir()) if path.name not in contents]:
        print(f"publish: left out {', '.join(left)}")
    if dry_run:
        sizes = {n: c.stat().st_size if isinstance(c, Path) else len(c) for n, c in contents.items()}
        print(*(f"publish: {name} {size:,} bytes" for name, size in sizes.items()), sep="\n")
        print(f"publish: dry run, {sum(sizes.values()):,} bytes for {repo}, nothing uploaded", flush=True)
        return
    api = HfApi(token=token)
    with step("creating the repository failed"):
        # None leaves it to the organisation, whose repositories may be private by default.
        url = api.create_repo(repo, private=private or None, exist_ok=True)
        exposed = private and not api.model_info(repo).private
    if exposed:
        raise ValueError(f"private: {repo} is public already, expected a new or a private one; nothing was uploaded")
    with step("uploading failed"):  # not by upload_folder, which makes several commits
        files = [CommitOperationAdd(name, content) for name, content in contents.items()]
        api.create_commit(repo, files, commit_message="DFlash drafter")
    print(f"publish: {folder} is at {url}", flush=True)


def contents_of(folder: Path, repo: str, token: str | None) -> dict[str, Path | bytes]:
    """What is uploaded, by name: texts as bytes, with the repository for "PATH", the last parts of absolute paths and
    URLs, the number of servers for their URLs; other files as paths. Raises ValueError for a text that tells too much.
    """
    files = sorted(path for path in folder.glob("*") if path.is_file())
    found = {path.name: path for path in files if any(fnmatchcase(path.name, pattern) for pattern in FILES)}
    weights = [name for name in found if name.startswith("model") and name.endswith(".safetensors")]
    if not weights or not {"config.json", "dflash_training.json"} <= found.keys():
        raise ValueError(f"path: {folder} is no export, expected config.json, dflash_training.json and weights in it")
    texts = {name: path.read_bytes() for name, path in found.items() if path.suffix in (".json", ".md", ".py")}
    if "README.md" in texts:
        texts["README.md"] = texts["README.md"].replace(b'"PATH"', f'"{repo}"'.encode())
    removed, hosts = set(), {socket.gethostname()}
    for name in {"dflash_training.json", "evaluation.json"} & texts.keys():
        told = read_json(found[name])
        if (public := _public(told, removed, hosts)) != told:
            texts[name] = (json.dumps(public, indent=2, sort_keys=True) + "\n").encode()
    _refuse_telling(folder, texts, removed, hosts, token)
    return {name: texts.get(name, path) for name, path in found.items()}


def _refuse_telling(
    folder: Path, texts: dict[str, bytes], removed: set[str], hosts: set[str], token: str | None
) -> None:
    """Raises ValueError for the first text that holds a token, or a path or host of a machine."""
    secret = "|".join([TOKEN, *([re.escape(token)] if token else [])])
    tops = TOPS.union(*(place.parts[1:2] for place in (folder.absolute(), folder.resolve(), Path.cwd(), Path.home())))
    names = {name for host in hosts for name in (host, host.split(".")[0]) if not name.isdigit()} - {"127.0.0.1"}
    # A bare word tells of no machine, and may well stand in a text.
    names = sorted((name for name in names if re.search(r"[\d.-]", name)), reverse=True)
    telling = [
        SERVER,
        rf"{START}/(?:{'|'.join(map(re.escape, tops))})/[^\s\"'`]+",
        *(START + re.escape(text) for text in removed),
        *(rf"(?<![\w.-]){re.escape(name)}(?![\w-])" for name in names),
    ]
    for name, content in texts.items():
        text = content.decode(errors="replace")
        if re.search(secret, text):
            raise ValueError(f"push_to_hub: found a token in {folder / name}, expected none")
        if match := re.search("|".join(telling), text):
            raise ValueError(f"push_to_hub: found {match[0]} in {folder / name}, expected no path or host of a machine")


def _public(value, removed: set[str], hosts: set[str]):
    """A JSON value without absolute paths and URLs, which go to `removed`, and without servers, which go to `hosts`."""
    if isinstance(value, dict):
        servers = value.get("server")
        if isinstance(servers, list):
            hosts.update(urlsplit(server).hostname or server for server in servers)
            value = value | {"server": len(servers)}
        return {key: _public(item, removed, hosts) for key, item in value.items()}
    if isinstance(value, list):
        return [_public(item, removed, hosts) for item in value]
    if isinstance(value, str) and PATH_OR_URL.match(value):
        removed.add(value)
        return Path(urlsplit(value).path if "://" in value else value).name
    return value


def _reason(error: BaseException | None, token: str | None) -> str:
    """One line without the token: the status and the server's words, or those of the client and of what it met."""
    said, hint = [], ""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            said.append(f"{response.status_code} {getattr(error, 'server_message', None) or 'no reason given'}")
            if response.status_code in (401, 403):
                hint = ", is the token of HF_TOKEN or `hf auth login` one that may write?"
            break
        unread = isinstance(error, json.JSONDecodeError)
        said.append("the answer is not JSON" if unread else str(error) or type(error).__name__)
        error = error.__cause__
    line = " ".join(": ".join(dict.fromkeys(said)).split())
    return (line.replace(token, "***") if token else line)[:300] + hint
