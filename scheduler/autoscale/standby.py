"""Learns how many replicas to keep awake: the cheapest number that would have been in time over the last half hour.

A device needs seconds to change sides, so requests that arrive within them must find awake engines. Idle engines cost
training, missing ones make requests late, and no constant suits all traffic. So every choice ("n always, more on
backlog") is simulated on a small queueing model (`Shadow`) and pays what the box would pay. In force is the cheapest
among those with at most `late_requests_share` of the requests late, with exponential forgetting; a cheaper one takes
over only if it saves more than the change costs.

The model: one queue of prompts per replica, each request to the replica that is free first; a prompt takes its tokens
over the measured rate, and a request is late if its prompt ends later than the target after its arrival. A prompt that
alone takes longer than the target is late on any number of replicas, and does not count.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from scheduler.autoscale.demand import follow
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import PATIENT, Hysteresis, Standby

MEMORY_S = 1800.0
"""Time constant of forgetting: after this long an observation counts 1/e."""
EARLY = 0.25
"""As PATIENT: the share of the time-to-first-token target that the backlog may take before another is woken."""
KNOWN_REQUESTS, KNOWN_S = 30.0, 120.0
"""Until so many requests came, and for so long, the careful choice is in force: one awake, more on a small backlog."""


class Shadow:
    """One choice, simulated. `free`: when each awake replica has computed its prompts, a heap."""

    def __init__(self, choice: Standby, target_s: float, config: SchedulerConfig, devices: int):
        self.choice, self._target_s, self._config, self._devices = choice, target_s, config, devices
        self._level, self._free = Hysteresis(choice.replicas), [0.0] * choice.replicas
        self._opens_s, self._rested_s = math.inf, 0.0
        self.late = self.cost_s = 0.0

    @property
    def stop_s(self) -> float:
        """Device seconds of training that a change to its present number of replicas costs."""
        return self._config.job_pause_s * max(self._devices - self._level.replicas, 1)

    def live(self, now_s: float, passed_s: float, works_s: Sequence[float], load: float, most: int) -> None:
        """Let `passed_s` pass, in which these prompts arrived."""
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
            self.choice.asked_by_load(load),
            self.choice.asked_by_backlog(backlog_s, self._target_s),
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
        """What waits goes evenly to the replicas that there are now, as the gateway moves it to one that opens."""
        waits_s, count = sum(max(at_s - now_s, 0.0) for at_s in self._free), self._level.replicas
        self._free = [now_s + waits_s / count] * count if count else []


class Bounds(NamedTuple):
    """devices: how many replicas' worth of them there is. least, most: replicas. target_s: for the time to first
    token."""

    devices: int
    least: int
    most: int
    target_s: float


class StandbyLearner:
    """The learner of one model. Owned by the receiver of the load reports, which calls `seen` for each of them."""

    def __init__(self, config: SchedulerConfig, bounds: Bounds):
        self.bounds, self._late_share = bounds, config.late_requests_share
        numbers = range(bounds.least, max(bounds.most, bounds.least) + 1)
        choices = [Standby(n, share) for share in (EARLY, PATIENT) for n in numbers]
        self._shadows = [Shadow(choice, bounds.target_s, config, bounds.devices) for choice in choices]
        self._in_force = next((shadow for shadow in self._shadows if shadow.choice.replicas), self._shadows[-1])
        self._at_s: float | None = None
        self._seen_s = self._requests = 0.0  # since the first request; a faded sum

    @property
    def best(self) -> Standby:
        return self._in_force.choice

    def seen(self, now_s: float, works_s: Sequence[float], load: float = 0.0) -> Standby:
        """Learn from a report, and return what to keep from now on.

        Args:
            works_s: seconds that one replica needs for each prompt that arrived since the last report.
            load: replicas that the requests in flight fill.
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
