"""Decides how many replicas of each model should be awake, and which model gets the next one when devices are scarce.

Growth is immediate, and the count never falls below the count learned from the last half hour. Shrinking starts when
the devices have idled for longer than a hand-over there and back would cost training, at the earliest after
`give_back_after_s`. An operator's number (`idle_sleep_s`) applies as given: one replica stays awake for
that long after the last request, then all sleep except the minimum.

The learner keeps awake the cheapest number of replicas that would have met the target. A device needs seconds to change
its holder, and requests that arrive meanwhile need awake engines. Idle engines cost training, missing engines make
requests late, and no constant suits all traffic. So every choice ("n always, more on backlog") is simulated on a
queueing model (`Shadow`) with the costs of the box. In force is the cheapest choice with at most `late_requests_share`
of the requests late, with exponential forgetting; a cheaper choice replaces it if it saves more than the change costs.

The model: each replica has one queue of prompts, and each request goes to the replica that is free first. A prompt
takes its tokens divided by the measured rate, and a request is late if its prompt is done later than the target after
its arrival. A prompt that alone takes longer than the target is late on any number of replicas, and does not count.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import PATIENT, DeploymentView, Hysteresis, ReplicaView, Standby

MEMORY_S = 1800.0
"""Time constant of forgetting: after this long an observation counts 1/e."""
EARLY = 0.25
"""As PATIENT: the share of the time-to-first-token target that the backlog may take before another is woken."""
KNOWN_REQUESTS, KNOWN_S = 30.0, 120.0
"""Until this many requests and seconds, the careful choice is in force: one replica awake, more on a small backlog."""


class Slot(NamedTuple):
    """A request for one awake replica, the `nth` (from 0) of `model`. wanted: False if no demand needs the replica, and
    it only fills devices that belong to serving anyway."""

    model: str
    nth: int
    wanted: bool


def usable(deployment: DeploymentView, now_s: float) -> bool:
    """Whether new replicas of the model may start. Open replicas stay open during the model's backoff."""
    return deployment.not_before_s <= now_s and deployment.max_replicas > 0


def load(deployment: DeploymentView, config: SchedulerConfig) -> float:
    """Number of replicas needed for all requests at engines and gateways: by their count or by their cached prompt
    tokens, whichever is more. Waiting prompts count as backlog instead.

    While the measured time per further token is above its target, each replica counts as carrying proportionally fewer
    requests, since the time of a decoding step grows with its batch. One evaluation at most doubles the count.
    """
    demand, carried = deployment.demand, float(deployment.target_inflight or config.target_inflight)
    measured_s, wanted_s = demand.tpot_p95_s, deployment.tpot_target_s
    if measured_s and wanted_s and measured_s > wanted_s:
        carried *= max(wanted_s / measured_s, 0.5)
    cached = max(demand.prompt_tokens - demand.waiting_tokens, 0) / deployment.kv_tokens if deployment.kv_tokens else 0
    return max(demand.requests / carried, cached)


def wanted_now(deployment: DeploymentView, now_s: float, config: SchedulerConfig) -> int:
    """Number of replicas that the current demand needs, regardless of earlier demand."""
    demand, filled = deployment.demand, load(deployment, config)
    count = math.ceil(filled) if deployment.standby is None else deployment.standby.for_load(filled)
    if deployment.prefill_tokens_per_s and deployment.ttft_target_s and demand.waiting_tokens:
        # The backlog gets only part of the target: requests that arrive while a replica wakes need the rest.
        backlog_s = demand.waiting_tokens / deployment.prefill_tokens_per_s
        standby = deployment.standby or Standby(deployment.max_replicas)
        count = max(count, standby.for_backlog(backlog_s, deployment.ttft_target_s))
    if now_s < _one_until_s(deployment, config):
        count = max(count, 1)  # short requests can begin and end between two evaluations
    return min(max(count, deployment.floor_replicas), deployment.max_replicas)


def _one_until_s(deployment: DeploymentView, config: SchedulerConfig) -> float:
    """The time until which the last request alone keeps one replica awake."""
    own_s = deployment.idle_sleep_s
    return deployment.last_s + (min(deployment.idle_after_s, config.give_back_after_s) if own_s is None else own_s)


