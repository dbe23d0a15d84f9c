"""Decides whether a canary is promoted, rolled back or watched further: a pure function of both versions' data.

Errors are tested at every check, by Fisher's exact test (R. A. Fisher, 1922) with a threshold far below the usual 5 %,
because there are many checks. Each test is made twice: over all owners, and over all but the owner who asked the canary
most. A refused request is an error too: one at fault itself comes to both versions alike. Times are judged once the
canary was watched long enough, so that an engine's first slow requests do not decide.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from appliance.controller.bus.load import Times, VersionLoad
from appliance.gateway.routing.canary_comparison import BUCKETS_PER_DOUBLING, SHORTEST_S

ERROR_CHANCE = 0.001
"""Roll back when chance would produce as many canary errors less often than this."""
SLOWER_FACTOR = 1.5
SLOWER_SLACK_S = 0.005
"""How much higher the 95th percentile may be than the other version's: a factor, and seconds of tolerance."""
SLOWER_CHANCE = 0.01
"""It counts as certainly slower when chance would make as many of its answers late less often than this."""
PATIENCE = 3
"""After this many watch periods, the requests of one owner alone, and a few late answers, are enough."""
ENDURANCE = 10
"""A canary goes back once, for this many watch periods, one owner's answers alone have told something bad of it."""
ENOUGH = 10
"""An owner's times are compared once each version has answered this many of his requests."""
LOSS_BOUND_NATS = 0.05
"""How much worse its held-out loss may be."""

Verdict = Literal["wait", "promote", "roll back"]
Owners = Mapping[str, Times]


@dataclass(frozen=True, slots=True)
class Side:
    """One version. valid_loss: nats per token on the held-out part of its job's data, None where not measured."""

    version: str
    load: VersionLoad = VersionLoad()
    valid_loss: float | None = None


@dataclass(frozen=True, slots=True)
class CanaryTerms:
    """The terms of the comparison. Times in seconds since 1970; min_requests: of each version; share: the canary's, of
    conversations."""

    since_s: float
    watch_s: float
    min_requests: int
    share: float


@dataclass(frozen=True, slots=True)
class Decision:
    verdict: Verdict
    reason: str


class OfOne(Decision):
    """It waits because only one owner's answers tell something bad, who is not to decide alone."""

    __slots__ = ()


def decide(
    canary: Side,
    stable: Side,
    terms: CanaryTerms,
    now_s: float,
    failed_reason: str = "",
    of_one_since_s: float | None = None,
) -> Decision:
    """failed_reason: why the canary's engines do not start, empty while they do. of_one_since_s: when this was first
    `OfOne`, None: it never was. The first rule that finds something decides."""
    if failed_reason:
        return Decision("roll back", f"the engine of {canary.version} does not start: {failed_reason}")
    left_s = terms.since_s + terms.watch_s - now_s
    waits_for_others = left_s + (PATIENCE - 1) * terms.watch_s > 0
    new, old = canary.load, stable.load
    found = (
        worse_loss(canary, stable)
        or more_errors(canary, stable, terms.share)
        or too_early(canary, stable, terms.min_requests, left_s, waits_for_others)
        or slower(canary, stable, waits_for_others)
        or Decision(
            "promote",
            f"{canary.version} is as good as {stable.version}: {new.errors} of {new.requests} "
            f"requests failed, with {stable.version} {old.errors} of {old.requests}",
        )
    )
    if not isinstance(found, OfOne):
        return found
    # Or whoever asks it without end would keep it, and its engine, from ever being decided.
    if of_one_since_s is not None and now_s >= of_one_since_s + ENDURANCE * terms.watch_s:
        return Decision("roll back", f"{found.reason}, for {ENDURANCE} times as long as it was to be watched")
    by_hand = f"decide by hand; an automatic one goes back after {ENDURANCE} times as long as it was to be watched"
    return OfOne("wait", f"{found.reason}: {by_hand}")


def worse_loss(canary: Side, stable: Side) -> Decision | None:
    if canary.valid_loss is None or stable.valid_loss is None:
        return None
    if not (canary.valid_loss - stable.valid_loss > LOSS_BOUND_NATS or math.isnan(canary.valid_loss)):
        return None
    return Decision(
        "roll back",
        f"the held-out loss of {canary.version} is {canary.valid_loss:.4f}, that of "
        f"{stable.version} {stable.valid_loss:.4f}",
    )


def more_errors(canary: Side, stable: Side, share: float) -> Decision | None:
    new, old = canary.load, stable.load
    # Without this, thousands of requests of one owner that it answers well hid what failed for others.
    most = max(new.asked, key=lambda owner: new.asked[owner], default="")
    for mine, its, but in ((new, old, ""), (new.without(most), old.without(most), ", but for who asked it most")):
        requests, errors = as_shared(mine, its, share)
        if chance_of_errors(mine.errors, mine.requests, errors, requests) < ERROR_CHANCE:
            seen = f", {its.requests} in all" if requests < its.requests else ""
            return Decision(
                "roll back",
                f"{canary.version} failed {mine.errors} of {mine.requests} requests, "
                f"{stable.version} {errors} of {requests}{seen}{but}",
            )
    return None


