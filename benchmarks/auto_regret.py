"""Mode `auto` against the best constant split in hindsight, on traffic that nobody tuned to.

The best constant is the split with most training among those whose share of requests in time is at least 99 %, or,
where that cannot be had, what all devices together reach. A row says what `auto` trained over what that split trained,
and both shares in time: in the first half hour, in which it learns, and after it. Each of the two has its own best
constant.

    python benchmarks/auto_regret.py [--only NAME ...] [--new] [--seeds 1 2 3] [--drawn N] [--hours 1.5] [--devices 8]
        [--processes N] [--every] [--rows FILE] [--json FILE] [--splits-of FILE]

--every runs all splits instead of a bisection, and the oracle. --rows appends a line for each run, and does not run
again what it has there: a run that was cut goes on. --drawn adds N kinds whose every parameter is drawn from the first
seed; with `--only -` they are all there is. --splits-of runs `auto` alone again, on what --json once wrote of the same
kinds, and takes the splits from there: a tenth of the time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._claims import at_least, record
from benchmarks._regret import LEARNING_S, Row, Window, measured, window
from benchmarks._traffic import KINDS, NEW, SEVERAL, Traffic, at_scale, drawn, made
from scheduler.core.workload import Policy
from scheduler.simulator import oracle
from scheduler.simulator.simulate import Figures, Setup, run_policy
from scheduler.simulator.trace import Requests, merged

Job = tuple[str, list[Traffic], int]


@contextmanager
def mapped(processes: int) -> Iterator[Callable[..., Iterator[Row]]]:
    if processes <= 1:
        yield map
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def wrong(part: Window, start_up: bool) -> bool:
    """Whether more was lost than `auto` promises."""
    return part.lost(start_up) > 0.01 or part.late(start_up) > 0.1


def show(row: Row) -> str:
    text = f"{row.kind:40}{row.seed:4}{row.requests:8}{row.handovers_per_hour:8.1f}"
    for part in (row.first, row.after):
        if part is not None:
            ratio = "" if part.ratio is None else f"{part.ratio:.3f}"
            best = "-" if part.best_serving is None else part.best_serving
            text += (
                f"  |{100 * part.auto_in_time:7.2f}%{part.auto_hours:7.2f}{best:>5}{100 * part.best_in_time:8.2f}%"
                f"{part.best_hours:7.2f}{ratio:>7}"
            )
    return text


def bound_hours(setup: Setup, figures: Figures, ends: range) -> float:
    """Device-hours that no scheduler exceeds with as many of this part's requests in time, even one that knows the
    future and has nothing left to serve from before."""
    parts, good, count = [], 0, 0
    for name, requests in setup.named().items():
        first, last = (bisect_left(requests.arrival_s, at_s) for at_s in (ends.start, ends.stop))
        good, count = good + sum(figures.within[name][first:last]), count + last - first
        at_s = array("d", (one - ends.start for one in requests.arrival_s[first:last]))
        parts.append(Requests(at_s, requests.prompt[first:last], requests.output[first:last]))
    requests = merged(parts)
    seconds = min(ends.stop, setup.horizon_s) - ends.start
    bound_s = setup.devices * (seconds - requests.horizon_s)
    if count:
        bound_s += oracle.training_device_s(
            requests,
            setup.engine,
            setup.times,
            devices=setup.devices,
            jobs=None,
            attainment=good / count,
            slo_ttft_s=setup.slo_ttft_s,
            slo_tpot_s=setup.slo_tpot_s,
        )
    return bound_s / 3600


def again(row: Row, models: list[Traffic], devices: int, every: bool) -> Row:
    """The row with `auto` as it is now and its splits as they were: a split depends on no policy. What a row has of the
    oracle and of all devices stays only where `every` asks for it."""
    first, *others = [made(kind, row.seed + 7919 * n) for n, kind in enumerate(models)]
    setup = Setup(first, {f"model {n + 2}": one for n, one in enumerate(others)}, gpus_per_node=devices)
    traces = setup.named()
    if sum(map(len, traces.values())) != row.requests:
        raise ValueError(f"{row.kind}, seed {row.seed}: the traffic is another now")
    auto, end = run_policy(setup, Policy("auto")), int(setup.horizon_s) + 1
    full = run_policy(setup, Policy("split", 0)) if every else auto

    def part(before: Window, ends: range) -> Window:
        # Against itself: `auto` in this part, and what of it all devices would not have been late with.
        itself = window(traces, auto, lambda n: full if n == devices else auto, devices, ends, every=every)
        found = {name: getattr(itself, name) for name in ("auto_in_time", "auto_hours", "avoidable")}
        return replace(before, **found, oracle_hours=bound_hours(setup, auto, ends) if every else None)

    learned = min(int(LEARNING_S), end)
    after = row.after and part(row.after, range(learned, end))
    handovers_per_hour = 3600 * auto.handovers / max(setup.horizon_s, 1.0)
    return replace(row, handovers_per_hour=handovers_per_hour, first=part(row.first, range(learned)), after=after)


def _one(job: Job, devices: int, every: bool, before: dict[tuple[str, int], Row]) -> Row:
    name, models, seed = job
    if before:
        return again(before[name, seed], models, devices, every)
    return measured(models, devices, name, seed, bound=bound_hours if every else None)


def _row(row: dict[str, Any]) -> Row:
    return Row(**row | {part: row[part] and Window(**row[part]) for part in ("first", "after")})


def _read(file: Path) -> list[Row]:
    return [_row(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="kinds that contain one of these")
    parser.add_argument("--new", action="store_true", help="the further kinds, instead of the others")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--drawn", type=int, default=0, metavar="N")
    parser.add_argument("--hours", type=float, default=1.5)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--rows", metavar="FILE", type=Path)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--splits-of", metavar="FILE", type=Path)
    args = parser.parse_args()
    one_model = {name: (name,) for name in KINDS}
    kinds = {
        name: [at_scale((KINDS | NEW)[one], args.devices) for one in names]
        for name, names in ({name: (name,) for name in NEW} if args.new else one_model | SEVERAL).items()
        if not args.only or any(word in name for word in args.only)
    }
    for n in range(args.drawn):
        kinds[f"drawn {n}"] = [drawn(random.Random(args.seeds[0] * 1_000_003 + n), args.devices)]
    jobs: list[Job] = [
        (name, [replace(kind, seconds=args.hours * 3600) for kind in models], seed)
        for seed in args.seeds
        for name, models in kinds.items()
    ]
    part = f"  |{'in time':>8}{'hours':>7}{'best':>5}{'in time':>9}{'hours':>7}{'ratio':>7}"
    print(f"{'':60}  |{'first half hour':43}  |after it")
    print(f"{'kind':40}{'seed':>4}{'requests':>8}{'moves/h':>8}{part}{part}")
    rows = _read(args.rows) if args.rows else []
    done = {(row.kind, row.seed) for row in rows}
    jobs = [job for job in jobs if (job[0], job[2]) not in done]
    before = {}
    if args.splits_of:
        before = {(row.kind, row.seed): row for row in map(_row, json.loads(args.splits_of.read_text()))}
        if missing := [job[0] for job in jobs if (job[0], job[2]) not in before]:
            parser.error(f"{args.splits_of} has no splits of {missing[0]!r} with all of these seeds")
    with mapped(args.processes) as run:
        for row in run(partial(_one, devices=args.devices, every=args.every, before=before), jobs):
            rows.append(row)
            print(show(row), flush=True)
            if args.rows:
                with args.rows.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    size = f"{len(rows)} runs of {args.hours:g} h, {args.devices} devices"
    for name, parts in (
        ("first half hour", [row.first for row in rows]),
        ("after half an hour", [row.after for row in rows if row.after is not None]),
    ):
        ratios = [one.ratio for one in parts if one.ratio is not None]
        if not ratios:
            continue
        worst, mean, short = min(ratios), statistics.fmean(ratios), max(one.short for one in parts)
        print(
            f"{name}: ratio worst {worst:.3f}, mean {mean:.3f} of {len(ratios)}, "
            f"{sum(ratio < 0.99 for ratio in ratios)} below 0.99; "
            f"in time at worst {short:.2f} points below 99 % or what is possible; "
            f"a hundredth or a tenth of a point lost on {sum(wrong(one, start_up=False) for one in parts)} of them, "
            f"and more than the start-up cost on {sum(wrong(one, start_up=True) for one in parts)}"
        )
        record(
            __file__,
            [
                at_least(f"`auto`: training over the best constant's, worst, {name}", size, worst, "x", 0.99),
                at_least(f"`auto`: training over the best constant's, mean, {name}", size, mean, "x", 1.05),
                at_least(f"`auto`: share in time below what is allowed, {name}", size, -short, "points", -0.1),
            ],
        )
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
