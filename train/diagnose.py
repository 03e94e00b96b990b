"""The doctor: on which rung of the ladder from cache to engine is acceptance lost?

One drafter, the same held-out prompts, five rungs; each differs from the one above it by one thing:

    cached    tau walked on the stored answers, on the features of the cache
    live      the same, on features that the target computes now
    loop      our decoding loop with the checkpoint's weights, on prompts as they are rendered now
    export    the loop with the export, as a user loads it
    engine    a running server, where `diagnose.server` names one: tau from its counters

A fall of more than LOST of what the rung above gained (tau - 1) is where to look first. The first two rungs walk the
same blocks, and the next two ask the same prompts: a small fall tells there. From the second to the third the target
writes its answers anew, which moves tau a little in any case.
"""

from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoModel

from data_prep.config import Answers, CacheMode
from data_prep.files import read_json
from data_prep.prepare import Preparation
from data_prep.prompts import prompt_of
from data_prep.regenerate import render
from data_prep.store import MANIFEST, Online, Store
from dflash.generate import generate
from dflash.target import default_device, load_ends
from train import checkpoint
from train.config import RunConfig
from train.data import split_rows
from train.evaluate import heldout_measures
from train.server import read_counters
from train.verify import TRAINING

LOST = {"live": 0.05, "loop": 0.2, "export": 0.05, "engine": 0.1}  # shares of tau - 1
SUSPECTS = {
    "cached": "the training itself: too few rows or steps, or a cache whose features do not belong to its tokens",
    "live": "the cache: other taps, another target, revision, precision or quantisation than now",
    "loop": "the prompts: another chat template, system prompt or thinking mode than in training; sampled answers",
    "export": "the export: config or weights; run stage=verify on it",
    "engine": "the engine: its flags (number of drafts, thinking mode), its target's quantisation, its version",
}


def diagnose(config: RunConfig) -> dict:
    """Print tau on each rung, and name the first where it falls. path: an export, with its checkpoint beside it.

    Returns {"taus": {rung: tau}, "lost": rung or None}. Raises ValueError for a path that is no such export.
    """
    if config.path is None or not (config.path / TRAINING).exists():
        raise ValueError(f"path: found {config.path}, expected the folder of an export")
    saved = config.path.parent / "checkpoints" / read_json(config.path / TRAINING)["checkpoint"]["name"]
    if not (saved / "trainer.json").exists():
        raise ValueError(f"path: the checkpoint {saved} of this export is not there, and it is two rungs of the ladder")
    preparation = Preparation(config.model, config.data, config.cache)
    store, dtype = _store(preparation), getattr(torch, config.engine.dtype)
    held = split_rows(store, config.data.heldout)[1][: config.diagnose.prompts]
    taus = {}

    def tell(rung: str, tau: float) -> None:
        taus[rung] = tau
        print(f"diagnose: {rung:8} tau {tau:.3f}", flush=True)

    drafter = checkpoint.load_drafter(saved, dtype).to(default_device())
    ends = load_ends(
        preparation.target, preparation.drafter, dtype=dtype, revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
    )  # fmt: skip
    if config.cache.mode == CacheMode.offline:
        trained = checkpoint.load_drafter(saved, dtype, folded=False).to(default_device())
        tell("cached", heldout_measures(trained, ends, store, held, config)["tau"])
    with preparation.running_target() as run:
        live = Online(preparation.rows_folder, run)
        tell("live", heldout_measures(drafter, ends, live, held, config)["tau"])
        if config.cache.mode == CacheMode.offline:
            print(f"diagnose: features, kept and live, differ by {_feature_errors(store, live, held[0], preparation)}")
    prompts, different = _prompts(preparation, store, held)
    target = preparation.load_target(config.engine.dtype)
    for rung, model in (("loop", drafter), ("export", _load_export(config.path, dtype))):
        tell(rung, _tau(target, model, prompts, preparation.stops, config))
    if server := config.diagnose.server:
        tell("engine", _engine_tau(server, preparation.target_name(), prompts, preparation.stops, config))
    lost = first_fall(taus)
    if different:
        print(f"diagnose: {different} of {len(prompts)} prompts are not rendered to the tokens that stand in the cache")
    if lost is None:
        print("diagnose: no rung loses much of what the one above it gains")
    else:
        print(f"diagnose: acceptance is lost at `{lost}`. Suspects: {SUSPECTS[lost]}")
    return {"taus": taus, "lost": lost}


