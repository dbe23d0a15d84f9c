"""Background tasks that restart after exceptions; pauses are recorded and take no time."""

import asyncio
import logging

import pytest

from runtime import background_tasks
from runtime.background_tasks import PAUSES_S, BackgroundTasks


@pytest.fixture
def slept() -> list[float]:
    return []


@pytest.fixture
def background(slept: list[float]) -> BackgroundTasks:
    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    return BackgroundTasks(sleep)


async def test_failing_task_is_logged_and_restarted_after_longer_pauses(slept, background, caplog):
    begun = 0

    async def fails_eight_times():
        nonlocal begun
        begun += 1
        if begun <= 8:
            raise KeyError("shelf")

    with caplog.at_level(logging.ERROR):
        await background.keep("tidying", fails_eight_times)
    assert begun == 9 and slept == [1, 2, 4, 8, 16, 32, 60, 60] and slept[-1] == PAUSES_S[1]
    assert background.degraded() == []  # it finished without an error
    first = caplog.records[0]
    assert "tidying failed, time 1 in a row" in first.message
    assert first.exc_info is not None and first.exc_info[0] is KeyError


async def test_task_that_fails_while_cancelled_is_not_restarted(background, caplog):
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


async def test_task_is_degraded_until_it_runs_steadily(slept, background, monkeypatch):
    monkeypatch.setattr(background_tasks, "STEADY_S", 0.2)
    failed, goes_on = False, asyncio.Event()

    async def fails_once():
        nonlocal failed
        if not failed:
            failed = True
            raise OSError("No space left on device\nand more")
        await goes_on.wait()

    task = background.keep("bus: one", fails_once)
    while slept != [1]:
        await asyncio.sleep(0)
    (trouble,) = background.degraded()
    assert trouble.pop("since_s") > 0
    assert trouble == {"name": "bus: one", "why": "OSError: No space left on device", "failures": 1}
    assert background.names() == ["bus"]
    async with asyncio.timeout(60):
        while background.degraded():
            await asyncio.sleep(0.01)
    goes_on.set()
    await task


async def test_rounds_resume_after_failures_until_one_succeeds(slept, background):
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
    # A failed round is retried after the pause, then the interval applies again.
    assert slept == [60, 60, 1, 2, 60] and seen == [[], [], [1], [2], []]
