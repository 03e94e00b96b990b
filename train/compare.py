"""Two evaluations, prompt by prompt: `python train/compare.py A/evaluation.json B/evaluation.json`.

Only conversations that both have are compared, and only where both sides saw the same target, settings, device and
rendered prompts. What the drafter's side does (its weights, block size, sampled proposals) may differ.
"""

import sys
from pathlib import Path

if not __package__:  # run as a script: python put train/ on the path, the packages lie one above
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from data_prep.files import read_json
from train.figures import PromptResult, interval, ratio_of, resample, sums_by_conversation, tau_of

SAME = ("target", "device")  # of the evaluations; and of each set:
SETTINGS = ("template_arguments", "thinking", "sampling", "max_new_tokens", "stop_ids")


def compare(one: dict, other: dict) -> dict[str, dict]:
    """Per set that both have: tau and ratio of each, the other's less the one's with a paired 95 % interval, and on how
    many conversations the other's tau is higher, equal, lower. Raises ValueError, one line, for what does not compare.
    """
    names = [name for name in one["sets"] if name in other["sets"]]
    if not names:
        raise ValueError(f"sets: found {sorted(one['sets'])} and {sorted(other['sets'])}, expected one in common")
    for key in SAME:
        _require_same(key, one.get(key), other.get(key))
    return {name: _compare_set(name, one["sets"][name], other["sets"][name]) for name in names}


def _require_same(what: str, found, other) -> None:
    if found != other:
        raise ValueError(f"{what}: found {found} and {other}, expected the same; evaluate both alike")


def _compare_set(name: str, one: dict, other: dict) -> dict:
    for key in SETTINGS:
        _require_same(f"{name}: {key}", one["settings"].get(key), other["settings"].get(key))
    results = [{(r["id"], r["turn"]): PromptResult(**r) for r in side["per_prompt"]} for side in (one, other)]
    pairs = [(results[0][key], results[1][key]) for key in results[0] if key in results[1]]
    for a, b in pairs:
        if a.turn == 1:
            _require_same(f"{name}: prompt {a.id}, sha256", a.prompt_sha256, b.prompt_sha256)
    pairs = [(a, b) for a, b in pairs if a.prompt_sha256 == b.prompt_sha256]  # a later one holds an answer in bf16
    if not pairs:
        raise ValueError(f"{name}: no prompt in common, expected some of the same ids; evaluate both on the same rows")
    sums = [sums_by_conversation(list(side)) for side in zip(*pairs)]
    taus, ratios = [tau_of(side) for side in sums], [ratio_of(side.sum(dim=0)) for side in sums]
    drawn = resample(torch.cat(sums, dim=1)).split(sums[0].shape[1], dim=1)  # the same conversations of both
    pooled = [tau_of(side.sum(dim=0)) for side in sums]
    return {
        "prompts": len(sums[0]),
        "left_out": len(results[0]) + len(results[1]) - 2 * len(pairs),
        "tau": [float(tau) for tau in pooled],
        "tau_difference": float(pooled[1] - pooled[0]),
        "tau_interval": interval(tau_of(drawn[1]) - tau_of(drawn[0])),
        "ratio": [float(ratio) for ratio in ratios],
        "ratio_difference": float(ratios[1] - ratios[0]),
        "ratio_interval": interval(ratio_of(drawn[1]) - ratio_of(drawn[0])),
        "higher": int((taus[1] > taus[0]).sum()),
        "equal": int((taus[1] == taus[0]).sum()),
        "lower": int((taus[1] < taus[0]).sum()),
    }


def table(sets: dict[str, dict]) -> str:
    """The comparison as one table."""

    def figures(r: dict, what: str) -> str:
        (one, other), (low, high) = r[what], r[f"{what}_interval"]
        return f"{one:5.2f} {other:5.2f} {r[f'{what}_difference']:+6.3f} ({low:+.3f} to {high:+.3f})".ljust(37)

    columns = [f"{what} A, B, B - A (95 %)".ljust(37) for what in ("tau", "ratio")]
    lines = [f"{'set':14} {'prompts':>7}  {' '.join(columns)} higher/equal/lower"]
    for name, r in sets.items():
        won = f"{r['higher']}/{r['equal']}/{r['lower']}"
        lines.append(f"{name:14} {r['prompts']:>7}  {figures(r, 'tau')} {figures(r, 'ratio')} {won}")
        if r["left_out"]:
            lines.append(f"{name}: {r['left_out']} turns without their like in the other file are left out")
    return "\n".join([*lines, "higher/equal/lower: conversations on which B's tau is higher, equal, lower"])


def main(arguments: list[str]) -> None:
    try:
        if len(arguments) != 2:
            raise ValueError(f"found {len(arguments)} arguments, expected A/evaluation.json B/evaluation.json")
        print(table(compare(*(read_json(Path(path)) for path in arguments))))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main(sys.argv[1:])
