"""What foresight is worth: the most that an online policy trains which knows the next w seconds, for several w.

In the fluid model of `benchmarks/_foresight.py`, each policy at the price at which one hundredth of the work is
late. Figures are training over that of the best constant split of the same model, so that `auto`'s over the best split
of the simulator (`auto_regret.py`) can be held beside them. Infinity is the optimum: what lies between a row's last
columns only foresight can give.

    python benchmarks/auto_foresight.py [--only NAME ...] [--seeds 1 2] [--hours 1] [--devices 8] [--ahead 0 1.2 ...]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._foresight import Box, Foresight, Reached, work_of
from benchmarks._traffic import KINDS, at_scale, made
from scheduler.simulator.engine import EngineModel

LATE = 0.01
_TRIALS = 6
_CHEAPEST, _DEAREST = 0.3, 3000.0


def at_the_allowance(policy: Foresight, ahead_s: float) -> Reached:
    """At the lowest price at which no more than the allowed share is late: bisection on its logarithm."""
    low, high = math.log(_CHEAPEST), math.log(_DEAREST)
    best = policy.reached(ahead_s, _DEAREST)
    for _ in range(_TRIALS):
        middle = (low + high) / 2
        found = policy.reached(ahead_s, math.exp(middle))
        if found.late <= LATE:
            high = middle
            best = max(best, found, key=lambda one: one.trained)
        else:
            low = middle
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="kinds that contain one of these")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--ahead", nargs="*", type=float, default=[0, 1.2, 2.4, 4.8, 9.6, 30, math.inf], metavar="S")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    box, model, rows = Box(args.devices), EngineModel(), []
    print(f"{'kind':32}{'seed':>5}{'best split':>12}" + "".join(f"{f'w={ahead:g}':>8}" for ahead in args.ahead))
    for name, kind in KINDS.items():
        if args.only and not any(word in name for word in args.only):
            continue
        kind = replace(at_scale(kind, args.devices), seconds=args.hours * 3600)
        for seed in args.seeds:
            work, *others = (work_of(made(kind, seed + 7919 * n), model, box.step_s, tpot_s=0.1) for n in range(3))
            policy = Foresight(work, others, box)
            splits = [policy.split(serving) for serving in range(1, args.devices + 1)]
            split = next((one for one in splits if one.late <= LATE), splits[-1])
            found = {ahead: at_the_allowance(policy, ahead) for ahead in args.ahead}
            row = {"kind": name, "seed": seed, "split_hours": split.trained / 3600, "split_late": split.late}
            row["ahead"] = {
                f"{ahead:g}": {"hours": one.trained / 3600, "late": one.late, "changes": one.changes}
                for ahead, one in found.items()
            }
            rows.append(row)
            ratios = "".join(
                f"{one.trained / split.trained:8.3f}" if split.trained else f"{one.trained / 3600:7.2f}h"
                for one in found.values()
            )
            late = "" if all(one.late <= LATE for one in found.values()) else "  more than the allowance late"
            print(f"{name:32}{seed:5}{split.trained / 3600:8.2f} h  {ratios}{late}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
