"""A loss that jumps, or is no number: a pure rule that says so once, and does what the job chose."""

from __future__ import annotations

import math
import random

import pytest

from train.plan.errors import TrainingDiverged
from train.plan.spikes import LEAST, MOST_BACKS, MOST_CUTS, SOON, WINDOW, Anomaly, LossWatch, history


def quiet(count: int = WINDOW, level: float = 2.0, noise: float = 0.02, seed: int = 1) -> list[float]:
    drawn = random.Random(seed)
    return [level + drawn.gauss(0, noise) for _ in range(count)]


def shown(watch: LossWatch, losses: list[float], first: int = 1) -> list[Anomaly]:
    found = (watch.look(step, loss, 1.0) for step, loss in enumerate(losses, first))
    return [one for one in found if one is not None]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "losses",
    [
        lambda seed: quiet(400, seed=seed),
        lambda seed: quiet(400, noise=0.6, seed=seed),  # small batches
        lambda seed: [5.0 * math.exp(-step / 60) + one for step, one in enumerate(quiet(400, 1.0, 0.1, seed))],
        lambda seed: quiet(400, level=0.0, noise=0.05, seed=seed),  # of a policy
        lambda seed: [0.0] * 400,
        lambda seed: [1.0] * 200 + [1.0 + LEAST * 0.9] * 200,
    ],
)
def test_no_ordinary_run_has_a_spike(losses, seed):
    assert shown(LossWatch("rollback", ()), losses(seed)) == []


def test_a_jump_is_told_once_with_what_is_usual():
    watch = LossWatch("none", ())
    found = shown(watch, [*quiet(), 6.0, 6.1, 5.9, *quiet(20)])
    assert [(one.step, one.kind, one.action) for one in found] == [(WINDOW + 1, "spike", "none")]
    assert found[0].usual == pytest.approx(2.0, abs=0.05) and "jumped to 6, usual is 2" in found[0].text
    assert watch.rate(10**6) == 1.0


def test_nothing_is_usual_before_there_are_enough_losses():
    assert shown(LossWatch("none", ()), [*quiet(10), 9.0]) == []


def test_a_level_that_stays_becomes_the_usual_one():
    found = shown(LossWatch("none", ()), [*quiet(), *quiet(200, level=6.0)])
    assert len(found) <= 3 and found[0].step == WINDOW + 1


def test_lower_rate_halves_it_from_there_on_twice_at_most():
    watch = LossWatch("lower_rate", ())
    losses = quiet()
    for _ in range(3):
        losses += [9.0, *quiet(WINDOW)]
    found = shown(watch, losses)
    assert [one.action for one in found] == ["lower_rate", "lower_rate", "none"]
    first, second = (one.step for one in found[:2])
    assert watch.cuts == (first, second) and found[1].cuts == watch.cuts
    assert [watch.rate(step) for step in (first - 1, first, second - 1, second)] == [1.0, 0.5, 0.5, 0.25]


def test_a_rollback_leaves_its_cut_to_whoever_knows_the_snapshot():
    watch = LossWatch("rollback", (5,))
    (found,) = shown(watch, [*quiet(), 9.0])
    assert (found.action, found.cuts) == ("rollback", (5,)) and watch.cuts == (5,)
    again = LossWatch("rollback", (5, 20), {"losses": quiet(), "spikes": [WINDOW + 1]})
    (repeated,) = shown(again, [9.0], first=WINDOW + 1)
    assert repeated.action == "none", "the same step, done anew: acted on once"


@pytest.mark.parametrize(
    ("choice", "cuts", "action"),
    [
        ("none", (), "fail"),
        ("pause", (), "pause"),
        ("rollback", (), "rollback"),
        ("lower_rate", (3,), "rollback"),
        ("rollback", tuple(range(MOST_CUTS)), "fail"),
    ],
)
@pytest.mark.parametrize("broken", [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_a_loss_that_is_no_number_never_goes_on(choice, cuts, action, broken):
    found = LossWatch(choice, cuts).look(7, *broken)
    assert found is not None and (found.kind, found.action, found.cuts) == ("not_finite", action, cuts)


@pytest.mark.parametrize(
    ("cuts", "start", "older", "step", "action", "poisoned"),
    [
        ((10,), 10, 1, 11, "rollback", 10),
        ((10,), 10, 1, 10 + SOON, "rollback", 10),
        ((10,), 10, 1, 11 + SOON, "rollback", None),  # it went well for a while: the newest one is good
        ((10,), 10, 0, 11, "rollback", None),  # there is no other
        ((), 10, 1, 11, "rollback", None),  # it was suspended there, and has not gone back
        ((9,), 10, 1, 11, "rollback", None),
        ((10, 9), 9, 1, 10, "rollback", 9),  # beyond what halves the rate
        ((10, 9), 9, 0, 10, "fail", None),
        (tuple(range(20, 20 - MOST_BACKS, -1)), 21 - MOST_BACKS, 1, 22 - MOST_BACKS, "fail", None),
    ],
)
def test_a_snapshot_that_breaks_again_at_once_is_left_for_an_older_one(cuts, start, older, step, action, poisoned):
    watch = LossWatch("rollback", cuts, start=start, older=older)
    found = watch.look(step, math.nan, 1.0)
    assert found is not None and (found.action, found.poisoned) == (action, poisoned)
    told = f"the snapshot of step {poisoned}, which the job had gone back to, is broken already"
    assert (told in found.text) == (poisoned is not None)
    assert ("the same learning rate" in found.text) == (action == "rollback" and len(cuts) >= MOST_CUTS)


def test_the_rate_is_halved_twice_at_most():
    assert LossWatch("rollback", (10, 9, 8, 7)).rate(10) == 0.25


def test_a_run_that_goes_on_knows_what_was_usual_and_what_was_told():
    events = [{"event": "metrics", "step": step, "loss": loss} for step, loss in enumerate(quiet(40), 1)]
    events += [{"event": "anomaly", "kind": "spike", "step": 39}, {"event": "anomaly", "kind": "not_finite", "step": 2}]
    events += [{"event": "metrics", "step": 10, "loss": 7.5}]  # done anew after a rollback
    known = history(events, 30)
    assert len(known["losses"]) == 30 and known["losses"][9] == 7.5 and known["spikes"] == [39]
    whole, resumed = LossWatch("pause", ()), LossWatch("pause", (), history(events, 40))
    shown(whole, [event["loss"] for event in events[:40]])
    assert whole.look(60, 9.0, 1.0).action == resumed.look(60, 9.0, 1.0).action == "pause"


def test_a_job_that_has_gone_back_in_vain_is_not_told_to_go_back():
    assert "let the job go back by itself (on_loss_spike)" in str(TrainingDiverged(3, math.nan, 1.0))
    told = str(TrainingDiverged(3, math.nan, 1.0, 2))
    assert "let the job go back" not in told and "has halved its rate 2 times by itself" in told
