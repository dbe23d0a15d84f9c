"""When a canary is promoted, rolled back or watched on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.controller.bus.load import Times, VersionLoad
from appliance.controller.models.canary_decision import CanaryTerms, Decision, Side, chance_of_errors, decide, p95_s
from appliance.gateway.routing.canary_comparison import bucket

TERMS = CanaryTerms(since_s=100.0, watch_s=600.0, min_requests=50, share=0.1)
OVER_S = 701.0
TEN_TIMES_S = OVER_S + 10 * TERMS.watch_s


def side(
    version: str,
    requests: int = 200,
    errors: int = 0,
    first_s: float = 0.1,
    whole_s: float = 1.0,
    valid_loss: float | None = None,
) -> Side:
    good, asked = requests - errors, {"a": (requests, errors)}
    times = {owner: Times({bucket(first_s): good}, {bucket(whole_s): good}) for owner in ("a", "b")}
    return Side(version, VersionLoad(times, asked), valid_loss)


NEW, OLD = side("v2"), side("v1", 1800)


def test_as_good_and_watched_long_enough_is_promoted() -> None:
    assert decide(NEW, OLD, TERMS, 700.0).verdict == "promote"
    early = decide(NEW, OLD, TERMS, 640.5)
    assert (early.verdict, early.reason) == ("wait", "watched for 60 s more")


def test_too_few_requests_of_either_version_decide_nothing_good() -> None:
    assert decide(side("v2", 49), OLD, TERMS, OVER_S).reason == "v2 answered 49 of 50 requests"
    assert decide(NEW, Side("v1"), TERMS, OVER_S).verdict == "wait"


def test_one_owner_alone_does_not_make_up_the_least_number_of_requests_while_others_ask() -> None:
    """Fifty requests of one owner had a version promoted that others had hardly tried."""

    def found(now_s: float, **asked: tuple[int, int]) -> Decision:
        return decide(
            Side("v2", VersionLoad(asked=asked)), Side("v1", VersionLoad(asked={"a": (900, 0)})), TERMS, now_s
        )

    told = found(OVER_S, m=(5000, 0), a=(3, 0), b=(1, 0))
    assert told.verdict == "wait" and told.reason.endswith(": 8 of 50"), told
    assert found(OVER_S, m=(5000, 0), a=(15, 0), b=(10, 0)).verdict == "promote"
    assert found(OVER_S, m=(50, 0)).verdict == "promote", "nobody else asks it"
    assert found(100.0 + 3 * 600, m=(5000, 0), a=(1, 0)).verdict == "promote", "who asks once does not stop it"


def test_errors_roll_back_at_once_and_say_how_many() -> None:
    found = decide(side("v2", 8, errors=6), side("v1", 72), TERMS, 101.0)
    assert (found.verdict, found.reason) == ("roll back", "v2 failed 6 of 8 requests, v1 0 of 72")


def test_errors_that_both_have_and_a_few_by_chance_do_not() -> None:
    assert decide(side("v2", 200, errors=20), side("v1", 1800, errors=180), TERMS, OVER_S).verdict == "promote"
    assert decide(side("v2", 200, errors=1), OLD, TERMS, OVER_S).verdict == "promote"
    assert decide(side("v2", 10, errors=10), Side("v1"), TERMS, OVER_S).verdict == "wait", "nothing to compare with"


@pytest.mark.parametrize("slow", ["first_s", "whole_s"])
def test_slower_than_half_as_much_again_rolls_back_when_the_time_is_over(slow: str) -> None:
    usual = {"first_s": 0.1, "whole_s": 1.0}[slow]
    assert decide(side("v2", **{slow: usual * 1.3}), OLD, TERMS, OVER_S).verdict == "promote"
    late = side("v2", **{slow: usual * 2})
    assert decide(late, OLD, TERMS, 300.0).verdict == "wait"
    found = decide(late, OLD, TERMS, OVER_S)
    assert found.verdict == "roll back" and "95 of 100 requests" in found.reason


def test_a_worse_held_out_loss_rolls_back_and_an_unknown_one_does_not() -> None:
    worse, better = replace(NEW, valid_loss=2.2), replace(OLD, valid_loss=2.0)
    assert decide(worse, better, TERMS, 101.0).reason == "the held-out loss of v2 is 2.2000, that of v1 2.0000"
    assert decide(replace(NEW, valid_loss=2.03), better, TERMS, OVER_S).verdict == "promote"
    assert decide(worse, OLD, TERMS, OVER_S).verdict == "promote"
    assert decide(replace(NEW, valid_loss=float("nan")), better, TERMS, 101.0).verdict == "roll back"


def test_an_engine_that_does_not_start_rolls_back() -> None:
    found = decide(Side("v2"), OLD, TERMS, 101.0, "no kernel image")
    assert (found.verdict, found.reason) == ("roll back", "the engine of v2 does not start: no kernel image")


def test_the_chance_of_errors_is_fishers() -> None:
    # Fisher's tea: 3 of 4 or better, 17 of 70.
    assert chance_of_errors(3, 4, 1, 4) == pytest.approx(17 / 70)
    assert chance_of_errors(0, 4, 1, 4) == 1.0
    assert chance_of_errors(4000, 20_000, 9000, 180_000) < 1e-18


def test_times_are_known_to_a_fifth() -> None:
    for seconds in (0.0004, 0.001, 0.0123, 0.5, 7.0, 300.0):
        found = p95_s({bucket(seconds): 3})
        assert found is not None and max(seconds, 0.001) * 0.999 <= found <= max(seconds, 0.001) * 1.19
    assert p95_s({bucket(0.1): 95, bucket(9.0): 5}) == pytest.approx(0.1, rel=0.19)
    assert p95_s({}) is None


def test_one_owner_of_several_decides_nothing_by_the_times_of_his_answers() -> None:
    """Who asks is told which version answers a conversation: long answers there alone had a canary rolled back."""
    usual, late = Times({bucket(0.1): 20}, {bucket(1.0): 20}), Times({bucket(0.1): 900}, {bucket(60.0): 900})

    def verdict(new: dict[str, Times]) -> tuple[str, str]:
        old, many = {owner: usual for owner in new}, {owner: (1000, 0) for owner in new}
        found = decide(*(Side(name, VersionLoad(of, many)) for name, of in (("v2", new), ("v1", old))), TERMS, OVER_S)
        return found.verdict, found.reason

    few = Times({bucket(0.1): 3}, {bucket(0.1): 3})
    assert verdict({"a": usual, "b": usual, "c": late, "d": few})[0] == "promote"
    assert verdict({"a": usual, "c": late})[0] == "promote"
    told = verdict({"a": usual, "b": late, "c": late})
    assert told[0] == "roll back" and told[1].endswith(", or worse, for 2 of 3 owners")
    assert verdict({"c": late})[0] == "roll back"
    assert verdict({"a": few, "b": few, "c": late})[0] == "promote", "nor where no other has had many"
    assert verdict({owner: few for owner in "abcd"})[0] == "promote", "all together"


def test_nobody_hides_what_fails_for_others() -> None:
    """With 5,000 short requests of one owner, which knows what is answered by the canary, a version that failed four of
    ten was promoted."""
    times = {"a": Times({bucket(0.1): 100}, {bucket(1.0): 100})}

    def verdict(**more: tuple[int, int]) -> tuple[str, str]:
        asked = {"a": (10, 4), **more}
        sides = Side("v2", VersionLoad(times, asked)), Side("v1", VersionLoad(times, {"a": (90, 0)}))
        found = decide(*sides, TERMS, OVER_S)
        return found.verdict, found.reason

    assert verdict()[0] == "roll back"
    assert verdict(b=(5000, 0)) == ("roll back", "v2 failed 4 of 10 requests, v1 0 of 90, but for who asked it most")


def test_nobody_makes_failures_that_both_versions_have_many_for_the_canary() -> None:
    """By 20,000 good requests of one owner to the old version, two failures of a hundred, which both have, rolled the
    new one back. Nor do two owners together, nor one where others' conversations are one version's alone."""

    def verdict(old: dict[str, tuple[int, int]], new: dict[str, tuple[int, int]]) -> str:
        sides = (Side(name, VersionLoad(asked=asked)) for name, asked in (("v2", new), ("v1", old)))
        return decide(*sides, TERMS, 101.0).verdict

    both = {"a": (900, 18), "b": (900, 18)}, {"a": (100, 2), "b": (100, 2)}
    assert verdict(*both) == "wait"
    for more in ({"m": (20_000, 0)}, {"m": (20_000, 0), "n": (20_000, 0)}):
        assert verdict({**both[0], **more}, both[1]) == "wait"
        assert verdict({**both[0], **more}, {**both[1], "m": (30, 0)}) == "wait"
    lumpy = {"a": (1700, 34), "b": (100, 2), "c": (100, 2)}, {"a": (60, 1), "b": (140, 3)}
    assert verdict(*lumpy) == "wait"
    assert verdict({**lumpy[0], "m": (100_000, 0)}, lumpy[1]) == "wait"
    assert verdict({"a": (50, 0)}, {"b": (6, 6)}) == "roll back", "whose conversations are one version's alone"
    assert verdict({**both[0], "m": (20_000, 0)}, {"a": (100, 30), "b": (100, 30)}) == "roll back"


def test_who_has_few_answers_is_heard_with_the_others_who_have() -> None:
    """Of two hundred owners with a few answers each, and one who asked the new version for long ones, he alone was
    asked."""
    few = {f"owner {number}": Times({bucket(0.1): 3}, {bucket(1.0): 3}) for number in range(200)}
    new = {"c": Times({bucket(0.1): 20}, {bucket(60.0): 20}), **few}
    old = {"c": Times({bucket(0.1): 20}, {bucket(1.0): 20}), **few}
    sides = (Side(name, VersionLoad(times, {"a": (620, 0)})) for name, times in (("v2", new), ("v1", old)))
    assert decide(*sides, TERMS, OVER_S).verdict == "promote"


def test_one_owner_decides_nothing_by_times_while_others_who_asked_it_have_none() -> None:
    """A crowd of one owner's on the canary's engine keeps others' times from being counted."""
    usual, late = Times({bucket(0.1): 20}, {bucket(1.0): 20}), Times({bucket(0.1): 20}, {bucket(60.0): 20})
    old = Side("v1", VersionLoad({"m": usual, "a": usual}, {"m": (900, 0), "a": (900, 0)}))

    def found(new: Times, now_s: float = OVER_S, since_s: float | None = OVER_S, **more: tuple[int, int]) -> Decision:
        canary = Side("v2", VersionLoad({"m": new}, {"m": (99, 0), **more}))
        return decide(canary, old, TERMS, now_s, of_one_since_s=since_s)

    assert found(late).verdict == "roll back", "nobody else asked it"
    assert found(usual, a=(25, 0)).verdict == "promote"
    told = found(late, a=(25, 0))
    assert told.verdict == "wait" and "of one owner" in told.reason and "by hand" in told.reason
    assert found(late, TEN_TIMES_S - 1, a=(25, 0)).verdict == "wait"
    ended = found(late, TEN_TIMES_S, a=(25, 0))
    assert ended.verdict == "roll back" and ended.reason.endswith("for 10 times as long as it was to be watched")
    assert found(late, TEN_TIMES_S, None, a=(25, 0)).verdict == "wait", "it was not bad for so long"
    assert found(usual, TEN_TIMES_S, a=(25, 0)).verdict == "promote"


