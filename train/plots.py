"""Plots for the card and the README."""

import json
from pathlib import Path


def plot_evaluation(report: dict, path: Path) -> None:
    """Of each set: tau and speed-up with their intervals, slot acceptance, and where the time goes; as one PNG."""
    plt = _pyplot()
    names = list(report)
    figure, ((left, right), (speed, time)) = plt.subplots(2, 2, figsize=(11, 7.4), constrained_layout=True)
    bars = left.bar(names, [report[name]["tau"] or 0 for name in names], color="#4c72b0", **_spread(report, "tau"))
    left.bar_label(bars, fmt="%.2f", label_type="center", color="white")
    left.set(title="tokens per verification (tau)", ylim=(1, None))
    bars = speed.bar(names, [report[name]["ratio"] for name in names], color="#dd8452", **_spread(report, "ratio"))
    speed.bar_label(bars, fmt="%.2f", label_type="center", color="white")
    speed.axhline(1.0, color="grey", linewidth=1, linestyle="--")
    speed.set(title="speed with drafter / target alone")
    for name in names:
        slots = report[name]["slot_acceptance"]
        right.plot(range(1, len(slots) + 1), slots, marker="o", label=name)
    right.set(title="share of blocks right up to slot", xlabel="slot", ylim=(0, 1))
    below = [0.0] * len(names)
    for part, colour in (("prefill", "#8c8c8c"), ("draft", "#dd8452"), ("verify", "#4c72b0")):
        shares = [report[name]["time_shares"][part] for name in names]
        time.bar(names, shares, bottom=below, color=colour, label=part)
        below = [low + share for low, share in zip(below, shares)]
    time.set(title="share of the time with drafter", ylim=(0, 1))
    for axis in (right, time):
        axis.legend()
    for axis in (left, speed, time):
        axis.tick_params(axis="x", labelrotation=15)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_training(log: Path, path: Path) -> None:
    """Loss and tau over the steps of a run's log.jsonl, as one PNG."""
    plt = _pyplot()
    values = [json.loads(line) for line in log.read_text().splitlines()]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for axis, name in ((left, "loss"), (right, "tau_anchor"), (right, "heldout/tau_anchor"), (right, "heldout/tau")):
        points = [(v["step"], v[name]) for v in values if name in v]
        axis.plot(*zip(*points) if points else ((), ()), label=name.replace("heldout/", "held out: "))
    left.set(title="training loss", xlabel="step")
    right.set(title="tokens per verification", xlabel="step")
    right.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_ablations(found: dict[str, list[dict]], path: Path) -> None:
    """Held-out tau of each kind of run; dots are seeds."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(9, 3.6), constrained_layout=True)
    for place, measured in enumerate(found.values()):
        taus = [m["tau"] for m in measured]
        axis.bar(place, sum(taus) / len(taus), color="#4c72b0")
        axis.plot([place] * len(taus), taus, "o", color="#dd8452")
    axis.set_xticks(range(len(found)), list(found))
    axis.set(title="tokens per verification (tau) on held-out rows", ylim=(1, None))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _spread(report: dict, name: str) -> dict:
    """Error bars of a figure, from its interval."""
    around = [[abs(r[f"{name}_interval"][side] - (r[name] or 0)) for r in report.values()] for side in (0, 1)]
    return {"yerr": around, "capsize": 3, "ecolor": "#333333"}
