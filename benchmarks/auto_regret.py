"""Mode `auto` against the best constant split in hindsight, on traffic that nobody tuned to.

The best constant is the split with most training among those whose share of requests in time is at least 99 %, or,
where that cannot be had, what all devices together reach. A row says what `auto` trained over what that split trained,
and both shares in time.

    python benchmarks/auto_regret.py [--only NAME ...] [--seeds 1 2 3] [--drawn N] [--hours 1] [--devices 8]

--drawn adds N kinds whose every parameter is drawn from the seed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._claims import at_least, record
from scheduler.core.workload import Policy
from scheduler.simulator.simulate import Setup, run_policy
from scheduler.simulator.traffic import KINDS, Traffic, at_scale, drawn, made

IN_TIME = 0.99


@dataclass(frozen=True)
class Row:
    """ratio: what `auto` trained over what the best constant trained; None if no constant trains and is in time."""

    kind: str
    seed: int
    requests: int
    auto_in_time: float
    auto_hours: float
    handovers_per_hour: float
    best_serving: int
    best_in_time: float
    best_hours: float

    @property
    def ratio(self) -> float | None:
        return self.auto_hours / self.best_hours if self.best_hours else None


def measured(name: str, kind: Traffic, seed: int, devices: int) -> Row:
    requests = made(kind, seed)
    setup = Setup(requests, gpus_per_node=devices)
    auto = run_policy(setup, Policy("auto"))
    best = run_policy(setup, Policy("split", 0))
    serving, need = devices, min(IN_TIME, best.slo_attainment)
    for count in range(1, devices):  # fewer devices in serving are in time no more often, and train more
        split = run_policy(setup, Policy("split", devices - count))
        if split.slo_attainment >= need:
            serving, best = count, split
            break
    hours = max(requests.horizon_s, 1.0) / 3600
    return Row(
        name,
        seed,
        len(requests),
        auto.slo_attainment,
        auto.training_gpu_hours,
        auto.handovers / hours,
        serving,
        best.slo_attainment,
        best.training_gpu_hours,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="kinds that contain one of these")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--drawn", type=int, default=0, metavar="N")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    kinds = {
        name: at_scale(kind, args.devices)
        for name, kind in KINDS.items()
        if not args.only or any(word in name for word in args.only)
    }
    for n in range(args.drawn):
        kinds[f"drawn {n}"] = drawn(random.Random(args.seeds[0] * 1_000_003 + n), args.devices)
    print(
        f"{'kind':32}{'seed':>5}{'requests':>9}{'in time':>9}{'hours':>8}{'moves/h':>9}{'best':>6}{'in time':>9}"
        f"{'hours':>8}{'ratio':>8}"
    )
    rows = []
    for name, kind in kinds.items():
        for seed in args.seeds:
            row = measured(name, replace(kind, seconds=args.hours * 3600), seed, args.devices)
            rows.append(row)
            ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
            print(
                f"{name:32}{seed:5}{row.requests:9}{100 * row.auto_in_time:8.2f}%{row.auto_hours:8.2f}"
                f"{row.handovers_per_hour:9.1f}{row.best_serving:6}{100 * row.best_in_time:8.2f}%{row.best_hours:8.2f}"
                f"{ratio:>8}",
                flush=True,
            )
    ratios = [row.ratio for row in rows if row.ratio is not None]
    short = [min(IN_TIME, row.best_in_time) - row.auto_in_time for row in rows]
    if ratios:
        print(f"ratio: worst {min(ratios):.3f}, mean {statistics.fmean(ratios):.3f} of {len(ratios)}")
    print(f"below the share in time of the best constant, or 99 %: worst {100 * max(short):.2f} points")
    size = f"{len(rows)} runs of {args.hours:g} h, {args.devices} devices"
    if ratios:
        record(
            __file__,
            [
                at_least("`auto`: training over the best constant's, worst", size, min(ratios), "x", 0.99),
                at_least("`auto`: training over the best constant's, mean", size, statistics.fmean(ratios), "x", 1.05),
                at_least(
                    "`auto`: share in time, worst against 99 % or what is possible",
                    size,
                    -100 * max(short),
                    "points",
                    -0.1,
                ),
            ],
        )
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
