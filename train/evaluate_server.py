"""Running servers, vLLM or SGLang, on the evaluation's prompts: tau from their own counters, speed at several loads.

A server may run any drafter (DFlash, EAGLE-3, MTP): it is the engine that counts. Prompts go as token ids with the
settings of evaluate.*. Later turns hold what the target alone said before, or else the first server with a drafter.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path

from data_prep.files import write_json
from data_prep.prepare import Preparation
from data_prep.regenerate import server_version
from train.config import EvaluateConfig, RunConfig
from train.evaluate import evaluation_prompts, next_turn, sha256
from train.report import number, prompts_and_turns, recorded_settings, require_own_model, unlike_training
from train.server import Pass, Server
from train.verify import read_training


def require_drafts(name: str, warm: Pass) -> None:
    """Raise ValueError for a server that does not draft though it should, or the other way round."""
    found = "drafts" in warm.counts or warm.counts["verify_calls"] or warm.counts["averages"]
    if name != "alone" and not found and not warm.failed:
        raise ValueError(
            f"evaluate.servers.{name}: no speculative counters found, expected a server with a drafter; SGLang shows"
            " them with --enable-metrics"
        )
    if name == "alone" and found:
        raise ValueError("evaluate.servers.alone: found speculative counters, expected a server without a drafter")


def figures(fast: Pass, alone: Pass | None) -> dict:
    """Of a pass with the drafter and one without. tau: 1 + accepted / drafts where the engine counts both (also what
    lies behind a stop or the limit), else tokens a verification, else the engine's own average."""
    counts, drafts, tau = fast.counts, fast.counts["drafts"] or fast.counts["verify_calls"], (None, None)
    if counts["drafts"]:
        tau = 1 + counts["accepted"] / drafts, "accepted and drafts"
    elif drafts:  # the prefill gave the first token of each answer
        tau = (fast.tokens - fast.requests) / drafts, "tokens and verifications"
    elif counts["averages"]:
        tau = counts["average"] / counts["averages"], "the engine's average"
    positions = sorted(word for word in counts if isinstance(word, int))
    compared = alone is not None and alone.tokens > 0
    return {
        "block_size": len(positions) + 1 if positions else None,
        "requests": fast.requests,
        "tau": tau[0],
        "tau_from": tau[1],
        "drafts": int(drafts),
        "draft_tokens": int(counts["draft_tokens"]) if positions else None,
        "accepted": int(counts["accepted"]) if positions else None,
        "slot_acceptance": [counts[position] / max(drafts, 1) for position in positions],
        **fast.speed(),
        "alone": alone and alone.speed(),
        "ratio": fast.speed()["tokens_per_second"] / alone.speed()["tokens_per_second"] if compared else None,
    }


def remarks(found: dict, counts: Counter) -> Iterator[str]:
    """What makes the figures of a pass worth less than they look."""
    emitted = found["tokens"] - found["requests"]
    allowed = (found["block_size"] or 1) * found["requests"]  # the last blocks may reach behind the ends
    told = emitted if found["accepted"] is None else found["drafts"] + found["accepted"]
    if (more := max(told - emitted - allowed, counts["generated"] - found["tokens"])) > 0:
        yield f"the engine counted {more:.0f} tokens more than we can have got; does anyone else ask it?"
    if emitted - told > allowed:
        yield f"{emitted - told} of {emitted} tokens came without a draft; tau does not know them"
    if found["tau_from"] == "the engine's average":
        yield "the engine has no counter: tau is its average of the last moments, not that of these prompts"


def measure_servers(config: EvaluateConfig, sets: dict, tokenizer, stops, targets: list[str], follow) -> dict:
    """{"servers": {name: {"engine", "version", "model"}}, "sets": {name: measure_set's}}. sets: first turns, by name;
    follow: see Server.ask."""
    servers, about = {}, {}
    with ExitStack() as stack:
        for name in sorted(config.servers, key=lambda name: name != "alone"):  # alone first, the others as given
            servers[name] = server = stack.enter_context(Server(name, config, tokenizer, stops, targets))
            warm = server.ask([[prompt] for prompt in next(iter(sets.values()), [])[:2]], 1)  # not counted
            require_drafts(name, warm)
            version = server_version(server.url)
            about[name] = {"engine": server.engine, "version": version, "model": server.model}
        report = {name: measure_set(servers, prompts, config.concurrency, follow) for name, prompts in sets.items()}
    return {"servers": about, "sets": report}


