"""Learns how many replicas to keep awake by simulating every choice on the traffic so far.

A device needs seconds to change sides, so requests that arrive within them must find awake engines. The number is a
trade-off: idle engines cost training, missing ones make requests late. No constant suits all traffic, so every choice
is simulated at once on a small queueing model of the last half hour ("shadows") and pays what the box would pay. The
choices are the constants ("2, whatever happens": a static split of the devices) and the moving ones ("1 always, more
when the backlog needs them"). In force is the one that cost training least among those with at most `late_share` of the
requests late: follow the leader, with exponential forgetting (Cesa-Bianchi and Lugosi 2006, chapter 4), and lazily,
since a change costs a stop of the job (Kalai and Vempala 2005). What a constant costs needs no model; so `auto` trains
as much as the best constant that is found in time, less what finding it costs (docs/scheduler.md has the bound).

The model: one queue of prompts per replica, each request to the replica that is free first; a prompt takes its tokens
over the measured rate, and a request is late if its prompt ends later than the target after its arrival. What the model
does not see (full caches, slow engines) is told by what happened:

- requests that were late though the choice in force foretold none count against every choice that would have had no
  more replicas awake at that moment;
- a constant during which requests were late is not chosen again until that has faded;
- if moving cost more than foretold (more stops, replicas kept for longer), all moving choices are that much dearer.

Requests that are late on any number of replicas (the prompt alone takes longer than the target) are nobody's fault:
they use up the allowance, but for a quarter of it that is always left.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
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
_KEPT_ALLOWANCE = 0.25
"""Share of the allowance of late requests that those which nobody could serve in time cannot use up."""
_FORETOLD_S = 10.0
"""Time constant within which a foretold late request is found late, if it is."""
_LAZY = 1.0
"""A choice in force that is still able is left for one that saved this many hand-overs there and back."""


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

    def stop_s(self, replicas: int) -> float:
        """Device seconds of training that a change to this many replicas costs."""
        return self.pause_s * max(self.training_devices - replicas, 0)


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


@dataclass(frozen=True, slots=True)
class Seen:
    """What happened since the last report.

    works_s: seconds that one replica needs for each prompt that arrived. asked: replicas needed for the number of
    requests in flight. late: requests found late that one replica alone could have served in time. awake: replicas that
    answer now.
    """

    works_s: Sequence[float] = ()
    asked: int = 0
    late: int = 0
    awake: int = 0


class _Shadow:
    """One choice, simulated. `free`: when each replica has computed its prompts, a heap."""

    __slots__ = (
        *("choice", "target_s", "free", "busy_until_s", "replicas", "coming", "coming_at_s", "rested_at_s"),
        *("low_since_s", "low_peak", "late", "cost_s"),
    )

    def __init__(self, choice: Standby, target_s: float):
        self.choice, self.target_s, self.replicas = choice, target_s, choice.replicas
        self.free, self.busy_until_s = [0.0] * choice.replicas, 0.0
        self.coming, self.coming_at_s, self.rested_at_s = 0, 0.0, 0.0
        self.low_since_s, self.low_peak, self.late, self.cost_s = -1.0, 0, 0.0, 0.0

    def rests(self, now_s: float, asked: int) -> bool:
        """Whether only what is always kept is awake, no prompt waits, and requests in flight ask for no more."""
        n = self.choice.replicas
        return self.busy_until_s <= now_s and self.replicas == n and not self.coming and asked <= n

    def live(self, now_s: float, passed_s: float, seen: Seen, most: int, costs: Costs) -> float:
        """Let `passed_s` pass, in which this was seen. Returns how many of the requests are late."""
        if self.coming and self.coming_at_s <= now_s:
            self.replicas, self.coming = self.coming, 0
            self._spread(now_s)
        self.cost_s += passed_s * max(self.replicas, self.coming)
        late = self._serve(now_s, seen, costs) if seen.works_s else 0.0
        self.late += late
        if not self.choice.fixed:
            self._move(now_s, seen.asked, most, costs)
        return late

    def _serve(self, now_s: float, seen: Seen, costs: Costs) -> float:
        if not self.free:
            self._take(1, now_s, costs)
        free, target_s, late = self.free, self.target_s, 0.0
        for work_s in seen.works_s:
            end_s = max(free[0], now_s) + work_s
            heapq.heapreplace(free, end_s)
            late += end_s > now_s + target_s and work_s <= target_s
            self.busy_until_s = max(self.busy_until_s, end_s)
        if seen.asked > self.replicas > 0:
            late = max(late, len(seen.works_s) * (seen.asked - self.replicas) / seen.asked)
        return late

    def _move(self, now_s: float, asked: int, most: int, costs: Costs) -> None:
        want = max(asked, self.choice.replicas)
        if self.busy_until_s > now_s:
            backlog_s = sum(max(at_s - now_s, 0.0) for at_s in self.free)
            want = max(want, self.choice.asked_by_backlog(backlog_s, self.target_s))
        want, n = min(want, most), self.replicas
        if want >= (self.coming or n):
            self.low_since_s = -1.0
            if want > (self.coming or n) and not self.coming and now_s >= self.rested_at_s:
                self._take(want, now_s, costs)
            return
        if self.coming:
            return
        if self.low_since_s < 0:
            self.low_since_s, self.low_peak = now_s, want
        self.low_peak = max(self.low_peak, want)
        if self.low_peak >= n:
            return
        pay_s = 2 * costs.stop_s(n) / (n - self.low_peak)
        rest_s = max(costs.rest_s, min(pay_s, costs.latest_s))
        if now_s - self.low_since_s >= rest_s and now_s >= self.rested_at_s:
            self.replicas, self.rested_at_s, self.low_since_s = self.low_peak, now_s + costs.pause_s, -1.0
            self._spread(now_s)
            self.cost_s += costs.stop_s(self.low_peak)

    def _take(self, want: int, now_s: float, costs: Costs) -> None:
        self.coming, self.coming_at_s, self.rested_at_s = want, now_s + costs.take_s, now_s + costs.pause_s
        self.cost_s += costs.stop_s(want)
        if not self.free:
            self.free = [self.coming_at_s] * want

    def _spread(self, now_s: float) -> None:
        """What waits goes evenly to the replicas that there are now, as the gateway moves it to one that opens."""
        waits_s, count = sum(max(at_s - now_s, 0.0) for at_s in self.free), self.replicas
        self.free = [now_s + waits_s / count] * count if count else []


class StandbyLearner:
    """The learner of one model. Owned by the receiver of the load reports, which calls `seen` for each of them.

    least, most: replicas. target_s: for the time to first token. late_share: share of requests that may be late.
    """

    def __init__(self, costs: Costs, *, least: int, most: int, target_s: float, late_share: float):
        self._costs, self._most, self._late_share, self.target_s = costs, most, late_share, target_s
        numbers = levels(least, max(most, least))
        self._shadows = [_Shadow(Standby(level, share, times), target_s) for share, times in WAYS for level in numbers]
        self._shadows += [_Shadow(Standby(level, fixed=True), target_s) for level in numbers if level]
        self._in_force = self._shadows[0]
        self._at_s: float | None = None
        # Faded sums. Requests that arrived, and of those that were late on any number of replicas:
        self._requests, self._hopeless = 0.0, 0.0
        # late requests found and foretold, and foretold ones that were not found yet:
        self._late, self._foretold, self._open = 0.0, 0.0, 0.0
        # replica seconds and stops while a moving choice was in force, as they were and as foretold:
        self._paid_s, self._told_s = 0.0, 0.0
        self._awake: int | None = None
        # by number of replicas awake: requests that arrived, and late ones found.
        self._tried: dict[int, list[float]] = {}

    @property
    def best(self) -> Standby:
        return self._in_force.choice

    def seen(self, now_s: float, seen: Seen) -> Standby:
        """Learn from a report, and return what to keep from now on."""
        passed_s = 0.0 if self._at_s is None else max(now_s - self._at_s, 0.0)
        self._at_s = now_s
        fade = math.exp(-passed_s / MEMORY_S)
        self._fade(fade, passed_s)
        self._requests += len(seen.works_s)
        self._hopeless += sum(work_s > self.target_s for work_s in seen.works_s)
        self._late += seen.late
        unforeseen = max(seen.late - self._open, 0.0)
        self._open = max(self._open - seen.late, 0.0)
        if self._awake is not None and not self.best.fixed:
            self._paid_s += passed_s * seen.awake
            if seen.awake != self._awake:
                self._paid_s += self._costs.stop_s(seen.awake)
        self._awake = seen.awake
        tried = self._tried.setdefault(seen.awake, [0.0, 0.0])
        tried[0] += len(seen.works_s)
        tried[1] += seen.late
        work_s, longest_s = sum(seen.works_s), max(seen.works_s, default=0.0)
        quiet = longest_s <= 0.5 * self.target_s
        for shadow in self._shadows:
            shadow.late *= fade
            shadow.cost_s *= fade
            if quiet and not unforeseen and shadow.rests(now_s, seen.asked):
                n = shadow.replicas
                if work_s <= n * min(passed_s, 0.5 * self.target_s):
                    # Shortcut for `live`: most of them, most of the time.
                    shadow.cost_s += passed_s * n
                    if shadow is self._in_force and not shadow.choice.fixed:
                        self._told_s += passed_s * n
                    continue
            if unforeseen and shadow.replicas <= seen.awake:
                shadow.late += unforeseen
            before_s = shadow.cost_s
            late = shadow.live(now_s, passed_s, seen, self._most, self._costs)
            if shadow is self._in_force:
                self._foretold += late + (unforeseen if shadow.replicas <= seen.awake else 0.0)
                self._open += late
                if not shadow.choice.fixed:
                    self._told_s += shadow.cost_s - before_s
        self._choose()
        return self.best

    def _fade(self, fade: float, passed_s: float) -> None:
        self._requests, self._hopeless = self._requests * fade, self._hopeless * fade
        self._late, self._foretold = self._late * fade, self._foretold * fade
        self._paid_s, self._told_s = self._paid_s * fade, self._told_s * fade
        self._open *= math.exp(-passed_s / _FORETOLD_S)
        for row in self._tried.values():
            row[0], row[1] = row[0] * fade, row[1] * fade

    def _choose(self) -> None:
        able = [shadow for shadow in self._shadows if self._able(shadow)]
        if not able:  # no choice suffices: take the one with fewest late requests
            self._in_force = min(self._shadows, key=lambda shadow: (shadow.late, self._cost_s(shadow)))
            return
        best, now = min(able, key=self._cost_s), self._in_force
        saved_s = self._cost_s(now) - self._cost_s(best)
        if not self._able(now) or saved_s > _LAZY * 2 * self._costs.stop_s(now.replicas):
            self._in_force = best

    def _able(self, shadow: _Shadow) -> bool:
        """Whether at most the allowed share of requests would have been late."""
        share, requests = self._late_share, self._requests
        allowed = max(share * requests - self._hopeless, _KEPT_ALLOWANCE * share * requests) + 1e-9
        slack = _KEPT_ALLOWANCE * share * requests + 1
        # Foretold too often: engines are faster than the measured rate says.
        found = min(max((self._late + slack) / (self._foretold + slack), 0.5), 1.0)
        if shadow.late * found > allowed:
            return False
        tried, late = self._tried.get(shadow.choice.replicas, (0.0, 0.0))
        return not shadow.choice.fixed or late <= 2 * share * tried + 1

    def _cost_s(self, shadow: _Shadow) -> float:
        if shadow.choice.fixed:
            return shadow.cost_s
        slack_s = self._costs.stop_s(0)
        return shadow.cost_s * min(max((self._paid_s + slack_s) / (self._told_s + slack_s), 1.0), 2.0)
