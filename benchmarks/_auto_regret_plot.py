"""Draws docs/auto-regret.svg: training of `auto` over the best constant split's, by kind of traffic.

    python benchmarks/_auto_regret_plot.py [FILE.json ...]

The files are what `auto_regret.py --json` wrote (default: auto_regret.json beside this script).
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


def main() -> None:
    files = [Path(name) for name in sys.argv[1:]] or [HERE / "auto_regret.json"]
    rows = [row for file in files for row in json.loads(file.read_text())]
    parts = {"first": "first half hour, in which it learns", "after": "after it"}
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for part in parts:
            if (one := row[part]) and one["best_hours"]:
                found.setdefault(row["kind"], {}).setdefault(part, []).append(one["auto_hours"] / one["best_hours"])
    kinds = sorted(found, key=lambda kind: statistics.fmean(found[kind].get("after", found[kind]["first"])))
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "auto", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(8, 0.34 * len(kinds) + 1.2), layout="constrained")
    for place, (part, label) in enumerate(parts.items()):
        values = [statistics.fmean(found[kind].get(part, [float("nan")])) for kind in kinds]
        axes.barh([n + 0.2 - 0.4 * place for n in range(len(kinds))], values, 0.38, label=label)
    axes.axvline(1.0, color="black", linewidth=1, label="best constant split in hindsight")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xlim(left=0.8)
    axes.set_xlabel("training of `auto` over that of the best split")
    axes.legend(loc="lower right")
    figure.savefig(HERE.parent / "docs" / "auto-regret.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