def too_early(canary: Side, stable: Side, min_requests: int, left_s: float, waits_for_others: bool) -> Decision | None:
    few = [lacking for side in (canary, stable) if (lacking := too_few(side, min_requests, waits_for_others))]
    if few:
        return Decision("wait", "; ".join(few))
    return Decision("wait", f"watched for {math.ceil(left_s)} s more") if left_s > 0 else None


def slower(canary: Side, stable: Side, waits_for_others: bool) -> Decision | None:
    compared = voters(canary.load.owners, stable.load.owners)
    unsure: Decision | None = None
    for what, of in (("time to first byte", attrgetter("first_byte")), ("duration", attrgetter("duration"))):
        heard = [(new_of, times) for new_of, old_of in compared if (times := p95s(new_of, old_of, of)) is not None]
        found = [times for _, times in heard]
        slow = [times for times in found if times.slow_s > times.late_s]
        if 2 * len(slow) <= len(found):
            continue
        least = min(slow, key=lambda times: times.slow_s / times.usual_s)
        its = f"the {what} of {canary.version} is {least.slow_s:.3g} s for 95 of 100 requests"
        that = f"that of {stable.version} {least.usual_s:.3g} s"
        if waits_for_others and 2 * sum(times.sure for times in slow) <= len(found):
            # With ten answers, one alone decides the 95th percentile: under a flood of refusals, a good version was
            # rolled back.
            unsure = unsure or Decision("wait", f"{its}, {that}, by so few that chance may have made them late")
            continue
        one = heard[0][0] if len(heard) == 1 else {}
        if len(one) == 1 and any(owner not in one for owner in canary.load.asked):
            # Requests of others that wait behind this owner's are not timed: he would decide alone.
            return OfOne("wait", f"{its} of one owner, {that}, and others' answers do not say")
        whose = f", or worse, for {len(slow)} of {len(found)} owners" if len(found) > 1 else ""
        return Decision("roll back", f"{its}, {that}{whose}")
    return unsure


def too_few(side: Side, least: int, waits_for_others: bool) -> str:
    """Why its requests are too few, empty where they are not. One owner's requests count for no more than those of all
    others, while others ask it and are waited for: with fifty requests, one owner had a version promoted that others
    had hardly tried. The wait ends, or an owner who asks once could keep it from being promoted for ever."""
    requests, by_owner = side.load.requests, side.load.asked
    others = requests - max((number for number, _ in by_owner.values()), default=0)
    counted = min(requests, 2 * others) if others and waits_for_others else requests
    if counted >= least:
        return ""
    if counted == requests:
        return f"{side.version} answered {requests} of {least} requests"
    return (
        f"{side.version} answered {requests} requests, {requests - others} of one owner, of whom no more count than of "
        f"all others: {counted} of {least}"
    )


def as_shared(new: VersionLoad, old: VersionLoad, share: float) -> tuple[int, int]:
    """(requests, errors) of the old version, weighted by owner as the canary's requests are: each owner counts in
    proportion to what he asked the canary, by its share. Room that is left is filled with the other requests, the same
    number from each owner; they stand for owners whose conversations all went to the canary. Without weights, ten
    thousand good requests of one owner made the few failures that both versions have look many for the canary."""
    each = max(1.0, (1 - share) / share)
    counted, beyond = dict[str, float](), dict[str, float]()
    for owner, (requests, _) in old.asked.items():
        counted[owner] = min(float(requests), each * new.asked.get(owner, (0, 0))[0])
        beyond[owner] = requests - counted[owner]
    room = each * new.requests - sum(counted.values())
    for waiting, owner in zip(range(len(beyond), 0, -1), sorted(beyond, key=lambda owner: beyond[owner]), strict=True):
        more = min(beyond[owner], room / waiting)
        counted[owner] += more
        room -= more
    errors = sum(counted[owner] * errors / requests for owner, (requests, errors) in old.asked.items() if requests)
    return round(sum(counted.values())), round(errors)


def voters(new: Mapping[str, Times], old: Mapping[str, Times]) -> list[tuple[Owners, Owners]]:
    """Pairs of times, with the canary and with the other version: one pair for each owner with enough answers of both,
    and one for all other owners together if they have enough. If only one owner has enough, the others need just one
    answer of each version: otherwise he would decide alone.

    Each owner is compared with himself, and more than half have to agree: clients know which version answers a
    conversation, and one of them could have the canary rolled back by asking it alone for long answers."""
    enough = [owner for owner, times in new.items() if _answers(times) >= ENOUGH and _answers(old.get(owner)) >= ENOUGH]
    rest = _without(new, enough), _without(old, enough)
    least = 1 if len(enough) == 1 else ENOUGH
    heard = not enough or all(sum(map(_answers, side.values())) >= least for side in rest)
    return [*(({owner: new[owner]}, {owner: old[owner]}) for owner in enough), *([rest] if heard else [])]


