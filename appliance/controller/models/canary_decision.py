"""Decides whether a canary is promoted, rolled back or watched further: a pure function of both versions' data.

Errors are tested at every check, by Fisher's exact test (R. A. Fisher, 1922) with a threshold far below the usual 5 %,
because there are many checks: those of everybody, and those of everybody but who asked the canary most. Times are
judged once the canary was watched long enough, so that an engine's first slow requests do not decide.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter
from typing import Literal

from appliance.controller.bus.load import Times, VersionLoad
from appliance.gateway.routing.canary_comparison import BUCKETS_PER_DOUBLING, SHORTEST_S

ERROR_CHANCE = 0.001
"""Roll back when chance would produce as many canary errors less often than this."""
SLOWER_FACTOR = 1.5
SLOWER_SLACK_S = 0.005
"""How much longer 95 of 100 requests may take than with the other version: a factor, and seconds of tolerance."""
ENOUGH = 10
"""Answers of each version to an owner whose times are compared."""
LOSS_BOUND_NATS = 0.05
"""How much worse its held-out loss may be."""

Verdict = Literal["wait", "promote", "roll back"]


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


def decide(canary: Side, stable: Side, terms: CanaryTerms, now_s: float, failed_reason: str = "") -> Decision:
    """failed_reason: why the canary's engines do not start, empty while they do."""
    if failed_reason:
        return Decision("roll back", f"the engine of {canary.version} does not start: {failed_reason}")
    if canary.valid_loss is not None and stable.valid_loss is not None:
        worse = canary.valid_loss - stable.valid_loss
        if worse > LOSS_BOUND_NATS or math.isnan(canary.valid_loss):
            return Decision(
                "roll back",
                f"the held-out loss of {canary.version} is {canary.valid_loss:.4f}, that of "
                f"{stable.version} {stable.valid_loss:.4f}",
            )
    new, old = canary.load, stable.load
    # Whoever asked it thousands of times what it answers well hid what failed for others.
    most = max(new.asked, key=lambda owner: new.asked[owner], default="")
    for mine, its, but in ((new, old, ""), (new.without(most), old.without(most), ", but for who asked it most")):
        requests, errors = as_shared(mine, its, terms.share)
        if chance_of_errors(mine.errors, mine.requests, errors, requests) < ERROR_CHANCE:
            seen = f", {its.requests} in all" if requests < its.requests else ""
            return Decision(
                "roll back",
                f"{canary.version} failed {mine.errors} of {mine.requests} requests, "
                f"{stable.version} {errors} of {requests}{seen}{but}",
            )
    few = [
        f"{side.version} answered {side.load.requests} of {terms.min_requests} requests"
        for side in (canary, stable)
        if side.load.requests < terms.min_requests
    ]
    left_s = terms.since_s + terms.watch_s - now_s
    if few:
        return Decision("wait", "; ".join(few))
    if left_s > 0:
        return Decision("wait", f"watched for {math.ceil(left_s)} s more")
    compared = pairs(new.owners, old.owners)
    for what, of in (("time to first byte", attrgetter("first_byte")), ("duration", attrgetter("duration"))):
        found = [(slow, usual) for mine, its in compared if (slow := p95_s(of(mine))) and (usual := p95_s(of(its)))]
        slower = [(slow, usual) for slow, usual in found if slow > SLOWER_FACTOR * usual + SLOWER_SLACK_S]
        if 2 * len(slower) > len(found):
            slow, usual = min(slower, key=lambda pair: pair[0] / pair[1])
            whose = f", or worse, for {len(slower)} of {len(found)} owners" if len(found) > 1 else ""
            return Decision(
                "roll back",
                f"the {what} of {canary.version} is {slow:.3g} s for 95 of 100 requests, "
                f"that of {stable.version} {usual:.3g} s{whose}",
            )
    return Decision(
        "promote",
        f"{canary.version} is as good as {stable.version}: {new.errors} of {new.requests} "
        f"requests failed, with {stable.version} {old.errors} of {old.requests}",
    )


def as_shared(new: VersionLoad, old: VersionLoad, share: float) -> tuple[int, int]:
    """(requests, errors) of the old version, of which each owner's count for as many as the canary's share makes of his
    with that. What owners have beyond it stands for those whose conversations are the canary's alone, the same number
    of each owner's: by ten thousand good requests of one owner, the few failures that both versions have looked many
    for the canary."""
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


def pairs(new: Mapping[str, Times], old: Mapping[str, Times]) -> list[tuple[Times, Times]]:
    """Times of each owner who has had enough answers of both versions, and of all others together if those have, or if
    only one owner has: beside a few answers of each of the others, he decided alone.

    Owners are compared each with themselves, and more than half have to agree: who asks knows which version answers a
    conversation, and one of many could have it rolled back by asking for long answers where it was the new one."""
    sides = {owner: (times, old.get(owner, Times())) for owner, times in new.items()}
    enough = {owner: pair for owner, pair in sides.items() if _is_enough(pair)}
    rest = _together(new, enough), _together(old, enough)
    if not enough:
        return [rest]
    return [*enough.values(), *([rest] if _is_enough(rest, 1 if len(enough) == 1 else ENOUGH) else [])]


def _is_enough(pair: tuple[Times, Times], least: int = ENOUGH) -> bool:
    return min(sum(times.first_byte.values()) for times in pair) >= least


def _together(of: Mapping[str, Times], but: Collection[str]) -> Times:
    return reduce(Times.plus, (times for owner, times in of.items() if owner not in but), Times())


def p95_s(counts: Mapping[int, int]) -> float | None:
    """95th percentile of times counted in buckets (s): the upper end of its bucket. None without any."""
    total, seen = sum(counts.values()), 0
    for index in sorted(counts):
        seen += counts[index]
        if seen >= 0.95 * total:
            return SHORTEST_S * 2 ** (index / BUCKETS_PER_DOUBLING)
    return None


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
