"""Learns how many replicas to keep awake: the cheapest number that would have been in time over the last half hour.

A device needs seconds to change sides, so requests that arrive within them must find awake engines. Idle engines cost
training, missing ones make requests late, and no constant suits all traffic. So every choice ("n always, more on
backlog") is simulated on a small queueing model of the last half hour (`shadow.py`) and pays what the box would pay. In
force is the one that cost training least among those with at most `late_share` of the requests late: follow the leader,
with exponential forgetting (Cesa-Bianchi and Lugosi 2006, chapter 4), and lazily, since a change costs a stop of the
job (Kalai and Vempala 2005).

Requests that are late on any number of replicas (the prompt alone takes longer than the target) use up the allowance,
but for a tenth of it. The more of it was really spent, the less a choice may plan for.
"""

from __future__ import annotations

import math

from scheduler.autoscale.shadow import Costs, Seen, Shadow
from scheduler.core.workload import PATIENT, Standby

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

    least, most: replicas. target_s: for the time to first token. late_share: share of requests that may be late.
    """

    def __init__(self, costs: Costs, *, least: int, most: int, target_s: float, late_share: float):
        self._costs, self._most, self._late_share, self.target_s = costs, most, late_share, target_s
        numbers = levels(least, max(most, least))
        self._shadows = [Shadow(Standby(n, share), target_s) for share in (EARLY, PATIENT) for n in numbers]
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
            shadow.live(now_s, passed_s, seen, self._most, self._costs)
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
        stays = now in able and now.cost_s - best.cost_s <= 2 * self._costs.stop_s(now.choice.replicas)
        return now if stays else best
