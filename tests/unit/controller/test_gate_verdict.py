"""What decides whether a version may answer: the tests on their own, and the verdict that is made of them."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from appliance.controller.gates.paired_tests import chance_of_passes, chance_of_rewards, interval
from appliance.controller.gates.verdict import Judged, Rules, Suite, Verdict, decide, judged
from appliance.store.rows import EvalItemRow


def test_without_a_margin_passes_are_tested_by_mcnemars_exact_test():
    """Against the binomial distribution, counted out."""
    assert chance_of_passes(8, 2, 40) == pytest.approx(sum(math.comb(10, k) for k in (8, 9, 10)) / 2**10)
    assert chance_of_passes(2, 8, 40) == pytest.approx(sum(math.comb(10, k) for k in range(2, 11)) / 2**10)
    assert chance_of_passes(0, 0, 40) == 1.0 and chance_of_passes(5, 0, 5) == pytest.approx(1 / 32)
    assert chance_of_passes(3000, 2000, 10_000) < 1e-40


@pytest.mark.parametrize(
    ("gained", "lost", "count", "margin"), [(0, 1, 44, -0.1), (12, 5, 80, 0.02), (3, 9, 200, -0.04)]
)
def test_with_a_margin_the_score_test_takes_the_likeliest_shares(gained, lost, count, margin):
    """Against a search of the share that only the second passes."""

    def likelihood(share: float) -> float:
        shares = (share + margin, share, 1 - 2 * share - margin)
        found = zip((gained, lost, count - gained - lost), shares, strict=True)
        return sum(number * math.log(max(one, 1e-300)) for number, one in found)

    least = max(0.0, -margin)
    share = max((least + step * (0.5 - least) / 200_000 for step in range(1, 100_000)), key=likelihood)
    z = (gained - lost - count * margin) / math.sqrt(count * (2 * share + margin - margin * margin))
    assert chance_of_passes(gained, lost, count, margin) == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)), rel=1e-3)


def test_a_margin_that_is_next_to_nothing_gives_what_none_gives_for_many_items():
    normal = 0.5 * math.erfc(20 / math.sqrt(40) / math.sqrt(2))
    assert chance_of_passes(30, 10, 200, 1e-9) == pytest.approx(normal, rel=1e-4)
    assert chance_of_passes(0, 0, 100, -0.02) < chance_of_passes(0, 0, 10, -0.02) < 0.5


@pytest.mark.parametrize(
    ("gain", "loss", "items", "margin"),
    [(0.15, 0.15, 60, 0.0), (0.1, 0.15, 80, -0.05), (0.2, 0.1, 80, 0.1), (0.05, 0.07, 200, -0.02)],
)
def test_chance_alone_shows_a_difference_no_more_often_than_the_level_says(gain, loss, items, margin):
    """Two models whose true difference is the margin, 2,000 times."""
    chance, shown = random.Random(1), 0
    for _ in range(2000):
        draws = [chance.random() for _ in range(items)]
        gained, lost = sum(one < gain for one in draws), sum(gain <= one < gain + loss for one in draws)
        shown += chance_of_passes(gained, lost, items, margin) < 0.05
    assert shown / 2000 < 0.07


def test_few_rewards_are_flipped_in_every_way_and_many_at_random():
    few = [0.3, -0.1, 0.2, 0.5, 0.0]
    ways = [sum(a * b for a, b in zip(few[:4], signs, strict=True)) for signs in product((1, -1), repeat=4)]
    assert chance_of_rewards(few) == sum(one >= 0.9 - 1e-12 for one in ways) / 16
    assert chance_of_rewards([]) == chance_of_rewards([0.0, 0.0]) == 1.0
    assert chance_of_rewards([0.1] * 5) == pytest.approx(1 / 32)
    chance = random.Random(2)
    many = [chance.gauss(0.02, 0.2) for _ in range(300)]
    normal = 0.5 * math.erfc(sum(many) / math.sqrt(sum(one * one for one in many)) / math.sqrt(2))
    assert chance_of_rewards(many) == pytest.approx(normal, abs=0.02)
    assert chance_of_rewards(many) == chance_of_rewards(many), "the same numbers give the same verdict"
    assert chance_of_rewards(many * 4) == pytest.approx(
        0.5 * math.erfc(sum(many) * 4 / math.sqrt(4 * sum(one * one for one in many)) / math.sqrt(2))
    )
    assert chance_of_rewards(many, 0.5) > 0.999 and chance_of_rewards(many, -0.5) < 0.001


def test_an_interval_needs_two_items():
    assert interval([1.0]) == (-math.inf, math.inf)
    low, high = interval([0.0, 1.0] * 50)
    assert (low + high) / 2 == pytest.approx(0.5) and high - low == pytest.approx(2 * 1.96 * 0.05, rel=0.01)


def items(passed: str, rewards: float | None = None) -> list[Judged]:
    """ "+" passed, "-" failed, "?" could not be judged."""
    return [Judged({"+": True, "-": False, "?": None}[one], rewards if one != "?" else None) for one in passed]


def gate(new: str, old: str | None = None, **rules) -> Verdict:
    return decide([Suite("sums", Rules(**rules), items(new), None if old is None else items(old))])


def test_thresholds_are_of_the_version_alone():
    assert gate("+++-", pass_rate_at_least=0.75).verdict == "passed"
    refused = gate("++--", pass_rate_at_least=0.75)
    assert refused.verdict == "refused" and refused.reason == "sums: pass rate 50.0%, at least 75.0% asked for"
    (told,) = refused.told
    assert told["candidate"] == {"judged": 4, "pass_rate": 0.5, "mean_reward": None} and told["incumbent"] is None
    assert gate("++--", mean_reward_at_least=0.1).verdict == "refused", "no grader gave a reward"
    rewarded = decide([Suite("sums", Rules(mean_reward_at_least=0.5), items("++", 0.5), None)])
    assert rewarded.verdict == "passed"


def test_not_worse_is_refused_only_where_it_is_shown_to_be_worse():
    old = "+" * 20
    assert gate("+" * 17 + "-" * 3, old, not_worse_by=0.0).verdict == "passed", (
        "3 of 20 lost: chance gives that in 1 of 8"
    )
    refused = gate("+" * 12 + "-" * 8, old, not_worse_by=0.0)
    assert refused.verdict == "refused"
    assert refused.reason == (
        "sums: pass rate -40.0 points against the version before on 20 items: shown to be worse (p = 0.00391, "
        "level 0.05)"
    )
    assert gate("+" * 12 + "-" * 8, old, not_worse_by=0.35).verdict == "passed"
    assert gate("+" * 12 + "-" * 8, old, not_worse_by=0.0, level=0.001).verdict == "passed"


def test_better_is_passed_only_where_it_is_shown_to_be_better():
    assert gate("+" * 20, "+" * 20, better_by=0.0).verdict == "refused"
    assert gate("+" * 4, "-" * 4, better_by=0.0).verdict == "refused", "four items show nothing at 5 %"
    assert gate("+" * 5, "-" * 5, better_by=0.0).verdict == "passed"
    assert gate("+" * 20, "+" * 10 + "-" * 10, better_by=0.45).verdict == "refused"
    alike = gate("+" * 100, "+" * 100, better_by=-0.05)
    assert alike.verdict == "passed" and "shown to be worse by 5 points at most" in alike.reason
    rules = Rules(better_by=0.0, measure="mean_reward")
    assert decide([Suite("r", rules, items("+" * 8, 0.6), items("+" * 8, 0.5))]).verdict == "passed"
    assert decide([Suite("r", rules, items("+" * 8, 0.5), items("+" * 8, 0.6))]).verdict == "refused"


def test_items_are_compared_in_pairs_and_what_was_not_judged_is_left_out():
    found = gate("+-" * 20 + "?", "+-" * 20 + "+", not_worse_by=0.0)
    assert found.verdict == "passed" and found.told[0]["compared"]["pairs"] == 40
    assert found.told[0]["compared"]["difference"] == 0.0
    bad = gate("??" + "+" * 10, "+" * 12, pass_rate_at_least=0.5)
    assert bad.verdict == "undecided" and "2 of 12 items of the candidate could not be judged" in bad.reason
    assert gate("", None).verdict == "undecided"
    assert "were asked 3 and 2 items" in gate("+++", "++", not_worse_by=0.1).reason


def test_a_gate_passes_when_each_suite_does_and_one_without_a_version_before_by_its_thresholds():
    good, bad = Suite("a", Rules(), items("++"), None), Suite("b", Rules(pass_rate_at_least=1.0), items("+-"), None)
    assert decide([good]).reason == "a: pass rate 100.0%"
    assert decide([good, bad]).reason == "b: pass rate 50.0%, at least 100.0% asked for"
    unknown = Suite("c", Rules(), items("?"), None)
    assert decide([bad, unknown]).verdict == "undecided"
    assert gate("++", None, better_by=0.0).verdict == "passed", "there is nothing to be better than"


def test_an_item_counts_by_all_graders_or_by_one():
    results = [
        {"name": "form", "passed": True, "score": 1.0},
        {"name": "right", "passed": False, "score": 0.2},
    ]
    row = EvalItemRow("i", "r", 0, 1.0, status="fail", results=results)
    assert judged(row) == Judged(False, pytest.approx(0.6))
    assert judged(row, "form") == Judged(True, 1.0)
    broken = EvalItemRow("i", "r", 0, 1.0, status="error", results=[{**results[0], "error": "x"}])
    assert judged(broken) == judged(broken, "form") == Judged(None)


@pytest.mark.parametrize("score", [1e308, -1e308, 1e200])
def test_rewards_that_cannot_be_reckoned_with_are_none_and_the_gate_ends(score: float):
    """An exception came again with each look at the gate, every second, after all of its items were read."""
    results = [{"name": name, "passed": True, "score": score} for name in "ab"]
    new = [judged(EvalItemRow(f"i{at}", "r", at, 0.0, status="pass", results=results)) for at in range(20)]
    old = [Judged(True, 0.5)] * 20
    rules = Rules(mean_reward_at_least=0.0, not_worse_by=0.1, measure="mean_reward")
    assert decide([Suite("s", rules, new, old)]).verdict == "refused"
    assert decide([Suite("s", Rules(pass_rate_at_least=1.0), new, old)]).verdict == "passed"
