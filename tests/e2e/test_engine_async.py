"""Swaps, pauses, sleep and wake while vLLM schedules one step ahead of the one that computes, as on GPUs.

What a GPU's engine does is here: loads in a pause, the fingerprint in the first step after it, and level 2 of sleep.
"""

from __future__ import annotations

import asyncio

import pytest

from serve.engine import replica as replica_module
from tests.e2e import async_engine
from tests.e2e.engine_support import greedy
from tests.e2e.test_engine_swap import greedy_ids, stream_through_swap

PROMPT = [10, 20, 30, 40]


@pytest.fixture
async def ahead(engine_box, start, a, monkeypatch):
    """Starts an engine of version a that schedules asynchronously, as (replica, SDK); it must do so."""
    logs = []

    async def ahead(name, **fields):
        with monkeypatch.context() as patch:
            patch.setattr(replica_module, "ENTRY", async_engine.ENTRY)
            engine = await start(name, a, extra_args=async_engine.ARGUMENTS, **fields)
        logs.append(engine_box.logs / f"engine-{name}.log")
        return engine.replica, engine.sdk

    yield ahead
    assert logs and all(async_engine.AHEAD in log.read_text() for log in logs)


@pytest.fixture
async def fresh(start, b):
    """The SDK of an ordinary engine of version b."""
    return (await start("ahead-fresh", b)).sdk


async def test_a_stream_goes_on_through_swaps_in_a_pause(ahead, fresh, a, b):
    engine, sdk = await ahead("ahead")
    await stream_through_swap(engine, sdk, fresh, a, b)
    assert await greedy(sdk, "tuned") == await greedy(fresh, "starter")


async def test_a_full_batch_and_those_behind_it_survive_swap_after_swap(ahead, fresh, a, b):
    engine, sdk = await ahead("ahead-full", max_num_seqs=4)
    tokens = 300
    asked = [asyncio.create_task(greedy_ids(sdk, "starter", [number, *PROMPT], tokens)) for number in range(5, 17)]
    while (await engine.status())["running"] < 4:
        assert not all(task.done() for task in asked)
    for version in (b, a, b):
        await engine.swap("starter", version.name, str(version))
        later = asyncio.create_task(greedy_ids(sdk, "starter", PROMPT, 8))
        asked.append(later)
    answers = await asyncio.gather(*asked)
    assert [len(answer) for answer in answers] == [tokens] * 12 + [8] * 3
    assert await greedy_ids(sdk, "starter", PROMPT, 40) == await greedy_ids(fresh, "starter", PROMPT, 40)
    status = await engine.status()
    assert (status["state"], status["running"], status["waiting"]) == ("ready", 0, 0)


async def test_a_request_that_came_in_sleep_is_answered_by_the_version_that_wakes(ahead, fresh, a, b):
    engine, sdk = await ahead("ahead-asleep")
    own = await greedy(sdk, "starter")
    for version, expected in ((b, await greedy(fresh, "starter")), (a, own)):
        await engine.sleep()
        held = asyncio.create_task(greedy(sdk, "starter"))
        while (await engine.status())["waiting"] == 0:
            assert not held.done()
        woken = await engine.wake("starter", version.name, str(version))
        assert woken["version"] == version.name
        assert await held == expected == await greedy(sdk, "starter")
