"""The plot of an evaluation, for the card and the README."""

from pathlib import Path


def plot_evaluation(report: dict, path: Path) -> None:
    """tau, speed-up and slot acceptance of each set, as one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(report)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    bars = left.bar(names, [report[name]["tau"] or 0 for name in names], color="#4c72b0")
    left.bar_label(bars, fmt="%.2f")
    left.set(title="tokens per verification (tau)", ylim=(1, None))
    bars = middle.bar(names, [report[name]["ratio"] for name in names], color="#dd8452")
    middle.bar_label(bars, fmt="%.2f")
    middle.axhline(1.0, color="grey", linewidth=1, linestyle="--")
    middle.set(title="speed with drafter / target alone")
    for name in names:
        slots = report[name]["slot_acceptance"]
        right.plot(range(1, len(slots) + 1), slots, marker="o", label=name)
    right.set(title="share of blocks right up to slot", xlabel="slot", ylim=(0, 1))
    right.legend()
    for axis in (left, middle):
        axis.tick_params(axis="x", labelrotation=15)
    figure.savefig(path, dpi=110)
    plt.close(figure)
