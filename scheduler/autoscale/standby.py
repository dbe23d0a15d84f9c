"""Learns how many replicas to keep on standby by simulating every choice on the traffic so far.

A device needs seconds to change sides, so requests that arrive within them must find awake engines. The number is a
trade-off: idle engines cost training, missing ones make requests late. No constant suits all traffic, so every choice
is simulated at once on a small queueing model of the last half hour ("shadows"): each keeps `level` replicas always,
wakes more when its own backlog needs them, and pays what the box would pay. The current choice is the one that cost
training least among those with at most `late_share` of the requests late (follow the leader, with exponential
forgetting: Cesa-Bianchi and Lugosi 2006, chapter 4). How early to wake more is learned the same way.

The model: work arrives in replica-seconds (prompt tokens over the measured prefill rate), and all replicas of a shadow
together serve it first come first served; a request is late when the backlog before it takes longer than its target.
Requests that run for long (many output tokens, a full cache) need replicas by their number, which the shadow gets as
late as the box would. No shadow sees the future or another's backlog.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import PATIENT, Standby

MEMORY_S = 1800.0
"""Time constant of forgetting: after this long an observation counts 1/e."""
EARLY = 0.25
"""As PATIENT: the share of the time-to-first-token target that the backlog may take before another is woken."""
WAYS = ((PATIENT, 1), (EARLY, 1), (EARLY, 2))
"""Ways to take more: at which backlog, and what multiple of the replicas it needs. A hand-over stops the job whether it
gives one device or four, and a second one cannot begin before the first has ended."""
_FINE = 8


@dataclass(frozen=True, slots=True)
class Costs:
    """What moving devices costs. take_s: from the decision to a replica that answers. pause_s: what a change of size
    costs a running job on each of its devices. training_devices: how many those are with no replica awake. rest_s:
    replicas are given back after this long without need, or after the job's devices have idled for `2 x pause_s`,
    whichever is later, but after `latest_s` at the latest."""

    take_s: float
    pause_s: float
    training_devices: int
    rest_s: float
    latest_s: float


def standby_costs(config: SchedulerConfig, devices: int) -> Costs:
    """The costs of moving devices according to the box's settings."""
    return Costs(config.reaction_s, config.job_pause_s, devices, config.give_back_after_s, config.give_back_at_latest_s)


def levels(least: int, most: int) -> list[int]:
    """Candidate numbers of standby replicas: every number up to eight, then steps of about a fifth."""
    found, level = [], float(min(max(least, 0), most))
    while level < most:
        found.append(round(level))
        level = max(level + 1, level * 1.2 if level > _FINE else 0)
    return [*found, most] if most not in found else found


class _Shadow:
    """One choice, simulated in the queueing model."""

    __slots__ = (
        "choice",
        "target_s",
        "backlog_s",
        "replicas",
        "coming",
        "coming_at_s",
        "rested_at_s",
        "low_since_s",
        "low_peak",
        "late",
        "cost_s",
        "resting",
    )

    def __init__(self, choice: Standby, target_s: float):
        self.choice, self.target_s, self.replicas = choice, target_s, choice.replicas
        self.backlog_s, self.coming, self.coming_at_s, self.rested_at_s = 0.0, 0, 0.0, 0.0
        self.low_since_s, self.low_peak, self.late, self.cost_s = -1.0, 0, 0.0, 0.0
        self.resting = False  # only the standby replicas are awake, none is coming, nothing waits

    def live(self, now_s: float, passed_s: float, work_s: float, requests: float, asked: int, most: int, c: Costs):
        """Let `passed_s` pass, in which this much arrived; requests in flight need `asked` replicas."""
        if self.coming and self.coming_at_s <= now_s:
            self.replicas, self.coming = self.coming, 0
        n = self.replicas
        self.cost_s += passed_s * max(n, self.coming)
        self.backlog_s += work_s
        if requests:
            wait_s = (
                self.backlog_s / n if n else self.backlog_s + (self.coming_at_s - now_s if self.coming else c.take_s)
            )
            if wait_s > self.target_s:
                self.late += requests
            elif asked > n > 0:
                self.late += requests * (asked - n) / asked
        self.backlog_s = max(self.backlog_s - n * passed_s, 0.0)
        want = max(asked, self.choice.replicas)
        if self.backlog_s:
            want = max(want, self.choice.asked_by_backlog(self.backlog_s, self.target_s))
        want = min(want, most)
        now_has = self.coming or n
        if want >= now_has:
            self.low_since_s = -1.0
            if want > now_has and not self.coming and now_s >= self.rested_at_s:
                self.coming, self.coming_at_s, self.rested_at_s = want, now_s + c.take_s, now_s + c.pause_s
                self.cost_s += c.pause_s * max(c.training_devices - want, 0)
            return
        if self.coming:
            return
        if self.low_since_s < 0:
            self.low_since_s, self.low_peak = now_s, want
        self.low_peak = max(self.low_peak, want)
        if self.low_peak >= n:
            return
        pay_s = 2 * c.pause_s * max(c.training_devices - n, 0) / (n - self.low_peak)
        if now_s - self.low_since_s >= max(c.rest_s, min(pay_s, c.latest_s)) and now_s >= self.rested_at_s:
            self.replicas, self.rested_at_s, self.low_since_s = self.low_peak, now_s + c.pause_s, -1.0
            self.cost_s += c.pause_s * max(c.training_devices - self.low_peak, 0)


class StandbyLearner:
    """The learner of one model. Owned by the receiver of the load reports, which calls `seen` for each of them.

    least, most: replicas. target_s: for the time to first token. late_share: share of requests that may be late.
    """

    def __init__(self, costs: Costs, *, least: int, most: int, target_s: float, late_share: float):
        self._costs, self._most, self._late_share, self._target_s = costs, most, late_share, target_s
        self._shadows = [
            _Shadow(Standby(level, share, times), target_s)
            for share, times in WAYS
            for level in levels(least, max(most, least))
        ]
        self._requests = 0.0
        self._at_s: float | None = None
        self.best = Standby(least)

    def seen(self, now_s: float, work_s: float, requests: int, asked: int) -> Standby:
        """Learn from the arrivals since the last call, and return what to keep from now on.

        work_s: replica-seconds of prompts that arrived; requests: how many those were; asked: replicas needed for the
        number of requests in flight.
        """
        passed_s = 0.0 if self._at_s is None else max(now_s - self._at_s, 0.0)
        self._at_s = now_s
        fade = math.exp(-passed_s / MEMORY_S)
        self._requests = self._requests * fade + requests
        allowed, best = self._late_share * self._requests + 1e-9, None
        busiest_s = min(passed_s, 0.5 * self._target_s)
        for shadow in self._shadows:
            shadow.late *= fade
            shadow.cost_s *= fade
            n = shadow.replicas
            if shadow.resting and asked <= n and work_s <= n * busiest_s and (n or not requests):
                # Shortcut for `live` on a shadow on standby that needs no more: most of them, most of the time.
                shadow.cost_s += passed_s * n
                shadow.low_since_s = -1.0
            else:
                shadow.live(now_s, passed_s, work_s, requests, asked, self._most, self._costs)
                shadow.resting = not (shadow.coming or shadow.backlog_s) and shadow.replicas == min(
                    shadow.choice.replicas, self._most
                )
            if shadow.late <= allowed and (best is None or shadow.cost_s < best.cost_s):
                best = shadow
        if best is None:  # no choice suffices: take the one with fewest late requests
            best = min(self._shadows, key=lambda s: (s.late, s.cost_s))
        self.best = best.choice
        return self.best
