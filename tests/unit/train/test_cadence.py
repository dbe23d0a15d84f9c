"""Snapshots are as frequent as they are cheap, on a clock of the test's own."""

from __future__ import annotations

import pytest

from tests.train_support.specs import host_spec
from train.plan.errors import InvalidHyperparameter, InvalidSpec
from train.plan.spec import TrainSpec
from train.state import cadence
from train.state.cadence import Cadence, every_s


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def live(cost_s, step_s, *, fixed_s=None, for_s=3600.0):
    """A run whose steps take `step_s` and whose snapshots cost `cost_s`: the share of its time that went into them, and
    the most work that a sudden end could have cost."""
    clock = Clock()
    one = Cadence(fixed_s, clock)
    safe_s = worst_s = spent_s = 0.0  # safe_s: until when what was trained is in a committed snapshot
    begun = None
    while clock.now_s < for_s:
        clock.now_s += step_s
        due = one.due()  # looked at last just before the optimizer steps
        worst_s = max(worst_s, clock.now_s - safe_s)
        if begun is not None:  # committed at the end of the step that it was copied beside
            safe_s, begun = begun, None
            clock.now_s += cost_s
            spent_s += cost_s
            one.wrote(cost_s)
        if due:
            begun = clock.now_s
            one.begun()
    return spent_s / clock.now_s, worst_s


@pytest.mark.parametrize("step_s", [0.01, 0.4, 3.0, 9.0])
@pytest.mark.parametrize("cost_s", [0.0, 0.001, 0.02, 0.14, 0.3])
def test_what_is_cheap_loses_less_than_half_a_minute_and_takes_less_than_two_percent(cost_s, step_s):
    share, lost_s = live(cost_s, step_s)
    assert lost_s <= cadence.LOST_S + cost_s
    assert share <= cadence.SHARE


@pytest.mark.parametrize("cost_s", [0.7, 1.5, 5.0])
def test_what_is_dear_takes_two_percent_and_says_so_once(cost_s):
    share, lost_s = live(cost_s, 0.5, for_s=50_000.0)
    assert 0.9 * cadence.SHARE <= share <= 1.001 * cadence.SHARE  # the first one came before anything was measured
    assert cadence.LOST_S < lost_s <= cost_s / cadence.SHARE + 3 * 0.5 + 2 * cost_s
    one = Cadence(None, Clock())
    said = one.wrote(cost_s)
    assert f"a snapshot costs {cost_s:.1f} s of training: one is taken every {cost_s / 0.02:.0f} s" in said
    assert one.wrote(cost_s) == ""


def test_nothing_loses_more_than_five_minutes():
    assert every_s(1e6) == cadence.LONGEST_S == 300.0


def test_one_dear_snapshot_is_forgotten_in_time():
    one = Cadence(None, Clock())
    one.wrote(0.01)
    one.wrote(4.0)  # the machine was busy with something else
    assert one.interval_s > 60
    for _ in range(8):
        one.wrote(0.01)
    assert one.interval_s == cadence.SHORTEST_S


def test_the_first_is_not_due_before_one_of_its_size_should_be():
    clock = Clock()
    one = Cadence(None, clock)
    one.guess(3_000_000_000)
    clock.now_s = 149.0
    assert not one.due()
    clock.now_s = 150.0
    assert one.due()
    one.wrote(0.1)
    one.guess(3_000_000_000)  # of no more interest
    assert one.interval_s == cadence.SHORTEST_S


def test_an_interval_that_a_person_chose_is_kept():
    clock = Clock()
    one = Cadence(2.0, clock)
    assert one.wrote(60.0) == "" and one.interval_s == 2.0
    clock.now_s = 1e9
    assert one.due() and not Cadence(0.0, clock).due()
    never = Cadence(0.0, Clock())
    never._clock.now_s = 1e9
    assert not never.due()


def test_no_room_is_news_once_and_is_asked_for_soon_again():
    """It was asked for less often each time: after two minutes of full memory a killed rank lost 76 steps; then every
    30 s, and it lost 50 where memory had been full for 4 s."""
    clock = Clock()
    one = Cadence(None, clock)
    assert one.refused() and one.interval_s == cadence.SHORTEST_S
    for _ in range(2000):
        assert not one.refused() and one.interval_s == cadence.SHORTEST_S
    one.wrote(0.01)
    assert one.interval_s == cadence.SHORTEST_S and one.refused(), "news again"


@pytest.mark.parametrize(("fixed_s", "tried_s"), [(2.0, cadence.SHORTEST_S), (20.0, 20.0), (120.0, cadence.LOST_S)])
def test_without_room_it_is_tried_within_what_may_be_lost(fixed_s, tried_s):
    one = Cadence(fixed_s, Clock())
    one.refused()
    assert one.interval_s == tried_s
    one.wrote(0.01)
    assert one.interval_s == fixed_s


def test_a_spec_takes_automatic_and_numbers():
    def spec(**fields):
        return host_spec(**fields)

    assert TrainSpec.from_json(spec().to_json()).snapshot_every_s is None
    assert TrainSpec.from_json(spec(snapshot_every_s=2.0).to_json()).snapshot_every_s == 2.0
    with pytest.raises(InvalidSpec, match="snapshot_every_s"):
        spec(snapshot_every_s=-1.0)


def test_the_hyperparameter_is_automatic_or_a_number():
    from train.plan.auto import Given

    assert Given({}).maybe_number("snapshot_every_s", 0, 9) is None
    assert Given({"snapshot_every_s": "auto"}).maybe_number("snapshot_every_s", 0, 9) is None
    assert Given({"snapshot_every_s": 2}).maybe_number("snapshot_every_s", 0, 9) == 2.0
    with pytest.raises(InvalidHyperparameter):
        Given({"snapshot_every_s": 10}).maybe_number("snapshot_every_s", 0, 9)