def first_fall(taus: dict[str, float]) -> str | None:
    """The first rung that loses more than LOST of what the one above gains; the first of all where it gains nothing."""
    rungs = list(taus)
    if taus[rungs[0]] - 1 < 0.05:
        return rungs[0]
    return next((b for a, b in pairwise(rungs) if taus[b] - 1 < (1 - LOST[b]) * (taus[a] - 1)), None)


def _store(preparation: Preparation) -> Store:
    """The cache that training read."""
    if preparation.cache.mode == CacheMode.online:
        return preparation.encode()
    if not (preparation.features_folder / MANIFEST).exists():
        raise ValueError(
            f"cache.dir: no {preparation.features_folder} found: cache, target, tokenizer, template or data are not"
            " those of the training, which is a diagnosis of its own; give what differs, or keep the cache"
        )
    return Store(preparation.features_folder)


def _feature_errors(store: Store, live: Online, row: int, preparation: Preparation) -> str:
    """Of one row, as shares of their norm, tap by tap; where features were packed, of what the codec gives."""
    fresh_TF = store.codec.decode(store.codec.encode(live.row(row).features_TF).cpu()).float()
    kept_TF = store.row(row).features_TF.float()
    parts = len(preparation.taps) if store.codec.rank is None else 1
    pairs = zip(kept_TF.chunk(parts, dim=-1), fresh_TF.chunk(parts, dim=-1))
    return " ".join(f"{float((a - b).norm() / b.norm()):.3f}" for a, b in pairs)


def _prompts(preparation: Preparation, store: Store, held: list[int]) -> tuple[list[list[int]], int]:
    """The held-out rows' prompts as they are rendered now, and how many of them the cache has otherwise."""
    wanted = {store.row_id(i): store.row(i, features=False).ids_T.tolist() for i in held}
    prompts, different = [], 0
    for row in preparation.rows[0]:
        if (name := row["id"]) in wanted and "messages" in row:
            messages = prompt_of(row) if preparation.data.answers == Answers.target else row["messages"][:-1]
            ids = render(preparation.tokenizer, messages, preparation.data, row.get("tools"))
            different += wanted[name][: len(ids)] != ids
            prompts.append(ids)
    if not prompts:
        raise ValueError("data.path: none of the held-out rows has messages, expected prompts that can be asked again")
    return prompts, different


def _load_export(path: Path, dtype: torch.dtype):
    if (path / "model.py").exists():
        return AutoModel.from_pretrained(path, trust_remote_code=True, dtype=dtype).to(default_device()).eval()
    raise ValueError(f"path: {path} is not in z-lab's format, expected runs/NAME/export")


def _tau(target, drafter, prompts, stops, config: RunConfig) -> float:
    emitted = steps = 0
    for ids in prompts:
        run = generate(
            target, torch.tensor([ids], device=target.device), config.data.max_new_tokens, drafter, stop_token_ids=stops
        )
        emitted, steps = emitted + sum(run.accepted), steps + len(run.accepted)
    return emitted / max(steps, 1)


def _engine_tau(server: str, model: str, prompts, stops, config: RunConfig) -> float:
    """From vLLM's counters around the same prompts: accepted tokens over drafts, and the bonus token."""
    import httpx

    url = server.rstrip("/")
    try:
        with httpx.Client(timeout=600) as client:
            before = read_counters(client, url)
            for ids in prompts:
                body = {"model": model, "prompt": ids, "max_tokens": config.data.max_new_tokens, "temperature": 0}
                client.post(f"{url}/completions", json=body | {"stop_token_ids": sorted(stops)}).raise_for_status()
            counted = read_counters(client, url)
            counted.subtract(before)
    except httpx.HTTPError as error:
        raise OSError(f"diagnose.server: {url} failed ({error}); is it the base URL, /v1 included?") from None
    if not counted["drafts"]:
        raise ValueError(f"diagnose.server: {url} counted no drafts, expected a vLLM server with a drafter")
    return 1 + counted["accepted"] / counted["drafts"]
