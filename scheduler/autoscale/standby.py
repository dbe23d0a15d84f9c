"""Learns how many replicas to keep awake by simulating every choice on the traffic so far.

A device needs seconds to change sides, so requests that arrive within them must find awake engines. The number is a
trade-off: idle engines cost training, missing ones make requests late. No constant suits all traffic, so every choice
is simulated at once on a small queueing model of the last half hour (`shadow.py`) and pays what the box would pay. The
choices are the constants ("2, whatever happens": a static split of the devices) and the moving ones ("1 always, more
when the backlog needs them"). In force is the one that cost training least among those with at most `late_share` of the
requests late: follow the leader, with exponential forgetting (Cesa-Bianchi and Lugosi 2006, chapter 4), and lazily,
since a change costs a stop of the job (Kalai and Vempala 2005).

The model does not see everything (the time of decoding, full caches, slow engines), so what happened counts more:

- requests that were late though the choice in force foretold none count against every choice that would have had no
  more replicas awake since they came;
- a constant during which requests were late is barred, and moving is barred if it cost more than the least constant in
  time (`trials.py`): whatever the model believes, `auto` trains as much as the best constant, less what trials cost;
- if moving cost more than foretold (more stops, replicas kept for longer), all moving choices are that much dearer.

Requests that are late on any number of replicas (the prompt alone takes longer than the target) are nobody's fault:
they use up the allowance, but for a tenth of it that is always left. While all replicas together make too many late
the box's setting `when_late` decides; what they make late then counts against no choice. What came before and in a
surge is forgotten half an hour after it (`surges.py`), unless all replicas together were too late in it: where it
returns, whatever is not awake yet makes requests late until its end. trials.py has the bound.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from scheduler.autoscale.shadow import Costs, Seen, Shadow
from scheduler.autoscale.surges import REMEMBERED, STEP_S, Step, Surges
from scheduler.autoscale.trials import Awake, Bars, Bursts, Stint
from scheduler.core.config import WhenLate
from scheduler.core.workload import FULL, PATIENT, Standby

MEMORY_S = 1800.0
"""Time constant of forgetting: after this long an observation counts 1/e."""
EARLY = 0.25
"""As PATIENT: the share of the time-to-first-token target that the backlog may take before another is woken."""
WAYS = ((PATIENT, 1), (EARLY, 1), (EARLY, 2))
"""Ways to take more: at which backlog, and what multiple of the replicas it needs. A hand-over stops the job whether it
gives one device or four, and a second one cannot begin before the first has ended."""
_FINE, _STEP = 8, 1.2
_FINE_CONSTANTS, _STEP_OF_CONSTANTS = 64, 33 / 32
"""A constant differs from the next by no more than a hundredth of what trains, or a split between them would be better:
each number is one up to 64."""
_KEPT_ALLOWANCE = 0.1
"""Share of the allowance of late requests that those which nobody could serve in time cannot use up."""
_FORETOLD_S = 10.0
"""Time constant within which a foretold late request is found late, if it is."""
_SETTLED_S = 10.0
"""After a change of the number of replicas, this long and the target: what came before it has had its first token."""
_KNOWN_REQUESTS, _KNOWN_S = 30.0, 120.0
"""For so long after the first request the careful way is in force, and until so many came no constant: what was never
late has not been tried."""
_AT_FIRST = 0.5
"""Share of a half hour's allowance that may be spent in its first minutes."""
_SINKS_AT = 1.5
"""The allowance sinks once more than half of it is spent, and is at its least when 1.4 times of it are: trials and
bursts that nobody foresees spend the rest."""
_LEAST_FULL = 0.4
"""Requests that are late while replicas are emptier than this are late for another reason."""
_OVERLOAD_S = 600.0
"""How long an overload goes on after a request that all replicas together make late."""
_SPENT = 0.3
"""Share of the allowance that must be spent before a constant gives way to moving because it is overrun now. What is
late during a constant beyond twice the share that may be is a failure once it is more than this too: one burst that the
half hour has room for proves nothing, and what answers it is to move."""
_UNPROVED = 2.0
"""After a surge a choice has been late by this many times the allowance at most."""
_MOVING = "moving"
_SUMS = (
    *("_seen_s", "_requests", "_hopeless", "_late", "_foretold", "_paid_s", "_told_s"),
    *("_came", "_late_on_all"),
)
_OF_TRAFFIC = ("_requests", "_hopeless", "_late", "_foretold", "_came", "_late_on_all")


