"""A clock that is set back is noticed, and controller or Ray start anew: what is due in a minute would take an hour."""

import asyncio
from types import SimpleNamespace

from appliance.boot.clock_watch import LEAST_FOR_RAY_S, LEAST_S, ClockWatch, far_back_s
from appliance.boot.main import Box


class Clocks:
    def __init__(self):
        self.steady_s, self.shift_s = 1000.0, 1_700_000_000.0

    def watch(self, least_s: float = LEAST_S) -> ClockWatch:
        return ClockWatch(least_s, lambda: self.steady_s + self.shift_s, lambda: self.steady_s)


def test_only_a_step_back_is_told_and_once():
    clocks = Clocks()
    watch = clocks.watch()
    clocks.steady_s += 7200
    assert watch.set_back_s() == 0
    clocks.shift_s += 3600
    assert watch.set_back_s() == 0, "waits end early: nothing is kept waiting"
    clocks.shift_s -= 3600
    assert watch.set_back_s() == 3600
    assert watch.set_back_s() == 0


def test_small_steps_back_add_up():
    clocks = Clocks()
    watch = clocks.watch()
    told = []
    for _ in range(4):
        clocks.shift_s -= LEAST_S / 2
        told.append(watch.set_back_s())
    assert told == [0, LEAST_S, 0, LEAST_S]


async def test_a_node_waits_until_its_clock_is_set_back_far():
    clocks = Clocks()
    waiting = asyncio.create_task(far_back_s(clocks.watch(LEAST_FOR_RAY_S), every_s=0.0))
    clocks.shift_s -= LEAST_FOR_RAY_S - 1
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    clocks.shift_s -= 1
    async with asyncio.timeout(60):
        assert await waiting == LEAST_FOR_RAY_S


async def test_the_controller_starts_anew_when_the_clock_was_set_back_and_ray_when_it_was_far():
    clocks, done, said = Clocks(), [], []
    box = SimpleNamespace(
        _clock=clocks.watch(),
        _clock_of_ray=clocks.watch(LEAST_FOR_RAY_S),
        _say=said.append,
        _controller=SimpleNamespace(restart=lambda: done.append("controller")),
        _ray=SimpleNamespace(restart=lambda: done.append("Ray")),
    )
    await Box._look_at_clock(box)
    assert done == []
    clocks.shift_s -= LEAST_S
    await Box._look_at_clock(box)
    await Box._look_at_clock(box)
    assert done == ["controller"]
    clocks.shift_s -= 3600
    await Box._look_at_clock(box)
    await Box._look_at_clock(box)
    assert done == ["controller", "Ray"], "the controller starts with Ray"
    assert said == [
        "the clock was set back by 30 s: the controller is restarted, or it would wait for the clock to catch up",
        "the clock was set back by 3630 s: Ray is restarted, or it would wait for the clock to catch up",
    ]
