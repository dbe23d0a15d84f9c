"""Which rank holds up the others: a pure rule that names it once, and the time that it goes by."""

from __future__ import annotations

import random

import pytest
import torch

from train.plan.stragglers import ENOUGH, LEAST_S, TIMES, WINDOW, RankTimes, Straggler
from train.run.forward_time import ForwardTime


def shown(times: RankTimes, steps: list[list[float]], first: int = 1) -> list[Straggler]:
    found = (times.look(step, seconds) for step, seconds in enumerate(steps, first))
    return [one for one in found if one is not None]


def steps(count: int, ranks: int, slow: dict[int, float] | None = None, noise: float = 0.03) -> list[list[float]]:
    drawn = random.Random(ranks)
    return [
        [0.5 * (slow or {}).get(rank, 1.0) * (1 + drawn.gauss(0, noise)) for rank in range(ranks)] for _ in range(count)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("noise", [0.03, 0.4])
def test_ranks_alike_have_no_straggler_however_busy_the_machine(ranks, noise):
    assert shown(RankTimes(), steps(400, ranks, noise=noise)) == []


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_slow_rank_is_named_once_with_what_is_usual(ranks):
    (found,) = shown(RankTimes(), steps(100, ranks, slow={1: 1.6}))
    assert (found.step, found.rank) == (ENOUGH, 1)
    assert found.seconds == pytest.approx(0.8, rel=0.1) and found.usual_s == pytest.approx(0.5, rel=0.1)


def test_one_that_recovers_is_named_again_when_it_is_slow_again():
    times = RankTimes()
    for first in (1, 101):
        assert [one.rank for one in shown(times, steps(50, 4, slow={2: 2.0}), first)] == [2]
        assert shown(times, steps(50, 4), first + 50) == []


def test_of_two_the_slowest_is_named():
    assert [one.rank for one in shown(RankTimes(), steps(100, 8, slow={1: 1.6, 4: 3.0}))] == [4]


def test_long_rows_of_a_few_steps_are_no_straggler():
    few = WINDOW - ENOUGH + 1
    mixed = [one for _ in range(20) for one in (*steps(few, 4, slow={3: 2.0}), *steps(WINDOW - few, 4))]
    assert shown(RankTimes(), mixed) == []


def test_what_nobody_would_notice_is_no_straggler():
    short = [[LEAST_S / 10, TIMES * 2 * LEAST_S / 10] for _ in range(50)]
    assert shown(RankTimes(), short) == []


def test_a_ranks_own_time_is_that_of_its_forward_passes(monkeypatch):
    clock = iter([10.0, 10.5, 20.0, 20.25, 30.0, 31.0])
    monkeypatch.setattr("train.run.forward_time.time.perf_counter", lambda: next(clock))
    took = ForwardTime(None)
    took.begin_step()
    for _ in range(2):
        with took.measured():
            pass
    assert took.seconds() == 0.75
    took.begin_step()
    with took.measured():
        pass
    assert took.seconds() == 1.0


def test_a_device_is_asked_by_events_in_its_queue_which_are_used_again(monkeypatch):
    made = []

    class Event:
        def __init__(self, device, enable_timing):
            assert enable_timing
            made.append(self)

        def record(self):
            self.at_ms = 250.0 * made.index(self)

        def synchronize(self):
            assert self is made[2 * passes - 1], "the last pass"

        def elapsed_time(self, end):
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch, "Event", Event)
    took = ForwardTime(torch.device("cuda:0"))
    for passes in (2, 3, 1):
        took.begin_step()
        for _ in range(passes):
            with took.measured():
                pass
        assert took.seconds() == passes * 0.25
    assert len(made) == 6
