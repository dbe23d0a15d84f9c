"""Work on many things: one task for each at a time, and the loop free in between."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from appliance.controller.context import one_each
from appliance.controller.context.one_each import OneEach
from runtime.background_tasks import BackgroundTasks

REAL_SLEEP = asyncio.sleep


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


async def test_the_loop_is_free_for_as_long_as_each_has_held_it(monkeypatch: pytest.MonkeyPatch):
    """A hundred gates of one owner held it at a stretch."""
    clock, slept = Clock(), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await REAL_SLEEP(0)

    async def work(takes_s: float) -> None:
        clock.now_s += takes_s

    monkeypatch.setattr(one_each, "time", clock)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    going = OneEach(BackgroundTasks(), "thing")
    for name, takes_s in (("a", 0.25), ("b", 0.5)):
        await going.begin(name, partial(work, takes_s))
    assert slept == [0, 0.25, 0, 0.5]


async def test_one_that_is_worked_on_is_not_begun_again_and_keeps_no_other():
    going, begun, may_go_on = OneEach(BackgroundTasks(), "thing"), list[str](), asyncio.Event()

    async def work(name: str) -> None:
        begun.append(name)
        await may_go_on.wait()

    for name in ("a", "a", "b"):
        await going.begin(name, partial(work, name))
    assert begun == ["a", "b"]
    may_go_on.set()
    await going.tasks.idle()
    await going.begin("a", partial(work, "a"))
    assert begun == ["a", "b", "a"]