def test_nobody_decides_by_times_among_many_who_have_few_answers() -> None:
    """Where nobody had ten answers of each version, nine long ones of one owner rolled the canary back, and so did
    10,000 short ones of the old version; as many of the new one hid that it was slow for all others."""

    def times(number: int, seconds: float) -> Times:
        return Times({bucket(0.1): number}, {bucket(seconds): number})

    few, late = ({f"owner {n}": times(8, seconds) for n in range(15)} for seconds in (1.0, 9.0))

    def verdict(new: dict[str, Times], old: dict[str, Times]) -> str:
        sides = (Side(name, VersionLoad(of, {"a": (1000, 0)})) for name, of in (("v2", new), ("v1", old)))
        return decide(*sides, TERMS, OVER_S).verdict

    assert verdict({**few, "m": times(9, 60.0)}, {**few, "m": times(9, 1.0)}) == "promote"
    assert verdict({**few, "m": times(9, 1.0)}, {**few, "m": times(10_000, 0.1)}) == "promote"
    assert verdict(late, few) == "roll back"
    assert verdict({**late, "m": times(10_000, 0.1)}, {**few, "m": times(9, 0.1)}) == "roll back"
    assert verdict({**late, "m": times(9, 1.0)}, {**few, "m": times(10_000, 60.0)}) == "roll back"


