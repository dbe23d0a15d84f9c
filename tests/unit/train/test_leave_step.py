"""All ranks leave a step at one point, whenever they are asked; and when a step is worth leaving."""

import os
import threading
from itertools import count
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train.control.stop_point import POINTS_PER_STEP, StopPoint
from train.run import leave_step
from train.run.leave_step import KEPT_S, Leaving, StepLeft, layers_of


@settings(max_examples=60, deadline=None)
@given(ranks=st.integers(1, 5), asked_at=st.integers(0, 40), ahead=st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_all_leave_at_one_point_that_nobody_has_passed(tmp_path_factory, ranks, asked_at, ahead):
    """Each rank may be a few points ahead of the slowest, as between two collectives; rank 0 is asked at any time."""
    folder = tmp_path_factory.mktemp("job")
    stops = [StopPoint(folder, rank, ranks) for rank in range(ranks)]
    stops[0].reset()
    passed, left, asked = [0] * ranks, {}, threading.Event()

    def train(rank):
        for point in count(1):
            while min(passed) < point - 1 - ahead[rank] and not left:
                os.sched_yield()  # a collective: nobody is further ahead of another than this
            if rank == 0 and point > asked_at:
                asked.set()
            if not stops[rank].passes(point):
                left[rank] = point
                return
            passed[rank] = point

    def ask():
        asked.wait()
        stops[0].announce()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(ranks)] + [threading.Thread(target=ask)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(left) == ranks and len(set(left.values())) == 1, left
    assert left[0] > asked_at and set(passed) == {left[0] - 1}


def test_the_page_remembers_which_step_was_left_from_world_to_world(tmp_path):
    stop = StopPoint(tmp_path, 0, 2)
    assert stop.left == -1
    stop.left = 7
    again = StopPoint(tmp_path, 0, 4)
    again.announce()
    again.reset()
    assert again.left == 7 and again.passes(1)


class Engine(SimpleNamespace):
    def __init__(self):
        super().__init__(module=torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2)])), micro_steps=0)


def test_a_step_is_left_when_much_of_it_is_to_come_and_never_twice_in_a_row(tmp_path):
    stop = StopPoint(tmp_path, 0, 1)
    leaving = Leaving(Engine(), stop, patience_s=0.5)
    leaving.begin()
    began = leaving._began_s
    assert leaving.worth_it(began + 100), "how long a first step takes is not known"
    leaving._began_s -= 3.0
    leaving.end()
    leaving.begin()
    began, took = leaving._began_s, leaving._took_s
    assert leaving.worth_it(began + took - 0.6) and not leaving.worth_it(began + took - 0.4)
    stop.left = 1
    again = Leaving(Engine(), stop, patience_s=0.5)
    again.at(1)
    again.begin()
    assert not again.worth_it(again._began_s)
    again._began_s -= 3.0
    again.end()
    again.begin()
    assert again.worth_it(again._began_s), "the next step may be left"


def test_no_step_keeps_devices_however_long_it_takes(tmp_path, monkeypatch):
    """One that had been left before, or the last of which was shorter, went on to its end: in one of an hour devices
    were wanted for a quarter of an hour, until the job was stopped by force."""
    timers = list[SimpleNamespace]()

    def timer(after_s, then):
        timers.append(SimpleNamespace(then=then, start=lambda: None, cancel=lambda: None))
        return timers[-1]

    monkeypatch.setattr(leave_step, "threading", SimpleNamespace(Timer=timer))
    stop = StopPoint(tmp_path, 0, 1)
    stop.left = 1
    again = Leaving(Engine(), stop, patience_s=0.5)
    again.at(1)
    again.begin()
    began = again._began_s
    assert not again.worth_it(began + KEPT_S - 1) and again.worth_it(began + KEPT_S + 1)
    again.ask()
    assert stop.passes(POINTS_PER_STEP), "it goes on"
    again._began_s -= KEPT_S + 1
    timers.pop().then()
    assert not stop.passes(2 * POINTS_PER_STEP) and not timers

    stop.left = -1
    longer = Leaving(Engine(), stop, patience_s=0.5)
    longer.begin()
    longer._began_s -= 3.0
    longer.end()
    longer.begin()
    began, took = longer._began_s, longer._took_s
    assert not longer.worth_it(began + 1.5 * took) and longer.worth_it(began + 2.5 * took)
    longer.ask()
    longer.close()
    stop.reset()
    for one in timers:
        one.then()
    assert stop.passes(1), "what has ended is asked for nothing"


def test_hooks_ask_at_every_layer_and_only_inside_a_step(tmp_path):
    stop = StopPoint(tmp_path, 0, 1)
    engine = Engine()
    leaving = Leaving(engine, stop, patience_s=0.0)
    (layer,) = layers_of(engine.module)
    layer(torch.ones(1, 2)).sum().backward()
    assert stop.passes(0) and leaving._next == 0, "not in a step"
    leaving.begin()
    layer(torch.ones(1, 2)).sum().backward()
    assert leaving._next == POINTS_PER_STEP + 2
    leaving.ask()
    raised = []
    for act in (lambda: layer(torch.ones(1, 2)), leaving.point):
        try:
            act()
        except StepLeft:
            raised.append(leaving._next - POINTS_PER_STEP)
    assert raised == [3, 4]
    leaving.close()
    layer(torch.ones(1, 2))


def test_a_step_left_in_backward_raises_out_of_it(tmp_path):
    engine = Engine()
    leaving = Leaving(engine, StopPoint(tmp_path, 0, 1), patience_s=0.0)
    (layer,) = layers_of(engine.module)
    leaving.begin()
    loss = layer(torch.ones(1, 2)).sum()
    leaving.ask()
    try:
        loss.backward()
    except StepLeft:
        assert layer.weight.grad is None
    else:
        raise AssertionError("it went on")
