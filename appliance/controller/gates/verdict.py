"""Decides whether a version may answer: a pure function of the results of its suites, and of those of the version
before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from appliance.controller.gates.paired_tests import chance_of_passes, chance_of_rewards, interval
from appliance.store.rows import EvalItemRow, GateVerdict

MOST_UNJUDGED = 0.05
"""The largest share of a suite's items that may lack a verdict: with more, the rest says too little."""
MOST_REWARD = 1e100
"""A reward beyond this, either way, counts as none: the sum or the square of many would be no number."""
Measure = Literal["pass_rate", "mean_reward"]
_IN_WORDS = {"pass_rate": "pass rate", "mean_reward": "mean reward"}


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of one item. passed None: it could not be asked or graded. reward: None if no grader gave one."""

    passed: bool | None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """What one suite asks for. measure: what is compared. The bounds are shares of the items for pass rates, and in the
    unit of the graders for rewards; None: not asked for.

    not_worse_by: refused where it is shown to be worse than the version before by more than this. better_by: refused
    unless it is shown to be better by more than this (below 0: shown to be at most this much worse). level: how often
    chance alone may show it."""

    pass_rate_at_least: float | None = None
    mean_reward_at_least: float | None = None
    not_worse_by: float | None = None
    better_by: float | None = None
    measure: Measure = "pass_rate"
    level: float = 0.05


@dataclass(frozen=True, slots=True)
class Suite:
    """One suite of one gate. incumbent None: no version answers."""

    name: str
    rules: Rules
    candidate: Sequence[Judged]
    incumbent: Sequence[Judged] | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """told: for each suite its name, `ok`, the `rules` with what was wanted and found, and the numbers."""

    verdict: GateVerdict
    reason: str
    told: list[dict[str, Any]]


def judged(row: EvalItemRow, criterion: str | None = None) -> Judged:
    """criterion: whose verdict counts; None: the item passes if all do, and its reward is the mean of theirs."""
    results = [one for one in row.results or [] if criterion in (None, one["name"])]
    if row.status == "error" or not results or any("error" in one for one in results):
        return Judged(None)
    reward = math.fsum(float(one["score"]) / len(results) for one in results)
    return Judged(all(one["passed"] for one in results), reward if abs(reward) <= MOST_REWARD else None)


def decide(suites: Sequence[Suite]) -> Verdict:
    """A gate passes when each of its suites does."""
    found = [_suite(suite) for suite in suites]
    reports = [one for one, _ in found]
    for verdict in ("undecided", "refused"):
        reasons = [f"{one['name']}: {why}" for one, why in found if one["verdict"] == verdict]
        if reasons:
            return Verdict(verdict, "; ".join(reasons), reports)  # type: ignore[arg-type]
    return Verdict("passed", "; ".join(f"{one['name']}: {why}" for one, why in found), reports)


def _suite(suite: Suite) -> tuple[dict[str, Any], str]:
    """What the gate shows of a suite, and its verdict in words."""
    rules, sides = suite.rules, {"candidate": suite.candidate, "incumbent": suite.incumbent}
    report: dict[str, Any] = {"name": suite.name, "items": len(suite.candidate), "rules": [], "compared": None}
    for side, items in sides.items():
        report[side] = None if items is None else _numbers(items)
    for side, items in sides.items():
        bad = sum(one.passed is None for one in items or ())
        if items is not None and (not items or bad > MOST_UNJUDGED * len(items)):
            why = f"{bad} of {len(items)} items of the {side} could not be judged"
            return report | {"ok": False, "verdict": "undecided"}, why
    checks = [_threshold(report["candidate"], name, least) for name, least in _thresholds(rules) if least is not None]
    if suite.incumbent is not None:
        pairs = list(zip(suite.candidate, suite.incumbent, strict=False))
        if len(suite.candidate) != len(suite.incumbent):
            why = f"the versions were asked {len(suite.candidate)} and {len(suite.incumbent)} items"
            return report | {"ok": False, "verdict": "undecided"}, why
        compared = report["compared"] = _difference(pairs, rules.measure)
        checks += _comparisons(pairs, compared, rules)
    report["rules"] = checks
    refused = [check["says"] for check in checks if not check["ok"]]
    if refused:
        return report | {"ok": False, "verdict": "refused"}, "; ".join(refused)
    reasons = [check["says"] for check in checks] or [_shown_side(report["candidate"], rules.measure)]
    return report | {"ok": True, "verdict": "passed"}, "; ".join(reasons)


def _numbers(items: Sequence[Judged]) -> dict[str, Any]:
    passed = [one.passed for one in items if one.passed is not None]
    rewards = [one.reward for one in items if one.reward is not None]
    return {
        "judged": len(passed),
        "pass_rate": sum(passed) / len(passed) if passed else None,
        "mean_reward": math.fsum(rewards) / len(rewards) if rewards else None,
    }


def _thresholds(rules: Rules) -> tuple[tuple[Measure, float | None], ...]:
    return ("pass_rate", rules.pass_rate_at_least), ("mean_reward", rules.mean_reward_at_least)


def _threshold(numbers: dict[str, Any], measure: Measure, least: float) -> dict[str, Any]:
    found = numbers[measure]
    says = f"{_IN_WORDS[measure]} {_shown(found, measure)}, at least {_shown(least, measure)} asked for"
    return {
        "rule": f"{measure}_at_least",
        "wanted": least,
        "found": found,
        "ok": found is not None and found >= least,
        "says": says,
    }


def _differences(pairs: Sequence[tuple[Judged, Judged]], measure: Measure) -> list[float]:
    """The differences between both versions, over the items that were judged for both."""
    if measure == "pass_rate":
        return [
            float(new.passed) - float(old.passed)
            for new, old in pairs
            if new.passed is not None and old.passed is not None
        ]
    return [new.reward - old.reward for new, old in pairs if new.reward is not None and old.reward is not None]


def _difference(pairs: Sequence[tuple[Judged, Judged]], measure: Measure) -> dict[str, Any]:
    found = _differences(pairs, measure)
    low, high = interval(found)
    return {
        "measure": measure,
        "pairs": len(found),
        "difference": math.fsum(found) / len(found) if found else None,
        "low": low if math.isfinite(low) else None,
        "high": high if math.isfinite(high) else None,
        "gained": sum(one > 0 for one in found),
        "lost": sum(one < 0 for one in found),
    }


def _comparisons(
    pairs: Sequence[tuple[Judged, Judged]], compared: dict[str, Any], rules: Rules
) -> list[dict[str, Any]]:
    found, checks = _differences(pairs, rules.measure), []
    what = f"{_IN_WORDS[rules.measure]} {_signed(compared['difference'], rules.measure)} on {len(found)} items"
    for rule, margin in (("not_worse_by", rules.not_worse_by), ("better_by", rules.better_by)):
        if margin is None:
            continue
        # The hypothesis to be shown: worse by more than the margin, or better by more than it.
        p, test = _chance([-one for one in found] if rule == "not_worse_by" else found, rules.measure, margin)
        shown = p < rules.level
        ok = not shown if rule == "not_worse_by" else shown
        claim = _claim(rule, margin, rules.measure)
        says = f"{what}: {'' if shown else 'not '}shown to be {claim} (p = {p:.3g}, level {rules.level:g})"
        checks.append(
            {
                "rule": rule,
                "wanted": margin,
                "found": compared["difference"],
                "p": p,
                "test": test,
                "ok": ok,
                "says": says,
            }
        )
    return checks


def _chance(differences: Sequence[float], measure: Measure, margin: float) -> tuple[float, str]:
    """The p-value of a difference above the margin, and the test that gave it."""
    if measure == "mean_reward":
        return chance_of_rewards(differences, margin), "sign-flip permutation"
    gained, lost = sum(one > 0 for one in differences), sum(one < 0 for one in differences)
    return chance_of_passes(gained, lost, len(differences), margin), (
        "McNemar, exact" if margin == 0 else "Tango's score test"
    )


def _claim(rule: str, margin: float, measure: Measure) -> str:
    amount = f"{100 * abs(margin):g} points" if measure == "pass_rate" else f"{abs(margin):g}"
    if rule == "better_by" and margin < 0:
        return f"worse by {amount} at most"
    return ("worse" if rule == "not_worse_by" else "better") + (f" by more than {amount}" if margin else "")


def _shown_side(numbers: dict[str, Any], measure: Measure) -> str:
    return f"{_IN_WORDS[measure]} {_shown(numbers[measure], measure)}"


def _shown(value: float | None, measure: Measure) -> str:
    if value is None:
        return "unknown"
    return f"{value:.1%}" if measure == "pass_rate" else f"{value:.4g}"


def _signed(value: float | None, measure: Measure) -> str:
    if value is None:
        return "cannot be compared"
    amount = f"{100 * value:+.1f} points" if measure == "pass_rate" else f"{value:+.4g}"
    return f"{amount} against the version before"
