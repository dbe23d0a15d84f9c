"""A call to an engine ends with the engine's core."""

from __future__ import annotations

import asyncio

import pytest

from serve.core.errors import EngineFailed
from serve.engine.while_alive import while_alive


async def answer(after: asyncio.Event) -> int:
    await after.wait()
    return 7


async def test_a_call_that_the_dead_core_never_answers_ends_at_once():
    dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asked = asyncio.Event()

    async def never() -> None:
        asked.set()
        await asyncio.Event().wait()

    calling = asyncio.create_task(while_alive(never(), dead, "sleep"))
    await asked.wait()
    dead.set_result(None)
    with pytest.raises(EngineFailed, match="sleep: the engine's core died"):
        await calling


async def test_an_answer_is_an_answer_and_an_error_an_error():
    dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()
    done.set()
    assert await while_alive(answer(done), dead, "swap") == 7

    async def refuse() -> None:
        raise KeyError("no")

    with pytest.raises(KeyError):
        await while_alive(refuse(), dead, "swap")
