"""Tasks that outlive their exceptions, on a clock of their own."""

from __future__ import annotations

import asyncio
import logging

import pytest

from runtime.background_tasks import PAUSES_S, STEADY_S, BackgroundTasks


class Time:
    """Sleeps pass at once and are written down."""

    def __init__(self) -> None:
        self.now_s, self.slept = 1000.0, []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def background(time: Time) -> BackgroundTasks:
    return BackgroundTasks(lambda: time.now_s, time.sleep)


async def test_what_it_raises_is_logged_by_name_and_it_is_begun_anew_later_and_later(time, background, caplog):
    begun = 0

    async def fails_eight_times():
        nonlocal begun
        begun += 1
        if begun <= 8:
            raise KeyError("shelf")

    with caplog.at_level(logging.ERROR):
        await background.keep("tidying", fails_eight_times)
    assert begun == 9 and time.slept == [1, 2, 4, 8, 16, 32, 60, 60] and time.slept[-1] == PAUSES_S[1]
    assert background.degraded() == []  # it came to its end
    first = caplog.records[0]
    assert "tidying failed, time 1 in a row; started again in 1 s" in first.message
    assert first.exc_info is not None and first.exc_info[0] is KeyError


async def test_what_fails_while_it_is_cancelled_is_not_begun_anew(background, caplog):
    began, begun = asyncio.Event(), 0

    async def fails_at_its_end():
        nonlocal begun
        begun += 1
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ProcessLookupError()

    background.keep("warm parent", fails_at_its_end)
    await began.wait()
    async with asyncio.timeout(60):
        await background.stop()
    assert begun == 1 and "warm parent failed, time 1 in a row" in caplog.text


async def test_it_is_degraded_until_it_has_run_steadily_again(time, background):
    failed, goes_on = False, asyncio.Event()

    async def fails_once():
        nonlocal failed
        if not failed:
            failed = True
            raise OSError("No space left on device\nand more")
        await goes_on.wait()

    task = background.keep("bus: one", fails_once)
    while time.slept != [1]:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    (trouble,) = background.degraded()
    assert trouble == {
        "name": "bus: one",
        "since_s": 1000.0,
        "why": "OSError: No space left on device",
        "failures": 1,
        "next_try_s": None,
    }
    assert background.names() == ["bus"]
    time.now_s += STEADY_S
    assert background.degraded() == []
    goes_on.set()
    await task


async def test_rounds_go_on_after_one_that_failed_and_one_that_ended_well_heals(time, background):
    rounds, seen = 0, []
    enough = asyncio.Event()

    async def once():
        nonlocal rounds
        rounds += 1
        seen.append([trouble["failures"] for trouble in background.degraded()])
        if rounds in (2, 3):
            raise RuntimeError("not this time")
        if rounds == 5:
            enough.set()
            await asyncio.Event().wait()

    background.keep_every("house", once, 60.0)
    await enough.wait()
    await background.stop()
    # A failed round is tried again after the pause alone, then the rhythm goes on.
    assert time.slept == [60, 60, 1, 2, 60] and seen == [[], [], [1], [2], []]