def _key(choice: Standby) -> str:
    return f"{choice.replicas} {'fixed' if choice.fixed else f'{choice.backlog_share:g} {choice.times}'}"


def levels(least: int, most: int, fine: int = _FINE, step: float = _STEP) -> list[int]:
    """Candidate numbers of standby replicas: every number up to `fine`, then by steps that grow by this factor."""
    found, level = [], float(min(max(least, 0), most))
    while level < most:
        found.append(round(level))
        level = max(level + 1, level * step if level > fine else 0)
    return [*found, most] if most not in found else found


class StandbyLearner:
    """The learner of one model. Owned by the receiver of the load reports, which calls `seen` for each of them.

    least, most: replicas. target_s: for the time to first token. late_share: share of requests that may be late.
    when_late: what is in force while all replicas together have more late: all of them, or half.
    """

    def __init__(
        self,
        costs: Costs,
        *,
        least: int,
        most: int,
        target_s: float,
        late_share: float,
        when_late: WhenLate = "serve",
    ):
        self._costs, self._most, self._late_share, self.target_s = costs, most, late_share, target_s
        numbers = levels(least, max(most, least))
        fixed = levels(least, max(most, least), _FINE_CONSTANTS, _STEP_OF_CONSTANTS)
        self._constants = [Shadow(Standby(level, fixed=True), target_s) for level in fixed if level]
        self._moving = [Shadow(Standby(level, share, times), target_s) for share, times in WAYS for level in numbers]
        self._shadows = self._moving + self._constants
        # The careful ones, the least of them first.
        self._early = [one for one in self._moving if one.choice.backlog_share == EARLY and one.choice.replicas]
        self._early = self._early or self._moving[-1:]
        self._all = self._constants[-1] if self._constants else self._moving[-1]
        served = most if when_late == "serve" else most / 2
        self._when_late = next((one for one in self._constants if one.choice.replicas >= served), self._all)
        # Faded sums of the requests that came, and of those late with all replicas awake.
        self._came, self._late_on_all = 0.0, 0.0
        self._all_late_s, self._overload, self._overload_s = -math.inf, False, -math.inf
        # How full replicas are when what comes is late.
        self._full = FULL
        self._in_force = self._early[0]
        self._at_s: float | None = None
        # Since the first request.
        self._seen_s = 0.0
        # Faded sums. Requests that arrived, and of those that were late on any number of replicas:
        self._requests, self._hopeless = 0.0, 0.0
        # late requests found and foretold, and foretold ones that were not found yet:
        self._late, self._foretold, self._open = 0.0, 0.0, 0.0
        # replica seconds and stops while a moving choice was in force, as they were and as foretold:
        self._paid_s, self._told_s = 0.0, 0.0
        # by constant, while it was in force and in place: requests that arrived, and late ones found.
        self._tried: dict[int, list[float]] = {}
        self._last_awake: int | None = None
        self._awake = Awake(_SETTLED_S + target_s)
        self._bars, self._bursts, self._surges = Bars(), Bursts(), Surges()
        self._stint: Stint | None = Stint()
        self._reference = max(most, least)
        # what the reference was when moving failed last
        self._moving_lost_to = 0

    @property
    def best(self) -> Standby:
        choice = self._in_force.choice
        return choice if choice.fixed or self._full == FULL else replace(choice, full=self._full)

    def seen(self, now_s: float, seen: Seen) -> Standby:
        """Learn from a report, and return what to keep from now on."""
        passed_s = 0.0 if self._at_s is None else max(now_s - self._at_s, 0.0)
        self._at_s = now_s
        fade = math.exp(-passed_s / MEMORY_S)
        self._fade(fade, passed_s)
        self._requests += len(seen.works_s)
        self._seen_s += passed_s if self._requests else 0.0
        self._hopeless += seen.hopeless
        self._late += seen.late
        self._bursts.seen(now_s, seen.late, fade)
        unforeseen = max(seen.late - self._open, 0.0)
        self._open = max(self._open - seen.late, 0.0)
        self._awake.seen(now_s, seen.awake)
        self._fill(fade, unforeseen, seen)
        self._judge(now_s, passed_s, seen)
        before_all = self._all.late * fade
        self._live(now_s, passed_s, fade, seen, unforeseen)
        self._came += len(seen.works_s)
        if self._all.late > before_all + 0.5:
            self._late_on_all += self._all.late - before_all
            self._all_late_s = now_s
        surge = self._surges.over(now_s, sum(seen.works_s), self._of_traffic)
        if surge is not None and now_s - self._overload_s > REMEMBERED * STEP_S:
            self._forget(surge, now_s)
        self._choose(now_s, seen.load)
        return self.best

    def state(self) -> dict[str, Any]:
        """What has been learned, as JSON; for `restore` of a learner with the same arguments."""
        return {
            "sums": {name: getattr(self, name) for name in _SUMS},
            "tried": [[replicas, *row] for replicas, row in self._tried.items()],
            "bars": self._bars.state(self._at_s or 0.0),
            "choices": [[_key(shadow.choice), shadow.late, shadow.cost_s] for shadow in self._shadows],
            "in_force": _key(self.best),
        }

    def restore(self, state: dict[str, Any], now_s: float, age_s: float) -> None:
        """Go on from a state that was taken `age_s` ago. Raises KeyError, TypeError or ValueError if it is not a
        state."""
        by_key = {_key(shadow.choice): shadow for shadow in self._shadows}
        fade = math.exp(-max(age_s, 0.0) / MEMORY_S)
        for name in _SUMS:
            setattr(self, name, float(state["sums"][name]) * fade)
        self._tried = {int(n): [requests * fade, late * fade] for n, requests, late in state["tried"]}
        self._bars.restore([[key, left_s - age_s, for_s] for key, left_s, for_s in state["bars"]], now_s)
        for key, late, cost_s in state["choices"]:
            if key in by_key:
                by_key[key].late, by_key[key].cost_s = late * fade, cost_s * fade
        self._in_force = by_key.get(state["in_force"], self._in_force)
        if self.best.fixed:
            self._stint = None
        self._at_s = now_s

    def _fade(self, fade: float, passed_s: float) -> None:
        self._requests, self._hopeless = self._requests * fade, self._hopeless * fade
        self._late, self._foretold = self._late * fade, self._foretold * fade
        self._came, self._late_on_all = self._came * fade, self._late_on_all * fade
        self._paid_s, self._told_s = self._paid_s * fade, self._told_s * fade
        self._open *= math.exp(-passed_s / _FORETOLD_S)
        if self._stint is not None:
            self._stint.gain_s *= fade
        for row in self._tried.values():
            row[0], row[1] = row[0] * fade, row[1] * fade

    def _of_traffic(self) -> list[float]:
        """The faded sums that belong to the traffic: requests, and what each choice made late and cost."""
        sums = [getattr(self, name) for name in _OF_TRAFFIC] + [self._bursts.squares, self._bursts.sizes]
        return sums + [shadow.late for shadow in self._shadows] + [shadow.cost_s for shadow in self._shadows]

    def _forget(self, surge: Step, now_s: float) -> None:
        """Go on as if the traffic had begun after this step, once enough has come since to know it. What is barred
        stays barred. A small choice would have been late on from what waited for it, which is not so of one that is
        taken now: its queue is empty, and it counts as late by enough to be proved in time first."""
        fade = math.exp(-(now_s - surge.at_s) / MEMORY_S)
        since = [max(sum_ - fade * before, 0.0) for sum_, before in zip(self._of_traffic(), surge.sums, strict=True)]
        if since[0] < _KNOWN_REQUESTS:
            return
        for name, value in zip(_OF_TRAFFIC, since, strict=False):
            setattr(self, name, value)
        self._bursts.squares, self._bursts.sizes, *of_choices = since[len(_OF_TRAFFIC) :]
        most_late = _UNPROVED * self._allowed
        for n, shadow in enumerate(self._shadows):
            shadow.late, shadow.cost_s = min(of_choices[n], most_late), of_choices[n + len(self._shadows)]
            shadow.empty(now_s)
        self._seen_s = now_s - surge.at_s
        self._surges.forget()

    def _fill(self, fade: float, unforeseen: float, seen: Seen) -> None:
        """Learn how full replicas may be: requests that are late though no queue foretold it met full caches."""
        if unforeseen and seen.load >= _LEAST_FULL * seen.awake > 0:
            self._full = max(min(self._full, 0.95 * seen.load / seen.awake), _LEAST_FULL)
        elif self._full < FULL:
            self._full = min(round(FULL - (FULL - self._full) * fade, 6), FULL)
            if FULL - self._full < 0.01:
                self._full = FULL

    def _judge(self, now_s: float, passed_s: float, seen: Seen) -> None:
        """What happened since the last report, held against the choice in force."""
        stop_s = self._costs.stop_s(seen.awake)
        stopped = self._last_awake is not None and seen.awake != self._last_awake
        self._last_awake = seen.awake
        if not self.best.fixed:
            self._paid_s += passed_s * seen.awake + (stop_s if stopped else 0.0)
        if self._stint is not None:
            self._stint.lived(passed_s, self._reference - seen.awake)
            if stopped:
                self._stint.stopped(stop_s, self._costs.pause_s)
        replicas = self.best.replicas
        if self.best.fixed and self._awake.lowest == seen.awake == replicas and not self._overload:
            tried = self._tried.setdefault(replicas, [0.0, 0.0])
            tried[0] += len(seen.works_s)
            tried[1] += seen.late
            burst = max(_SPENT * self._allowed * self._left(), 1.0)
            if tried[1] > 2 * self._late_share * tried[0] * self._left() + burst:
                for fewer in [n for n in self._tried if n <= replicas]:
                    del self._tried[fewer]
                for constant in self._constants:
                    if constant.choice.replicas <= replicas:
                        self._bars.failed(constant.choice.replicas, now_s)

    def _live(self, now_s: float, passed_s: float, fade: float, seen: Seen, unforeseen: float) -> None:
        """Let every choice live through it."""
        work_s, longest_s = sum(seen.works_s), max(seen.works_s, default=0.0)
        quiet = longest_s <= 0.5 * self.target_s
        lowest = self._awake.lowest
        for shadow in self._shadows:
            shadow.late *= fade
            shadow.cost_s *= fade
            if quiet and not unforeseen and shadow.rests(now_s, seen.load, self._full):
                n = shadow.replicas
                if work_s <= n * min(passed_s, 0.5 * self.target_s):
                    # Shortcut for `live`: most of them, most of the time.
                    shadow.cost_s += passed_s * n
                    if shadow is self._in_force and not shadow.choice.fixed:
                        self._told_s += passed_s * n
                    continue
            if unforeseen and shadow.replicas <= lowest:
                shadow.late += unforeseen
            before_s = shadow.cost_s
            late = shadow.live(now_s, passed_s, seen, self._most, self._costs, self._full)
            if shadow is self._in_force:
                self._foretold += late + (unforeseen if shadow.replicas <= lowest else 0.0)
                self._open += late
                if not shadow.choice.fixed:
                    self._told_s += shadow.cost_s - before_s

    def _choose(self, now_s: float, load: float) -> None:
        left, found = self._left(), self._found()
        allowed = max(self._allowed, _AT_FIRST * self._allowed_in_all) * left + 1e-9
        known = self._requests >= _KNOWN_REQUESTS and self._seen_s >= _KNOWN_S
        constants = [shadow for shadow in self._constants if known and self._able(shadow, now_s, allowed, found)]
        if constants:
            self._reference = min(shadow.choice.replicas for shadow in constants)
        else:
            self._reference = self._most
        if 0 < self._moving_lost_to < self._reference:
            # What it lost to was too few.
            self._bars.lift(_MOVING)
            self._moving_lost_to = 0
        self._end_stint(now_s)
        moving = [] if self._bars.barred(_MOVING, now_s) else self._moving if left == 1.0 else self._early
        if self._seen_s < _KNOWN_S:
            moving = self._early[:1]
        self._judge_overload(known and self._late_on_all * found > self._late_share * self._came, now_s)
        if self._overload:
            self._take(self._when_late, now_s)
            return
        now = self._in_force
        if now.choice.fixed and now not in constants and now.overrun(now_s, load / self._full):
            # Its allowance is spent and the burst goes on: the next constant may be as wrong, and another stop away.
            moving, constants = self._early, []
        able = [shadow for shadow in moving if self._able(shadow, now_s, allowed, found)]
        if constants and (not able or not self._gives_way(constants, now, load, now_s, allowed, found)):
            able += constants
        if not able:  # no choice suffices: take one with fewest late requests
            among = self._shadows if known else self._early
            fewest = min(shadow.late for shadow in among)
            able = [shadow for shadow in among if shadow.late <= fewest]
        best = min(able, key=self._cost_s)
        saved_s = self._cost_s(now) - self._cost_s(best)
        if now in able and saved_s <= 2 * self._costs.stop_s(now.choice.replicas):
            return
        self._take(best, now_s)

    def _take(self, best: Shadow, now_s: float) -> None:
        self._in_force = best
        if not best.choice.fixed:
            self._stint = self._stint or Stint()
            self._stint.ending_s = None
        elif self._stint is not None and self._stint.ending_s is None:
            self._stint.ending_s = now_s

    def _end_stint(self, now_s: float) -> None:
        """Bar moving if it cost more than the reference: by a hand-over there and back, or at its end by anything."""
        stint = self._stint
        if stint is None:
            return
        enough_s = 2 * self._costs.stop_s(self._reference)
        if not self.best.fixed and stint.gain_s < -enough_s:
            self._moving_failed(now_s)
        if stint.ending_s is None or not self.best.fixed:
            return
        there = self._last_awake == self.best.replicas
        if there or now_s - stint.ending_s > 60.0:
            gain_s = stint.gain_s - stint.owed_s
            if gain_s < 0:
                self._moving_failed(now_s)
            elif gain_s > enough_s:
                self._bars.proved(_MOVING)
            self._stint = None

    def _moving_failed(self, now_s: float) -> None:
        if not self._bars.barred(_MOVING, now_s):
            self._bars.failed(_MOVING, now_s)
            self._moving_lost_to = self._reference

    def _able(self, shadow: Shadow, now_s: float, allowed: float, found: float) -> bool:
        """Whether it may be tried, and at most `allowed` requests would have been late."""
        late = shadow.late * found
        if shadow is not self._in_force:
            late += math.sqrt(late * self._bursts.mean)  # lest it come and go by chance
        return late <= allowed and not (shadow.choice.fixed and self._bars.barred(shadow.choice.replicas, now_s))

    def _judge_overload(self, too_late: bool, now_s: float) -> None:
        """too_late: all replicas together make more requests late than may be. Once an overload is over, what they
        made late counts against no choice."""
        lasts = too_late and now_s - self._all_late_s < _OVERLOAD_S
        if self._overload and not lasts:
            common = self._all.late
            self._late = max(self._late - common, 0.0)
            for shadow in self._shadows:
                shadow.late = max(shadow.late - common, 0.0)
        self._overload = lasts
        if lasts:
            self._overload_s = now_s

    def _gives_way(
        self, constants: list[Shadow], now: Shadow, load: float, now_s: float, allowed: float, found: float
    ) -> bool:
        """Whether the number should move now, as the reference is overrun and part of its allowance is spent. Another
        constant is no answer: it would come and go with every burst."""
        reference = min(constants, key=lambda shadow: shadow.choice.replicas)
        if now.choice.fixed and now is not reference:
            return False
        return reference.late * found > _SPENT * allowed and reference.overrun(now_s, load / self._full)

    def _found(self) -> float:
        """Late requests found over those foretold, if fewer: engines may be faster than the measured rate says."""
        slack = 0.25 * self._late_share * self._requests + 1
        return min(max((self._late + slack) / (self._foretold + slack), 0.5), 1.0)

    @property
    def _allowed(self) -> float:
        """Requests that may be late, beside those that are late whatever is done."""
        share = self._late_share * self._requests
        return max(share - self._hopeless, _KEPT_ALLOWANCE * share)

    @property
    def _allowed_in_all(self) -> float:
        """The same over the whole memory, if requests go on as they came so far."""
        return self._allowed / -math.expm1(-max(self._seen_s, _KNOWN_S) / MEMORY_S)

    def _left(self) -> float:
        """What part of the allowance a choice may plan for. It sinks once half of it is spent, as the price of a
        constraint rises that is about to be violated."""
        allowed = self._allowed_in_all
        return min(max(_SINKS_AT - (self._late - 1) / allowed, _KEPT_ALLOWANCE), 1.0) if allowed else 1.0

    def _cost_s(self, shadow: Shadow) -> float:
        if shadow.choice.fixed:
            return shadow.cost_s
        slack_s = self._costs.stop_s(0)
        return shadow.cost_s * min(max((self._paid_s + slack_s) / (self._told_s + slack_s), 1.0), 2.0)
