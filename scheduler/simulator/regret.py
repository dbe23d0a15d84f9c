"""Compares `auto` with the best constant split in hindsight, before and after it has learned.

The best constant is the split with most training among those whose share of requests in time is at least 99 %, or,
where that cannot be had, what all devices together reach. It is found by bisection: with more devices in serving no
fewer requests are in time, and less is trained. What comes after the learning is compared with a split that is in time
in both parts: a number in a configuration file stays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler.core.workload import Policy
from scheduler.simulator.simulate import Figures, Setup, run_policy
from scheduler.simulator.trace import Requests
from scheduler.simulator.traffic import Traffic, made

IN_TIME = 0.99
LEARNING_S = 1800.0


@dataclass(frozen=True)
class Window:
    """Part of a run. in_time: shares of the requests that arrived in it. best_serving: devices with which the best
    constant serves; None if none trains and is in time. ratio: what `auto` trained over what that constant trained."""

    requests: int
    auto_in_time: float
    auto_hours: float
    best_serving: int | None
    best_in_time: float
    best_hours: float

    @property
    def ratio(self) -> float | None:
        return self.auto_hours / self.best_hours if self.best_serving is not None and self.best_hours else None

    @property
    def short(self) -> float:
        """Points of requests below 99 %, or below what all devices together reach. One request is always free: it is
        more than a hundredth of a few."""
        free = 1 / max(self.requests, 1)
        return 100 * max(min(IN_TIME, self.best_in_time) - self.auto_in_time - free, 0.0)


@dataclass(frozen=True)
class Row:
    """One trace. after: None if it is no longer than the first window."""

    kind: str
    seed: int
    requests: int
    handovers_per_hour: float
    first: Window
    after: Window | None


def window(
    traces: dict[str, Requests],
    auto: Figures,
    split: Callable[[int], Figures],
    devices: int,
    ends: range,
    at_least: int = 1,
) -> Window:
    """split: the run with so many devices in serving. ends: seconds. at_least: devices that earlier requests needed."""
    edges = {
        name: (bisect_left(requests.arrival_s, ends.start), bisect_left(requests.arrival_s, ends.stop))
        for name, requests in traces.items()
    }

    def in_time(figures: Figures) -> float:
        """Of the model that fares worst."""
        shares = [
            sum(figures.within[name][first:last]) / (last - first)
            for name, (first, last) in edges.items()
            if last > first
        ]
        return min(shares, default=1.0)

    def least(share: float) -> int | None:
        """Devices in serving: fewer are in time no more often, and train more."""
        low, high = at_least, devices
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if in_time(split(middle)) >= share else (middle + 1, high)
        return low if low < devices else None

    serving = least(IN_TIME)
    possible = in_time(split(devices if serving is None else serving))
    if serving is None:
        serving = least(min(possible, IN_TIME))
    best = split(devices if serving is None else serving)
    least_requests = min(last - first for first, last in edges.values())
    trained_s = best.trained_device_s(ends.start, ends.stop)
    auto_s = auto.trained_device_s(ends.start, ends.stop)
    return Window(least_requests, in_time(auto), auto_s / 3600, serving, in_time(best), trained_s / 3600)


def measured(kinds: Sequence[Traffic], devices: int, name: str, seed: int) -> Row:
    """kinds: one for each model. They share the devices; what counts is the model with most requests late."""
    first_requests, *others = [made(kind, seed + 7919 * n) for n, kind in enumerate(kinds)]
    setup = Setup(first_requests, {f"model {n + 2}": one for n, one in enumerate(others)}, gpus_per_node=devices)
    traces = setup.named()
    auto = run_policy(setup, Policy("auto"))
    runs: dict[int, Figures] = {}

    def split(serving: int) -> Figures:
        if serving not in runs:
            runs[serving] = run_policy(setup, Policy("split", devices - serving))
        return runs[serving]

    end = int(setup.horizon_s) + 1
    learned = min(int(LEARNING_S), end)
    first = window(traces, auto, split, devices, range(learned))
    after = None
    if end > 1.2 * learned:
        after = window(traces, auto, split, devices, range(learned, end), first.best_serving or devices)
    handovers_per_hour = 3600 * auto.handovers / max(setup.horizon_s, 1.0)
    return Row(name, seed, sum(map(len, traces.values())), handovers_per_hour, first, after)
