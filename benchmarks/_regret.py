"""Compares `auto` with the best constant split in hindsight, before and after it has learned.

The best constant is the split with most training among those whose share of requests in time is at least 99 %, or,
where that cannot be had, what all devices together reach (half of them, where the box's setting is `when_late =
"split"`). It is found by bisection: with more devices in serving no
fewer requests are in time, and less is trained. What comes after the learning is compared with a split that is in time
in both parts: a number in a configuration file stays.

Hindsight knows what nobody can know beforehand, so the comparison has a start-up cost. It follows from the theory
(docs/scheduler.md) and from what the splits did, never from what `auto` did:

- `chance`: late requests, SURE standard deviations of their number. Requests are late in bursts, so a mean burst of `b`
  makes of `n` requests `n / b` independent ones. What is late on all devices too is not counted, and where that is
  surely more than is allowed the cost is none. A split whose late requests are within this of the allowance cannot be
  told from one that has too many, so training is compared with the best split of the others.
- `trials_s`: device seconds of training that trials cost: five stops of the job on all devices that the split trains
  with, once for each time that the bars of `scheduler.autoscale.trials` double from the window's start to its end.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks._traffic import Traffic, made
from scheduler.autoscale.trials import BURST_S, FIRST_BAR_S
from scheduler.core.config import SchedulerConfig, WhenLate
from scheduler.core.workload import Policy
from scheduler.simulator.simulate import Figures, Setup, run_policy
from scheduler.simulator.trace import Requests

IN_TIME = 0.99
LEARNING_S = 1800.0
SURE = 2.0
"""Standard deviations: 95 of 100 times a share is within this much of its expectation."""
STOPS_OF_A_TRIAL = 5


@dataclass(frozen=True)
class Window:
    """Part of a run. in_time: shares of the requests that arrived in it. best_serving: devices with which the best
    constant serves; None if none trains and is in time. ratio: what `auto` trained over what that constant trained.
    sure_hours: what the best constant trained of those that are in time by more than chance; 0 if none is. chance,
    trials_s: the start-up cost as above, in requests and device seconds. If all splits were asked for, avoidable: the
    share of requests that were late and are in time with all devices; splits: by the devices that serve, the share in
    time and the device-hours; oracle_hours: what the offline optimum trains (`oracle.py`)."""

    requests: int
    auto_in_time: float
    auto_hours: float
    best_serving: int | None
    best_in_time: float
    best_hours: float
    sure_hours: float = 0.0
    chance: float = 0.0
    trials_s: float = 0.0
    avoidable: float | None = None
    splits: dict[int, tuple[float, float]] = field(default_factory=dict)
    oracle_hours: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.auto_hours / self.best_hours if self.best_serving is not None and self.best_hours else None

    @property
    def short(self) -> float:
        """Points of requests below 99 %, or below what all devices together reach. One request is always free: it is
        more than a hundredth of a few."""
        free = 1 / max(self.requests, 1)
        return 100 * max(min(IN_TIME, self.best_in_time) - self.auto_in_time - free, 0.0)

    def lost(self, start_up: bool) -> float:
        """Share of the constant's training by which `auto` had less of it; with or without the start-up cost."""
        if not start_up:
            return 1 - self.auto_hours / self.best_hours if self.best_hours else 0.0
        return max(1 - (self.auto_hours + self.trials_s / 3600) / self.sure_hours, 0.0) if self.sure_hours else 0.0

    def late(self, start_up: bool) -> float:
        """Points that are `short`, with or without the start-up cost."""
        return max(self.short - (100 * self.chance / max(self.requests, 1) if start_up else 0.0), 0.0)


@dataclass(frozen=True)
class Row:
    """One trace. after: None if it is no longer than the first window."""

    kind: str
    seed: int
    requests: int
    handovers_per_hour: float
    first: Window
    after: Window | None


def burst(late_s: Sequence[float]) -> float:
    """Late requests in the burst of one of them, in the mean, by when they came. At least 1."""
    sizes: list[int] = []
    for n, at_s in enumerate(late_s):
        if n and at_s - late_s[n - 1] <= BURST_S:
            sizes[-1] += 1
        else:
            sizes.append(1)
    return sum(size * size for size in sizes) / sum(sizes) if sizes else 1.0


def deviation(requests: int, share: float, burst: float) -> float:
    """Standard deviation of how many of them are late."""
    return math.sqrt(requests * share * (1 - share) * burst)