def follow(
    hysteresis: Hysteresis, want: int, now_s: float, rest_s: Callable[[int], float]
) -> tuple[Hysteresis, float | None]:
    """Grow to `want` at once; shrink to the peak of `want` since it fell, once the spare replicas have idled for
    `rest_s(spare)`. Also return when it will shrink if nothing changes before."""
    if want >= hysteresis.replicas:
        return replace(hysteresis, replicas=want, low_since_s=None, low_peak=0), None
    since_s = now_s if hysteresis.low_since_s is None else hysteresis.low_since_s
    peak = max(hysteresis.low_peak, want)
    due_s = since_s + rest_s(hysteresis.replicas - peak)
    if due_s > now_s:
        return replace(hysteresis, low_since_s=since_s, low_peak=peak), due_s
    if peak == want:
        return replace(hysteresis, replicas=peak, low_since_s=None, low_peak=0), None
    return replace(hysteresis, replicas=peak, low_since_s=now_s, low_peak=want), now_s + rest_s(peak - want)


def required(
    deployment: DeploymentView,
    hysteresis: Hysteresis,
    now_s: float,
    config: SchedulerConfig,
    *,
    switch_device_s: float = 0.0,
) -> tuple[Hysteresis, list[float | None]]:
    """Return the model's new hysteresis, with the number of replicas it should have now, and times at which to evaluate
    again without an event.

    switch_device_s: device seconds of training lost by giving up devices and taking them back.
    """
    want = wanted_now(deployment, now_s, config)
    if deployment.idle_sleep_s is not None and deployment.asleep(now_s):
        # An operator's number: neither earlier demand nor the cost of a hand-over delays it.
        return replace(hysteresis, replicas=want, low_since_s=None, low_peak=0), []
    standby_until_s = deployment.last_s + min(deployment.idle_after_s, config.give_back_at_latest_s)
    if deployment.standby is not None and now_s < standby_until_s:
        want = max(want, min(deployment.standby.replicas, deployment.max_replicas))

    def rest_s(spare: int) -> float:
        # A hand-over pays off once the devices have idled for as long as it costs training.
        pays_after_s = switch_device_s / (spare * deployment.tensor_parallel)
        least_s = min(deployment.idle_after_s, config.give_back_after_s)
        return max(least_s, min(pays_after_s, config.give_back_at_latest_s))

    hysteresis, due_s = follow(hysteresis, want, now_s, rest_s)
    return hysteresis, [_one_until_s(deployment, config), standby_until_s, due_s]


def slots(
    deployments: Sequence[DeploymentView],
    replicas: Iterable[ReplicaView],
    hysteresis: Mapping[str, Hysteresis],
    now_s: float,
    config: SchedulerConfig,
) -> list[Slot]:
    """Every requested replica, most urgent first: the first replica of each model with demand before any second one.

    Order of first replicas: pinned; models in their turn; models that have waited longer than a turn (longest first);
    models after their turn; models that began to wait; models that need only their minimum. Order of later replicas:
    pinned, then by name. Replicas that no demand needs come last.
    """
    since_s: dict[str, list[float]] = {}  # by model: since when its replicas are open
    for replica in replicas:
        if replica.state == "open" or replica.busy == "coming":
            since_s.setdefault(replica.model, []).append(replica.since_s)

    def first_rank(d: DeploymentView) -> tuple[int, float, str]:
        opened_s = min(since_s.get(d.model, ()), default=None)
        waiting_s = hysteresis[d.model].waiting_since_s or now_s
        if d.pinned:
            return 0, 0.0, d.model
        if not d.demand.requests:
            return 6 if opened_s is None else 5, 0.0, d.model
        if opened_s is not None:
            return 1 if now_s - opened_s < config.turn_s else 3, opened_s, d.model
        return 2 if now_s - waiting_s >= config.turn_s else 4, waiting_s, d.model

    ranked: list[tuple[bool, int, tuple[int, float, str], Slot]] = []
    for d in deployments:
        most = d.max_replicas if usable(d, now_s) else len(since_s.get(d.model, ()))
        # A model without demand gets no replica; a model with demand may fill devices that belong to serving anyway.
        for nth in range(most if (needed := hysteresis[d.model].replicas) else 0):
            # Later replicas ignore turns and requests: a model with a replica does not wait, and an order that changes
            # with time moved the second replicas of three models back and forth forever.
            rank = (int(not d.pinned), 0.0, d.model) if nth else first_rank(d)
            ranked.append((nth >= needed, nth, rank, Slot(d.model, nth, nth < needed)))
    return [slot for *_, slot in sorted(ranked)]


