"""Swaps, pauses, sleep and wake while vLLM schedules one step ahead of the one that computes, as on GPUs.

What a GPU's engine does is here: loads in a pause, the fingerprint in the first step after it, and level 2 of sleep.
"""

from __future__ import annotations

import asyncio

import pytest

from serve.engine import replica as replica_module
from tests.e2e import async_engine
from tests.e2e.engine_support import client, greedy
from tests.e2e.test_engine_swap import greedy_ids, stream_through_swap

PROMPT = [10, 20, 30, 40]


@pytest.fixture
async def ahead(engine_box, replicas, monkeypatch):
    """Starts engines with asynchronous scheduling, as (replica, SDK); in the end each has to have used it."""
    logs = []

    async def start(name, path, **overrides):
        spec = engine_box.spec(name, path, extra_args=async_engine.ARGUMENTS, **overrides)
        engine = replicas()
        with monkeypatch.context() as patch:
            patch.setattr(replica_module, "ENTRY", async_engine.ENTRY)
            await engine.start(spec)
        logs.append(engine_box.logs / f"engine-{name}.log")
        return engine, client(spec)

    yield start
    assert logs and all(async_engine.AHEAD in log.read_text() for log in logs)


@pytest.fixture
async def fresh(engine_box, replicas):
    """The SDK of an ordinary engine of version b."""
    spec = engine_box.spec("ahead-fresh", engine_box.version("b", seed=2))
    await replicas().start(spec)
    return client(spec)


async def test_a_stream_goes_on_through_swaps_in_a_pause(engine_box, ahead, fresh):
    a, b = engine_box.version("a", seed=1), engine_box.version("b", seed=2)
    engine, sdk = await ahead("ahead", a)
    await stream_through_swap(engine, sdk, fresh, a, b)
    assert await greedy(sdk, "tuned") == await greedy(fresh, "starter")


async def test_a_full_batch_and_those_behind_it_survive_swap_after_swap(engine_box, ahead, fresh):
    a, b = engine_box.version("a", seed=1), engine_box.version("b", seed=2)
    engine, sdk = await ahead("ahead-full", a, max_num_seqs=4)
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


async def test_a_request_that_came_in_sleep_is_answered_by_the_version_that_wakes(engine_box, ahead, fresh):
    a, b = engine_box.version("a", seed=1), engine_box.version("b", seed=2)
    engine, sdk = await ahead("ahead-asleep", a)
    own = await greedy(sdk, "starter")
    for version, expected in ((b, await greedy(fresh, "starter")), (a, own)):
        await engine.sleep()
        held = asyncio.create_task(greedy(sdk, "starter"))
        while (await engine.status())["waiting"] == 0:
            assert not held.done()
        woken = await engine.wake("starter", version.name, str(version))
        assert woken["version"] == version.name
        assert await held == expected == await greedy(sdk, "starter")
