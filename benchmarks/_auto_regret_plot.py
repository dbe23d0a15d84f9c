"""Draws docs/auto-regret.svg: training of `auto` over the best constant split's, by kind of traffic.

    python benchmarks/_auto_regret_plot.py

From auto_regret.json beside this script, after the first half hour of each run.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # there is never a display

from matplotlib import pyplot  # noqa: E402  (the backend must be chosen before)

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.auto_regret import compared  # noqa: E402


def main() -> None:
    found: dict[str, list[float]] = {}
    for row in json.loads((HERE / "auto_regret.json").read_text()):
        ratio, _ = compared(row)
        if ratio == ratio:
            found.setdefault(row["kind"], []).append(ratio)
    kinds = sorted(found, key=lambda kind: statistics.fmean(found[kind]))
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "auto", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(8, 0.34 * len(kinds) + 1.2), layout="constrained")
    axes.barh(range(len(kinds)), [statistics.fmean(found[kind]) for kind in kinds], 0.6)
    axes.axvline(1.0, color="black", linewidth=1, label="best constant split in hindsight")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xlim(left=0.8)
    axes.set_xlabel("training of `auto` over that of the best split")
    axes.legend(loc="lower right")
    figure.savefig(HERE.parent / "docs" / "auto-regret.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