def measure_set(servers: dict[str, Server], prompts: list, concurrency: list[int], follow) -> dict:
    """A set at every concurrency: the target alone, if there is such a server, then each drafter's."""
    conversations, passes, alone = [[prompt] for prompt in prompts], [], None
    for at_once in concurrency:
        for name, server in servers.items():
            done = server.ask(conversations, at_once, follow)
            follow = None  # the very first pass found the later turns
            if name == "alone":
                alone = done
                continue
            found = figures(done, alone)
            lines = list(remarks(found, done.counts))
            if at_once > len(conversations):
                lines.append(f"{len(conversations)} conversations were never more requests at a time")
            passes.append({"drafter": name, "concurrency": at_once, **found, "remarks": lines})
    turns = list(chain.from_iterable(conversations))
    asked = {"prompts": len(conversations), "turns": len(turns), "prompts_sha256": sha256([p.ids for p in turns])}
    return asked | {"passes": passes}


def table(sets: dict) -> str:
    """The report as the table that a user reads."""
    head = (
        f"{'set':14} {'prompts':>7} {'drafter':10} {'at once':>7} {'tau':>5} {'alone':>7} {'drafted':>8} {'ratio':>6}"
    )
    lines = [f"{head} {'tokens':>7} {'drafts':>7} {'failed':>6}  slot acceptance"]
    for name, r in sets.items():
        for p in r["passes"]:
            alone = p["alone"] or {"tokens_per_second": None, "failed": {}}
            lines.append(
                f"{name:14} {prompts_and_turns(r):>7} {p['drafter']:10} {p['concurrency']:>7} {number(p['tau']):>5}"
                f" {number(alone['tokens_per_second'], 1):>7} {p['tokens_per_second']:>8.1f} {number(p['ratio']):>6}"
                f" {p['tokens']:>7} {p['drafts']:>7} {sum([*p['failed'].values(), *alone['failed'].values()]):>6}"
                f"  {' '.join(f'{share:.2f}' for share in p['slot_acceptance'])}"
            )
    return "\n".join([*lines, "alone, drafted: tokens/s of all requests together, prefill included"])


def evaluate_server(config: RunConfig, folder: Path) -> None:
    """Measure evaluate.servers on the configured sets; write evaluation-server.json into the export, print the table.

    Raises OSError, after all that, where requests failed.
    """
    require_own_model(config, folder)
    training, preparation = read_training(folder), Preparation(config.model, config.data, config.cache)
    sets, stops, tokenizer = evaluation_prompts(config, preparation), preparation.stops, preparation.tokenizer
    targets = [preparation.target_name(), str(preparation.target), training["target_id"]]
    follow = partial(next_turn, tokenizer, config.data, stops)
    report = measure_servers(config.evaluate, sets, tokenizer, stops, targets, follow)
    report["unlike_training"] = unlike_training(config, training["config"]["data"])
    warnings, failed = [*report["unlike_training"]], Counter()
    for name, r in report["sets"].items():
        r["settings"] = recorded_settings(config, stops)
        alone = {p["concurrency"]: p["alone"] for p in r["passes"] if p["alone"]}  # drafters share it: counted once
        for server, p in [*((p["drafter"], p) for p in r["passes"]), *(("alone", p) for p in alone.values())]:
            failed.update({(server, reason): count for reason, count in p["failed"].items()})
        for p in r["passes"]:
            warnings += [f"{name}, {p['drafter']}, {p['concurrency']} at once: {line}" for line in p["remarks"]]
    write_json(folder / "evaluation-server.json", {"target": targets[0], **report})
    print(table(report["sets"]))
    for line in warnings:
        print(f"evaluate: warning: {line}")
    lines = [f"evaluate.servers.{server}: {n} requests failed: {why}" for (server, why), n in failed.most_common()]
    for line in lines:
        print(line, flush=True)
    if failed:
        raise OSError(lines[0])
