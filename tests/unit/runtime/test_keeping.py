"""Tasks that outlive their exceptions, on a clock of their own."""

from __future__ import annotations

import asyncio
import logging

import pytest

from runtime.background_tasks import LONGEST_PAUSE_S, STEADY_S, Keepers


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
def keepers(time: Time) -> Keepers:
    return Keepers(lambda: time.now_s, time.sleep)


async def test_what_it_raises_is_logged_by_name_and_it_is_begun_anew_later_and_later(time, keepers, caplog):
    begun = 0

    async def fails_eight_times():
        nonlocal begun
        begun += 1
        if begun <= 8:
            raise KeyError("shelf")

    with caplog.at_level(logging.ERROR):
        await keepers.keep("tidying", fails_eight_times)
    assert begun == 9 and time.slept == [1, 2, 4, 8, 16, 32, 60, 60] and time.slept[-1] == LONGEST_PAUSE_S
    assert keepers.degraded() == []  # it came to its end
    first = caplog.records[0]
    assert "tidying failed, time 1 in a row; begun anew in 1 s" in first.message
    assert first.exc_info is not None and first.exc_info[0] is KeyError


async def test_cancellation_is_no_failure(keepers):
    began = asyncio.Event()

    async def runs_on():
        began.set()
        await asyncio.Event().wait()

    task = keepers.keep("endless", runs_on)
    await began.wait()
    await keepers.stop()
    assert task.cancelled() and keepers.degraded() == []


async def test_it_is_degraded_until_it_has_run_steadily_again(time, keepers):
    failed, goes_on = False, asyncio.Event()

    async def fails_once():
        nonlocal failed
        if not failed:
            failed = True
            raise OSError("No space left on device\nand more")
        await goes_on.wait()

    task = keepers.keep("bus: one", fails_once)
    while time.slept != [1]:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    (trouble,) = keepers.degraded()
    assert trouble == {"name": "bus: one", "since_s": 1000.0, "why": "OSError: No space left on device", "failures": 1,
                       "next_try_s": None}  # fmt: skip
    assert keepers.names() == ["bus"]
    time.now_s += STEADY_S
    assert keepers.degraded() == []
    goes_on.set()
    await task


async def test_rounds_go_on_after_one_that_failed_and_one_that_ended_well_heals(time, keepers):
    rounds, seen = 0, []
    enough = asyncio.Event()

    async def once():
        nonlocal rounds
        rounds += 1
        seen.append([trouble["failures"] for trouble in keepers.degraded()])
        if rounds in (2, 3):
            raise RuntimeError("not this time")
        if rounds == 5:
            enough.set()
            await asyncio.Event().wait()

    keepers.keep_every("house", once, 60.0)
    await enough.wait()
    await keepers.stop()
    # A failed round is tried again after the pause alone, then the rhythm goes on.
    assert time.slept == [60, 60, 1, 2, 60] and seen == [[], [], [1], [2], []]


async def test_guarded_work_of_others_breaks_nothing_of_theirs(keepers, caplog):
    with caplog.at_level(logging.ERROR), keepers.guard("usage"):
        raise OSError("database or disk is full")
    assert [trouble["why"] for trouble in keepers.degraded()] == ["OSError: database or disk is full"]
    assert "usage failed, time 1 in a row" in caplog.text
    with keepers.guard("usage"):
        pass
    assert keepers.degraded() == []


async def test_a_guard_lets_cancellation_pass(keepers):
    with pytest.raises(asyncio.CancelledError), keepers.guard("usage"):
        raise asyncio.CancelledError
    assert keepers.degraded() == []