class Shadow:
    """Simulates one choice. `_free`: heap with the time at which each awake replica has computed its prompts."""

    def __init__(self, choice: Standby, target_s: float, config: SchedulerConfig, devices: int):
        self.choice, self._target_s, self._config, self._devices = choice, target_s, config, devices
        self._level, self._free = Hysteresis(choice.replicas), [0.0] * choice.replicas
        self._opens_s, self._rested_s = math.inf, 0.0
        self.late = self.cost_s = 0.0

    @property
    def stop_s(self) -> float:
        """Device seconds of training that a change of the number of replicas costs now."""
        return self._config.job_pause_s * max(self._devices - self._level.replicas, 1)

    def live(self, now_s: float, passed_s: float, works_s: Sequence[float], load: float, most: int) -> None:
        """Advance the simulation by `passed_s`, in which prompts of `works_s` seconds each arrived."""
        if self._opens_s <= now_s:
            self._opens_s = math.inf
            self._spread(now_s)
        self.cost_s += passed_s * self._level.replicas
        if works_s and not self._free:
            self._change(1, now_s)
        for work_s in works_s:
            end_s = max(self._free[0], now_s) + work_s
            heapq.heapreplace(self._free, end_s)
            self.late += end_s > now_s + self._target_s >= now_s + work_s
        backlog_s = sum(max(at_s - now_s, 0.0) for at_s in self._free)
        want = max(
            self.choice.replicas,
            self.choice.for_load(load),
            self.choice.for_backlog(backlog_s, self._target_s),
        )
        if self._rested_s <= now_s:
            self._change(min(want, most), now_s)

    def _change(self, want: int, now_s: float) -> None:
        before = self._level.replicas
        self._level, _ = follow(self._level, want, now_s, self._rest_s)
        if (replicas := self._level.replicas) == before:
            return
        self.cost_s += self.stop_s
        self._rested_s = now_s + self._config.job_pause_s
        if replicas < before:
            self._spread(now_s)
        else:
            self._opens_s = now_s + self._config.reaction_s
            self._free = self._free or [self._opens_s] * replicas

    def _rest_s(self, spare: int) -> float:
        pays_after_s = 2 * self.stop_s / spare
        return max(self._config.give_back_after_s, min(pays_after_s, self._config.give_back_at_latest_s))

    def _spread(self, now_s: float) -> None:
        """Spread waiting prompts evenly over the current replicas, as the gateway moves requests to a new replica."""
        waits_s, count = sum(max(at_s - now_s, 0.0) for at_s in self._free), self._level.replicas
        self._free = [now_s + waits_s / count] * count if count else []


class Bounds(NamedTuple):
    """devices: number of replicas that fit. least, most: replica counts. target_s: for the time to first token."""

    devices: int
    least: int
    most: int
    target_s: float


class StandbyLearner:
    """Learns how many replicas of one model stay awake. Its owner receives load reports, and calls `seen` for each."""

    def __init__(self, config: SchedulerConfig, bounds: Bounds):
        self.bounds, self._late_share = bounds, config.late_requests_share
        numbers = range(bounds.least, max(bounds.most, bounds.least) + 1)
        choices = [Standby(n, share) for share in (EARLY, PATIENT) for n in numbers]
        self._shadows = [Shadow(choice, bounds.target_s, config, bounds.devices) for choice in choices]
        self._in_force = next((shadow for shadow in self._shadows if shadow.choice.replicas), self._shadows[-1])
        self._at_s: float | None = None
        self._seen_s = self._requests = 0.0  # seconds since the first request; requests, decaying exponentially

    @property
    def best(self) -> Standby:
        return self._in_force.choice

    def seen(self, now_s: float, works_s: Sequence[float], load: float = 0.0) -> Standby:
        """Learn from a load report, and return the new standby.

        Args:
            works_s: seconds that one replica needs for each prompt that arrived since the last report.
            load: number of replicas that the requests in flight fill.
        """
        passed_s = 0.0 if self._at_s is None else max(now_s - self._at_s, 0.0)
        self._at_s, fade = now_s, math.exp(-passed_s / MEMORY_S)
        self._requests = self._requests * fade + len(works_s)
        self._seen_s += passed_s if self._requests else 0.0
        for shadow in self._shadows:
            shadow.late *= fade
            shadow.cost_s *= fade
            shadow.live(now_s, passed_s, works_s, load, self.bounds.most)
        if self._seen_s >= KNOWN_S and self._requests >= KNOWN_REQUESTS:
            allowed = max(self._late_share * self._requests, min(shadow.late for shadow in self._shadows))
            able = [shadow for shadow in self._shadows if shadow.late <= allowed]
            best, now = min(able, key=lambda shadow: shadow.cost_s), self._in_force
            if now not in able or now.cost_s - best.cost_s > 2 * now.stop_s:
                self._in_force = best
        return self.best
