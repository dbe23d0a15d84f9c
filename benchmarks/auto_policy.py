"""Mode `auto` on many shapes of load: what it trains and how many requests it serves within the targets, against the
offline oracle and every static split of the same devices.

Beside each row: `pareto` (how `auto` stands to the splits by both figures) and a line per split. "kept" is the part of
the devices' time that serving held, "moved" what hand-overs and their restarts cost; the rest was trained.

    python benchmarks/auto_policy.py [--traces FOLDER] [--only NAME ...] [--no-static] [--json FILE]

FOLDER holds azure2023_conv.csv.gz and azure2023_code.csv.gz (default: ../shared/data/traces); without it only the
synthetic shapes run. Those are made here from a seed and are nobody's tuning set: flat, days of tides, bursts on and
off, ramps, spikes, long prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._claims import Claim, at_least, record
from scheduler.core.workload import Policy
from scheduler.simulator.simulate import Setup, simulate
from scheduler.simulator.trace import Requests, read_requests

TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"


def made(rate: Callable[[float], float], seconds: float, prompt: float, output: float, seed: int) -> Requests:
    """Poisson arrivals at `rate(t)` per second; token counts log-normal around the means."""
    rng, at_s, most = random.Random(seed), 0.0, max(rate(seconds * n / 5000) for n in range(5001))
    arrivals, prompts, outputs = array("d"), array("l"), array("l")
    while (at_s := at_s + rng.expovariate(most)) < seconds:
        if rng.random() * most <= rate(at_s):
            arrivals.append(at_s)
            prompts.append(min(max(int(prompt * rng.lognormvariate(-0.32, 0.8)), 1), 30_000))
            outputs.append(min(max(int(output * rng.lognormvariate(-0.32, 0.8)), 1), 2000))
    first_s = arrivals[0]
    return Requests(array("d", (a - first_s for a in arrivals)), prompts, outputs)


def on_off(on_s: float, off_s: float, high: float, low: float) -> Callable[[float], float]:
    return lambda t: high if t % (on_s + off_s) < on_s else low


def spikes(every_s: float, wide_s: float, high: float, low: float) -> Callable[[float], float]:
    return lambda t: low + high * math.exp(-(((t % every_s) - every_s / 2) ** 2) / (2 * wide_s**2))


SYNTHETIC: dict[str, Callable[[], Requests]] = {
    "flat": lambda: made(lambda t: 12.0, 3600, 1000, 200, 1),
    "tides, two days": lambda: made(lambda t: 4.5 - 4 * math.cos(2 * math.pi * t / 86400), 2 * 86400, 1000, 200, 2),
    "bursts of 2 min every 6": lambda: made(on_off(120, 240, 25, 2), 7200, 1000, 200, 3),
    "bursts of 20 s every 60": lambda: made(on_off(20, 40, 25, 0.5), 3600, 2000, 50, 4),
    "ramps of 20 min": lambda: made(lambda t: 2 + 28 * ((t % 1200) / 1200), 7200, 1000, 200, 5),
    "spikes every 15 min": lambda: made(spikes(900, 20, 40, 3), 7200, 1000, 200, 6),
    "long prompts": lambda: made(lambda t: 1.5 + 1.2 * math.sin(2 * math.pi * t / 1800), 7200, 12_000, 300, 7),
    "sparse": lambda: made(lambda t: 1 / 90, 7200, 1000, 200, 8),
}


def claims(row: dict) -> list[Claim]:
    found = [
        at_least("`auto`: GPU-hours trained, over the oracle's", row["load"], row["oracle_ratio"], "x", 0.95),
        at_least("`auto`: requests in time", row["load"], 100 * row["slo_attainment"], "%", 99),
    ]
    if row["static"]:
        found.append(
            at_least("`auto`: on the Pareto front of the static splits", row["load"], row["on_pareto_front"], "of 1", 1)
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="FOLDER")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="names that contain one of these")
    parser.add_argument("--no-static", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    loads = dict(SYNTHETIC)
    for name in ("conv", "code"):
        path = args.traces / f"azure2023_{name}.csv.gz"
        for scale in (1.0, 3.0) if path.exists() else ():
            loads[f"azure {name} x{scale:g}"] = lambda path=path, scale=scale: read_requests(path, scale=scale)
    rows = []
    print(
        f"{'load':26}{'requests':>9}{'within':>9}{'GPU-h':>8}{'oracle':>8}{'ratio':>7}{'moves/h':>9}"
        f"{'kept':>7}{'moved':>7}{'req/s sim':>11}  pareto"
    )
    for name, make in loads.items():
        if args.only and not any(word in name for word in args.only):
            continue
        requests = make()
        began_s = time.perf_counter()
        result, figures = simulate(Setup(requests), Policy("auto"), static=not args.no_static)
        took_s = time.perf_counter() - began_s
        hours = requests.horizon_s / 3600
        row = {"load": name, "hours": hours, **result}
        # Where the rest went: devices that serving held, and those that nobody had while they changed sides.
        serving = sum(s.serving_devices for s in figures.samples) / max(len(figures.samples), 1)
        row["kept_by_serving_gpu_hours"] = serving * hours
        row["moved_gpu_hours"] = 8 * hours - result["training_gpu_hours"] - row["kept_by_serving_gpu_hours"]
        rows.append(row)
        print(
            f"{name:26}{len(requests):9}{100 * result['slo_attainment']:8.2f}%{result['training_gpu_hours']:8.2f}"
            f"{result['oracle_training_gpu_hours']:8.2f}{result['oracle_ratio']:7.3f}{result['handovers'] / hours:9.1f}"
            f"{row['kept_by_serving_gpu_hours']:7.2f}{row['moved_gpu_hours']:7.2f}"
            f"{len(requests) / took_s:11.0f}  {result['pareto']}",
            flush=True,
        )
        for split in result["static"]:
            served = f"static {split['serve_devices']} serve / {split['train_devices']} train"
            print(f"  {served:33}{100 * split['slo_attainment']:8.2f}%{split['training_gpu_hours']:8.2f}")
        record(__file__, claims(row))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