def window(
    traces: dict[str, Requests],
    auto: Figures,
    split: Callable[[int], Figures],
    devices: int,
    ends: range,
    at_least: int = 1,
    pause_s: float = 0.0,
    when_late: WhenLate = "serve",
    every: bool = False,
) -> Window:
    """split: the run with this many devices in serving. ends: seconds. at_least: devices that earlier requests needed.
    pause_s: what a change of size costs the job on each of its devices. every: look at all splits, without the
    assumption that the bisection makes."""
    edges = {
        name: (bisect_left(requests.arrival_s, ends.start), bisect_left(requests.arrival_s, ends.stop))
        for name, requests in traces.items()
    }

    def in_time(figures: Figures) -> float:
        """The share in time of the model that fares worst."""
        shares = [
            sum(figures.within[name][first:last]) / (last - first)
            for name, (first, last) in edges.items()
            if last > first
        ]
        return min(shares, default=1.0)

    def bursts(figures: Figures, besides: Figures | None = None) -> Iterator[tuple[int, int, float]]:
        """For each model: requests, late ones (that are not late in `besides` too), and `burst` of these."""
        for name, (first, last) in edges.items():
            met, met_besides = figures.within[name], besides and besides.within[name]
            late = [n for n in range(first, last) if not met[n] and (met_besides is None or met_besides[n])]
            yield last - first, len(late), burst([traces[name].arrival_s[n] for n in late])

    def avoidable() -> float:
        """The avoidable share of the model that fares worst."""
        full = split(devices)
        return max((late / requests for requests, late, _ in bursts(auto, full) if requests), default=0.0)

    def surely(requests: int, late: int, size: float, sign: int = 1) -> bool:
        """Whether no more are late than may be, by more than chance; with sign -1 whether no fewer are."""
        margin = SURE * deviation(requests, late / max(requests, 1), size)
        return sign * late + margin <= sign * (1 - IN_TIME) * requests

    def chance() -> float:
        """The largest of any model. Where more are surely late on all devices, none may be late beside them."""
        found = [SURE * deviation(requests, 1 - IN_TIME, size) for requests, _, size in bursts(best, unavoidable)]
        if unavoidable is not None:
            over = [surely(*one, sign=-1) for one in bursts(unavoidable)]
            found = [0.0 if known else one for one, known in zip(found, over, strict=True)]
        return max(found)

    def least(suffices: Callable[[Figures], bool]) -> int | None:
        """Devices in serving: fewer are in time no more often, and train more."""
        if every:
            return next((n for n in range(at_least, devices) if suffices(split(n))), None)
        low, high = at_least, devices
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if suffices(split(middle)) else (middle + 1, high)
        return low if low < devices else None

    def trained_s(figures: Figures) -> float:
        return figures.trained_device_s(ends.start, ends.stop)

    serving = least(lambda figures: in_time(figures) >= IN_TIME)
    at_most = devices if when_late == "serve" else max((devices + 1) // 2, at_least)
    possible = min(in_time(split(at_most if serving is None else serving)), IN_TIME)
    unavoidable = None
    if serving is None:
        unavoidable, serving = split(at_most), least(lambda figures: in_time(figures) >= possible)
    best = split(devices if serving is None else serving)
    sure = least(lambda figures: all(surely(*one) for one in bursts(figures)))
    tried = range(devices + 1) if every else ()
    trials = 1 + math.log2(ends.stop / max(ends.start, FIRST_BAR_S)) if ends.stop > FIRST_BAR_S else 1.0
    return Window(
        requests=min(last - first for first, last in edges.values()),
        auto_in_time=in_time(auto),
        auto_hours=trained_s(auto) / 3600,
        best_serving=serving,
        best_in_time=in_time(best),
        best_hours=trained_s(best) / 3600,
        sure_hours=0.0 if sure is None else trained_s(split(sure)) / 3600,
        chance=chance(),
        trials_s=STOPS_OF_A_TRIAL * pause_s * (devices - (devices if sure is None else sure)) * trials,
        avoidable=avoidable() if every else None,
        splits={n: (in_time(split(n)), trained_s(split(n)) / 3600) for n in tried},
    )


def measured(
    kinds: Sequence[Traffic],
    devices: int,
    name: str,
    seed: int,
    when_late: WhenLate = "serve",
    bound: Callable[[Setup, Figures, range], float] | None = None,
) -> Row:
    """kinds: one for each model. They share the devices; what counts is the model with most requests late. when_late:
    the box's setting. bound: device-hours that none exceeds with this run's share in time; all splits run too."""
    first_requests, *others = [made(kind, seed + 7919 * n) for n, kind in enumerate(kinds)]
    setup = Setup(first_requests, {f"model {n + 2}": one for n, one in enumerate(others)}, gpus_per_node=devices)
    setup = replace(setup, config=SchedulerConfig(when_late=when_late))
    traces = setup.named()
    auto = run_policy(setup, Policy("auto"))
    runs: dict[int, Figures] = {}

    def split(serving: int) -> Figures:
        if serving not in runs:
            runs[serving] = run_policy(setup, Policy("split", devices - serving))
        return runs[serving]

    pause_s = setup.config.job_pause_s

    def part(ends: range, at_least: int) -> Window:
        found = window(traces, auto, split, devices, ends, at_least, pause_s, when_late, bound is not None)
        return replace(found, oracle_hours=bound(setup, auto, ends)) if bound else found

    end = int(setup.horizon_s) + 1
    learned = min(int(LEARNING_S), end)
    first = part(range(learned), 1)
    after = part(range(learned, end), first.best_serving or devices) if end > 1.2 * learned else None
    handovers_per_hour = 3600 * auto.handovers / max(setup.horizon_s, 1.0)
    return Row(name, seed, sum(map(len, traces.values())), handovers_per_hour, first, after)
