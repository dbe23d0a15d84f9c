"""Compares mode `auto` with the best static split in hindsight, on untuned traffic in the simulator.

The best split trains most among the splits that answer 99 % of the requests in time. If no split does, the required
share is the share in time with all devices serving. `auto` learns in the first half hour. Afterwards it is compared
with a split that reached the share in both parts, because a configured split does not change.

    python -m benchmarks.auto_regret [--only NAME ...] [--seeds 110700 110701 ...] [--json FILE]

FILE (default: auto_regret.json beside this script) has a row for each kind and seed. Splits in FILE are not run again,
because no change of `auto` affects them. Each row is written when its run ends.
"""

from __future__ import annotations

import json
import statistics
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._claims import at_least, parser, record
from benchmarks._traffic import KINDS, trace_of
from benchmarks.simulator.simulate import Figures, Setup, run_policy
from scheduler.core.workload import Policy

IN_TIME, LEARNING_S, DEVICES, HOURS = 0.99, 1800, 8, 1.5
Reached = tuple[float, float]
"""Share of the requests in time, and device-hours of training."""


def reached(setup: Setup, figures: Figures) -> dict[str, Reached]:
    """Return share in time and trained device-hours, for the first half hour ("first") and the rest ("after")."""
    arrivals, found, end = setup.requests.arrival_s, {}, int(setup.requests.horizon_s) + 1
    for part, begin_s, end_s in (("first", 0, LEARNING_S), ("after", LEARNING_S, end)):
        met = figures.within[bisect_left(arrivals, begin_s) : bisect_left(arrivals, end_s)]
        found[part] = (sum(met) / max(len(met), 1), figures.trained_device_s(begin_s, end_s) / 3600)
    return found


def best(splits: dict[str, Reached], least: int) -> int:
    """Return the number of serving devices in the best split among those with at least `least` serving devices."""
    possible = min(splits[str(DEVICES)][0], IN_TIME)
    return next(n for n in range(least, DEVICES + 1) if splits[str(n)][0] >= possible)


def compared(row: dict[str, Any]) -> tuple[float, float]:
    """Return, after the first half hour: training by the best split's (NaN if 0), and share in time minus its aim."""
    first, after = row["splits"]["first"], row["splits"]["after"]
    share, hours = after[str(best(after, best(first, 1)))]
    in_time, trained = row["auto"]["after"]
    return trained / hours if hours else float("nan"), in_time - min(share, IN_TIME)


def measured(kind: str, seed: int, splits: dict[str, dict[str, Reached]] | None) -> dict[str, Any]:
    setup = Setup(trace_of(replace(KINDS[kind], seconds=HOURS * 3600), seed), DEVICES)
    if splits is None:
        splits = {"first": {}, "after": {}}
        for serving in range(DEVICES + 1):
            for part, found in reached(setup, run_policy(setup, Policy("split", DEVICES - serving))).items():
                splits[part][str(serving)] = found
    figures = run_policy(setup, Policy("auto"))
    moves = round(3600 * figures.handovers / figures.horizon_s, 2)
    return {"kind": kind, "seed": seed, "moves_per_hour": moves, "auto": reached(setup, figures), "splits": splits}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="*", metavar="NAME", help="only kinds whose name contains one of these")
    options.add_argument("--seeds", nargs="*", type=int, default=[110700])
    options.add_argument("--json", type=Path, default=Path(__file__).with_name("auto_regret.json"), metavar="FILE")
    args = options.parse_args()
    rows = {(row["kind"], row["seed"]): row for row in json.loads(args.json.read_text())} if args.json.exists() else {}
    ratios, margins = [], []
    print(f"{'kind':40}{'seed':>8}{'moves/h':>9}{'trained, of the best':>22}{'in time':>10}")
    for seed in args.seeds:
        for kind in KINDS:
            if args.only and not any(word in kind for word in args.only):
                continue
            row = measured(kind, seed, rows.get((kind, seed), {}).get("splits"))
            rows[kind, seed] = row
            ratio, margin = compared(row)
            in_time = 100 * row["auto"]["after"][0]
            print(f"{kind:40}{seed:8}{row['moves_per_hour']:9.1f}{ratio:22.3f}{in_time:9.2f}%", flush=True)
            ratios.append(ratio)
            margins.append(margin)
            lines = ",\n".join(json.dumps(one) for one in rows.values())
            args.json.write_text(f"[\n{lines}\n]\n")
    mean, worst, short = statistics.fmean(ratios), min(ratios), 100 * min(margins)
    size = f"{len(ratios)} runs of {HOURS:g} h, {DEVICES} devices, after the first half hour"
    print(f"{size}: trained {mean:.3f} of the best split on average, {worst:.3f} at worst; {short:+.2f} points")
    record(
        __file__,
        [
            at_least("`auto`: training over the best split's, mean", size, mean, "x", 1.04),
            at_least("`auto`: share in time beside what is wanted, worst", size, short, "points", -0.1),
        ],
    )


if __name__ == "__main__":
    main()