def test_few_late_answers_are_waited_beyond_and_not_for_ever() -> None:
    """Two of fourteen answers were late beside a flood of requests that were refused, and a good version went."""
    terms = replace(TERMS, min_requests=8)

    def verdict(now_s: float, late: int, answers: int) -> Decision:
        new = Times({bucket(0.1): answers}, {bucket(1.0): answers - late, bucket(9.0): late})
        old = Times({bucket(0.1): 33}, {bucket(1.0): 33})
        sides = (Side(name, VersionLoad({"a": of}, {"a": (40, 0)})) for name, of in (("v2", new), ("v1", old)))
        return decide(*sides, terms, now_s)

    few = verdict(OVER_S, 2, 14)
    assert few.verdict == "wait" and "chance" in few.reason
    assert verdict(OVER_S, 12, 14).verdict == "roll back"
    one_late = Times({bucket(0.1): 13, bucket(9.0): 1}, {bucket(9.0): 14})
    sides = (
        Side(name, VersionLoad({"a": of}, {"a": (40, 0)}))
        for name, of in (("v2", one_late), ("v1", Times({bucket(0.1): 33}, {bucket(1.0): 33})))
    )
    assert decide(*sides, terms, OVER_S).verdict == "roll back", "a first byte that chance explains hides no duration"
    assert verdict(OVER_S, 2, 60).verdict == "promote"
    assert verdict(OVER_S + 2 * TERMS.watch_s, 2, 14).verdict == "roll back", "three times as long were not enough"


def test_times_of_all_owners_are_shown_together() -> None:
    load = VersionLoad({"a": Times({1: 2}, {3: 2}), "b": Times({1: 1, 2: 3}, {9: 4})})
    assert load.times == Times({1: 3, 2: 3}, {3: 2, 9: 4})
