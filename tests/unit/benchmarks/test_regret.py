"""What `auto` is held against, and the start-up cost that hindsight leaves it."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from benchmarks._regret import Window, burst, deviation, measured, window
from benchmarks._traffic import Traffic
from benchmarks.auto_regret import again, bound_hours
from scheduler.core.config import WhenLate
from scheduler.simulator.simulate import Figures
from scheduler.simulator.trace import Requests

REQUESTS = 1000


def figures(late: int, trained_on: int, apart_s: float = 100.0) -> Figures:
    """The first requests are late, a hundred seconds apart or in one burst."""
    within = bytearray(n >= late for n in range(REQUESTS))
    trained = [(0.0, REQUESTS * apart_s, trained_on)] if trained_on else []
    return Figures(REQUESTS, 1.0, None, None, 0.0, 0, trained=trained, within={"m": within})


def compared(
    late_by_serving: dict[int, int],
    apart_s: float,
    auto_late: int = 0,
    when_late: WhenLate = "serve",
    every: bool = False,
) -> Window:
    """Of a box of four devices."""
    traces = {"m": Requests(array("d", (n * apart_s for n in range(REQUESTS))), array("l"), array("l"))}
    splits = {n: figures(late, 4 - n, apart_s) for n, late in late_by_serving.items()}
    ends = range(int(REQUESTS * apart_s))
    auto = figures(auto_late, 1, apart_s)
    return window(traces, auto, splits.__getitem__, 4, ends, pause_s=2.0, when_late=when_late, every=every)


def test_late_requests_of_a_minute_are_one_burst() -> None:
    assert burst([]) == 1.0 and burst([0.0, 100.0, 200.0]) == 1.0
    assert burst([0.0, 1.0, 2.0, 500.0]) == pytest.approx(10 / 4), "three in four are of three, one is alone"


def test_bursts_make_a_share_less_certain() -> None:
    assert deviation(10_000, 0.01, 1.0) == pytest.approx(9.95, abs=0.01)
    assert deviation(10_000, 0.01, 4.0) == pytest.approx(2 * deviation(10_000, 0.01, 1.0))


def test_a_split_that_is_barely_in_time_is_none_that_could_be_known_to_be() -> None:
    found = compared({1: 40, 2: 9, 3: 1, 4: 0}, apart_s=100.0)
    assert found.best_serving == 2 and found.sure_hours == pytest.approx(found.best_hours / 2), (
        "9 and twice 3 is above 10"
    )
    assert compared({1: 40, 2: 2, 3: 1, 4: 0}, apart_s=100.0).sure_hours == pytest.approx(found.best_hours)


def test_a_start_up_cost_comes_from_the_splits_not_from_auto() -> None:
    good, bad = (compared({1: 40, 2: 9, 3: 1, 4: 0}, 100.0, late) for late in (0, 500))
    assert (good.chance, good.trials_s, good.sure_hours) == (bad.chance, bad.trials_s, bad.sure_hours)
    assert good.late(start_up=True) == 0 and bad.late(start_up=True) == pytest.approx(
        bad.late(start_up=False) - 100 * bad.chance / REQUESTS
    )


def test_a_box_that_leaves_half_to_training_is_held_against_what_half_of_it_reaches() -> None:
    late = {1: 400, 2: 90, 3: 30, 4: 30}
    found = compared(late, apart_s=100.0, auto_late=90, when_late="split")
    assert found.best_serving == 2 and found.late(start_up=False) == 0
    assert compared(late, apart_s=100.0, auto_late=90).late(start_up=False) > 5
    fine = {1: 40, 2: 20, 3: 1, 4: 0}
    assert compared(fine, 100.0, when_late="split").best_serving == 3, "where it can be had, it is to be had"


def test_where_all_devices_are_late_too_only_lateness_counts() -> None:
    found = compared({1: 400, 2: 90, 3: 30, 4: 30}, apart_s=100.0, auto_late=32)
    assert found.best_serving == 3 and found.sure_hours == 0.0 and found.lost(start_up=True) == 0.0
    assert found.late(start_up=False) == pytest.approx(0.1), "two more than possible, one of them free"
    assert found.late(start_up=True) == found.late(start_up=False), "30 of 1,000 are not ten by chance"
    unsure = compared({1: 400, 2: 90, 3: 12, 4: 12}, apart_s=100.0, auto_late=15)
    assert unsure.late(start_up=False) == pytest.approx(0.2) and unsure.late(start_up=True) == 0, "twelve may be"


def test_every_split_is_looked_at_where_that_is_asked_for() -> None:
    late = {0: 1000, 1: 5, 2: 20, 3: 1, 4: 4}
    assert compared(late, 100.0).best_serving == 3, "the bisection believes that fewer devices are late more often"
    found = compared(late, 100.0, auto_late=30, every=True)
    assert found.best_serving == 1 and found.splits[1] == (0.995, pytest.approx(3 * 1000 * 100 / 3600))
    assert list(found.splits) == [0, 1, 2, 3, 4]
    assert found.avoidable == pytest.approx(0.026), "four of the 30 are late on all devices too"


def test_the_oracle_of_a_part_trains_no_less_than_auto_or_than_a_split_that_is_in_time() -> None:
    row = measured([Traffic(2.0, 2400.0, prompt=2000)], 2, "two devices", 5, bound=bound_hours)
    for part in (row.first, row.after):
        assert part is not None and part.oracle_hours is not None
        assert part.auto_hours <= part.oracle_hours <= 2 * 1801 / 3600
        assert all(hours <= part.oracle_hours for share, hours in part.splits.values() if share >= part.auto_in_time)


def test_auto_is_run_again_against_splits_as_they_were() -> None:
    kinds = [Traffic(2.0, 2400.0, prompt=2000)]
    row = measured(kinds, 2, "two devices", 5, bound=bound_hours)
    assert row.after is not None
    other = replace(row, first=replace(row.first, auto_hours=0.0, avoidable=1.0), after=None)
    assert again(other, kinds, 2, every=True) == replace(row, after=None)
    alone = again(row, kinds, 2, every=False)
    assert alone.after == replace(row.after, avoidable=None, oracle_hours=None), "what needs a split that was not run"
    with pytest.raises(ValueError, match="seed 5"):
        again(replace(row, requests=1), kinds, 2, every=False)