@dataclass(frozen=True, slots=True)
class Compared:
    """One voter's 95th percentiles of times with the canary and with the other version (s). late_s: beyond it an answer
    is late; sure: chance would hardly make so many of the canary's late."""

    slow_s: float
    usual_s: float
    late_s: float
    sure: bool


def p95s(new: Owners, old: Owners, of: Callable[[Times], Mapping[int, int]]) -> Compared | None:
    """None where a version has no times.

    Where several owners ask, each counts for fewer than `ENOUGH` answers: otherwise one owner's thousands of short
    answers from one version drowned all others. They are also compared without the owner who has most of a version's
    longest times: nine long answers of one owner had the canary rolled back, or hid that it was slow. (Where only two
    owners ask, the one with the canary's longest times is left out.)"""
    several = len(new) > 1
    of_new, of_old = (
        {owner: _few(of(times)) if several else of(times) for owner, times in side.items()} for side in (new, old)
    )
    if several:
        for owner in {_longest(of_new), _longest(of_old)} if len(of_new) > 2 else {_longest(of_new)}:
            of_new.pop(owner, None)
            of_old.pop(owner, None)
    all_new, all_old = _sum(of_new.values()), _sum(of_old.values())
    mine, usual = p95_s(all_new), p95_s(all_old)
    if mine is None or usual is None:
        return None
    late_s, unit = SLOWER_FACTOR * usual + SLOWER_SLACK_S, 1000 if several else 1
    (new_late, answers), (old_late, old_answers) = (_late(counts, late_s, unit) for counts in (all_new, all_old))
    chance = chance_of_errors(new_late, answers, old_late, old_answers)
    return Compared(mine, usual, late_s, chance < SLOWER_CHANCE)


def _answers(times: Times | None) -> int:
    return 0 if times is None else sum(times.first_byte.values())


def _without(of: Owners, owners: Collection[str]) -> Owners:
    return {owner: times for owner, times in of.items() if owner not in owners}


def _few(counts: Mapping[int, int]) -> dict[int, int]:
    """In thousandths of an answer, as many of each time as fewer than `ENOUGH` answers would have."""
    total = sum(counts.values())
    return {at: 1000 * number * min(total, ENOUGH - 1) // total for at, number in counts.items()}


def _longest(of: Mapping[str, Mapping[int, int]]) -> str:
    """The owner who has the most of the times from the 95th percentile on."""
    slow = p95_bucket(_sum(of.values()))
    return max(of, key=lambda owner: sum(number for at, number in of[owner].items() if at >= slow), default="")


def _sum(of: Iterable[Mapping[int, int]]) -> dict[int, int]:
    total = defaultdict[int, int](int)
    for counts in of:
        for at, number in counts.items():
            total[at] += number
    return total


def _late(counts: Mapping[int, int], late_s: float, unit: int) -> tuple[int, int]:
    """(late, all) answers."""
    late = sum(number for index, number in counts.items() if _upper_s(index) > late_s)
    return round(late / unit), round(sum(counts.values()) / unit)


def _upper_s(bucket: int) -> float:
    return SHORTEST_S * 2 ** (bucket / BUCKETS_PER_DOUBLING)


def p95_bucket(counts: Mapping[int, int]) -> int:
    """The bucket of the 95th percentile; 0 without any."""
    total, seen = sum(counts.values()), 0
    for index in sorted(counts):
        seen += counts[index]
        if seen >= 0.95 * total:
            return index
    return 0


def p95_s(counts: Mapping[int, int]) -> float | None:
    """95th percentile of times counted in buckets (s): the upper end of its bucket. None without any."""
    return _upper_s(p95_bucket(counts)) if any(counts.values()) else None


def chance_of_errors(new_errors: int, new_requests: int, old_errors: int, old_requests: int) -> float:
    """Probability that the canary has at least `new_errors` if all errors fell on requests of both versions by chance:
    the upper tail of the hypergeometric distribution. 1 if the canary's share of the errors is no larger than its share
    of the requests, and while the other version has had none."""
    total, errors = new_requests + old_requests, new_errors + old_errors
    if not old_requests or new_errors * total <= errors * new_requests:
        return 1.0
    whole = _log_choose(total, errors)
    tail = 0.0
    for count in range(new_errors, min(errors, new_requests) + 1):
        if errors - count > old_requests:
            continue
        term = _log_choose(new_requests, count) + _log_choose(old_requests, errors - count) - whole
        tail += math.exp(term)
        if term < math.log(1e-18):
            break  # it begins past the peak, where terms only fall
    return min(tail, 1.0)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
