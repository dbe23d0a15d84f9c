"""Learns how many replicas to keep awake: the cheapest number that would have been in time over the last half hour.

A device needs seconds to change sides, so requests that arrive within them must find awake engines. Idle engines cost
training, missing ones make requests late, and no constant suits all traffic. So every choice ("n always, more on
backlog") is simulated on a small queueing model of the last half hour (`Shadow`) and pays what the box would pay. In
force is the one that cost training least among those with at most `late_share` of the requests late: follow the leader,
with exponential forgetting (Cesa-Bianchi and Lugosi 2006, chapter 4), and lazily, since a change costs a stop of the
job (Kalai and Vempala 2005).

Requests that are late on any number of replicas (the prompt alone takes longer than the target) use up the allowance,
but for a tenth of it. The more of it was really spent, the less a choice may plan for.

The model: one queue of prompts per replica, each request to the replica that is free first; a prompt takes its tokens
over the measured rate, and a request is late if its prompt ends later than the target after its arrival.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import FULL, PATIENT, Standby

_ALL_LATE = 0.1
"""How much requests in flight exceed what replicas carry when all that come are late."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What happened since the last report.

    works_s: seconds that one replica needs for each prompt that arrived. load: replicas that the requests in flight
    fill; running: those that have a first token. late: requests found late that one replica alone could have served in
    time; hopeless: those that it could not. awake: replicas that answer now.
    """

    works_s: Sequence[float] = ()
    load: float = 0.0
    running: float = 0.0
    late: int = 0
    hopeless: int = 0
    awake: int = 0

    @property
    def filled(self) -> float:
        """Replicas whose caches are full. What waits for its prompt fills none, unless those awake are full: then it
        waits for room."""
        return self.load if self.running > FULL * self.awake else self.running


class Shadow:
    """One choice, simulated. `free`: when each replica has computed its prompts, a heap. devices: that may train."""

    def __init__(self, choice: Standby, target_s: float, config: SchedulerConfig, devices: int):
        self.choice, self.target_s, self.replicas = choice, target_s, choice.replicas
        self.config, self.devices = config, devices
        self.free, self.busy_until_s = [0.0] * choice.replicas, 0.0
        self.coming, self.coming_at_s, self.rested_at_s = 0, 0.0, 0.0
        self.low_since_s, self.low_peak, self.late, self.cost_s = -1.0, 0, 0.0, 0.0

    def stop_s(self, replicas: int) -> float:
        """Device seconds of training that a change to this many replicas costs."""
        return self.config.job_pause_s * max(self.devices - replicas, 1)

    def live(self, now_s: float, passed_s: float, seen: Seen, most: int) -> None:
        """Let `passed_s` pass, in which this was seen."""
        if self.coming and self.coming_at_s <= now_s:
            self.replicas, self.coming = self.coming, 0
            self._spread(now_s)
        self.cost_s += passed_s * max(self.replicas, self.coming)
        if seen.works_s:
            self.late += self._serve(now_s, seen)
        self._move(now_s, seen.load / FULL, most)

    def _serve(self, now_s: float, seen: Seen) -> float:
        if not self.free:
            self._take(1, now_s)
        free, target_s, late = self.free, self.target_s, 0.0
        for work_s in seen.works_s:
            end_s = max(free[0], now_s) + work_s
            heapq.heapreplace(free, end_s)
            late += end_s > now_s + target_s and work_s <= target_s
            self.busy_until_s = max(self.busy_until_s, end_s)
        if seen.filled > self.replicas > 0:
            # Full caches: what comes waits until others end.
            over = seen.filled / self.replicas - 1
            late = max(late, len(seen.works_s) * min(over / _ALL_LATE, 1.0))
        return late

    def _move(self, now_s: float, filled: float, most: int) -> None:
        want = max(math.ceil(filled), self.choice.replicas)
        if self.busy_until_s > now_s:
            backlog_s = sum(max(at_s - now_s, 0.0) for at_s in self.free)
            want = max(want, self.choice.asked_by_backlog(backlog_s, self.target_s))
        want, n = min(want, most), self.replicas
        if want >= (self.coming or n):
            self.low_since_s = -1.0
            if want > (self.coming or n) and not self.coming and now_s >= self.rested_at_s:
                self._take(want, now_s)
            return
        if self.coming:
            return
        if self.low_since_s < 0:
            self.low_since_s, self.low_peak = now_s, want
        self.low_peak = max(self.low_peak, want)
        if self.low_peak >= n:
            return
        pay_s = 2 * self.stop_s(n) / (n - self.low_peak)
        rest_s = max(self.config.give_back_after_s, min(pay_s, self.config.give_back_at_latest_s))
        if now_s - self.low_since_s >= rest_s and now_s >= self.rested_at_s:
            self.replicas, self.rested_at_s, self.low_since_s = self.low_peak, now_s + self.config.job_pause_s, -1.0
            self._spread(now_s)
            self.cost_s += self.stop_s(self.low_peak)

    def _take(self, want: int, now_s: float) -> None:
        self.coming, self.coming_at_s, self.rested_at_s = (
            want,
            now_s + self.config.reaction_s,
            now_s + self.config.job_pause_s,
        )
        self.cost_s += self.stop_s(want)
        if not self.free:
            self.free = [self.coming_at_s] * want

    def _spread(self, now_s: float) -> None:
        """What waits goes evenly to the replicas that there are now, as the gateway moves it to one that opens."""
        waits_s, count = sum(max(at_s - now_s, 0.0) for at_s in self.free), self.replicas
        self.free = [now_s + waits_s / count] * count if count else []


MEMORY_S = 1800.0
"""Time constant of forgetting: after this long an observation counts 1/e."""
EARLY = 0.25
"""As PATIENT: the share of the time-to-first-token target that the backlog may take before another is woken."""
KNOWN_REQUESTS, KNOWN_S = 30.0, 120.0
"""Until so many requests came, and for so long, the careful choice is in force: one awake, more on a small backlog."""
KEPT_ALLOWANCE = 0.1
"""Share of the allowance that is left to plan with whatever was late."""
SINKS_AT = 1.5
"""The allowance to plan with sinks once more than half of it is spent."""
BURST = 3.0
"""Late requests in the burst of one of them: a choice not in force must be in time by more than such chance."""


def levels(least: int, most: int) -> list[int]:
    """Candidate numbers of standby replicas: every number up to 8, then each a fifth more than the one before."""
    found, level = [], float(min(max(least, 0), most))
    while level < most:
        found.append(round(level))
        level = max(level + 1, level * 1.2 if level > 8 else 0)
    return [*found, most] if most not in found else found


class StandbyLearner:
    """The learner of one model. Owned by the receiver of the load reports, which calls `seen` for each of them.

    devices: how many replicas' worth of them there is. least, most: replicas. target_s: for the time to first token.
    """

    def __init__(self, config: SchedulerConfig, devices: int, *, least: int, most: int, target_s: float):
        self._most, self._late_share, self.target_s = most, config.late_requests_share, target_s
        numbers = levels(least, max(most, least))
        self._shadows = [
            Shadow(Standby(n, share), target_s, config, devices) for share in (EARLY, PATIENT) for n in numbers
        ]
        self._in_force = next((one for one in self._shadows if one.choice.replicas), self._shadows[-1])
        self._at_s: float | None = None
        self._seen_s = 0.0  # since the first request
        self._requests, self._late, self._hopeless = 0.0, 0.0, 0.0  # faded sums

    @property
    def best(self) -> Standby:
        return self._in_force.choice

    def seen(self, now_s: float, seen: Seen) -> Standby:
        """Learn from a report, and return what to keep from now on."""
        passed_s = 0.0 if self._at_s is None else max(now_s - self._at_s, 0.0)
        self._at_s, fade = now_s, math.exp(-passed_s / MEMORY_S)
        self._requests = self._requests * fade + len(seen.works_s)
        self._late, self._hopeless = self._late * fade + seen.late, self._hopeless * fade + seen.hopeless
        self._seen_s += passed_s if self._requests else 0.0
        for shadow in self._shadows:
            shadow.late *= fade
            shadow.cost_s *= fade
            shadow.live(now_s, passed_s, seen, self._most)
        if self._seen_s >= KNOWN_S and self._requests >= KNOWN_REQUESTS:
            self._in_force = self._cheapest_in_time()
        return self.best

    def _cheapest_in_time(self) -> Shadow:
        share = self._late_share * self._requests
        allowed = max(share - self._hopeless, KEPT_ALLOWANCE * share)
        allowed *= min(max(SINKS_AT - self._late / max(allowed, 1e-9), KEPT_ALLOWANCE), 1.0)
        now = self._in_force

        def late(shadow: Shadow) -> float:
            return shadow.late + (0.0 if shadow is now else math.sqrt(BURST * shadow.late))

        able = [shadow for shadow in self._shadows if late(shadow) <= allowed]
        if not able:
            fewest = min(shadow.late for shadow in self._shadows)
            able = [shadow for shadow in self._shadows if shadow.late <= fewest]
        best = min(able, key=lambda shadow: shadow.cost_s)
        stays = now in able and now.cost_s - best.cost_s <= 2 * now.stop_s(now.choice.replicas)
        return now if stays else best
