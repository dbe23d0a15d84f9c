"""Engines that die of one request, among others that have nothing to do with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .conftest import Box, Response, Start, chat
from .upstreams import Reply, UpstreamRequest, answer_chat

POISON = "poison"


def deadly_engines(box: Box, *, poison: str = POISON, answers_after_s: float = 0.02):
    """The script of engines that die, with all they have, of a request whose user is `poison`. They answer others after
    a moment, so that these are there meanwhile."""

    def of(name: str):
        async def script(request: UpstreamRequest, reply: Reply) -> None:
            if request.json.get("user") == poison:
                await asyncio.sleep(answers_after_s / 2)
                asyncio.ensure_future(box.engines[name].stop())  # noqa: RUF006 - it cancels this script, too
                await asyncio.sleep(60)
            await asyncio.sleep(answers_after_s)
            await answer_chat(request, reply)

        return script

    return of


async def start_engines(box: Box, *names: str) -> None:
    script = deadly_engines(box)
    for name in names:
        await box.engine(name, script(name))
    box.serve("m", *names)


def dead(box: Box) -> list[str]:
    return [name for name, engine in box.engines.items() if engine._server is None]


def is_condemned(response: Response) -> bool:
    return (
        response.status == 502
        and response.error["code"] == "engines_died"
        and response.headers["x-should-retry"] == "false"
    )


async def ask(box: Box, user: str = "", **more: Any) -> Response:
    return await box.ask("POST", "/v1/chat/completions", chat(**({"user": user} if user else {}), **more))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("engines", [3, 5])
async def test_a_request_that_ends_engines_ends_two_and_is_condemned(
    start_box: Start, engines: int, stream: bool
) -> None:
    box = await start_box()
    await start_engines(box, *(f"e{n}" for n in range(engines)))
    assert is_condemned(await ask(box, POISON, stream=stream)) and len(dead(box)) == 2
    answers = await asyncio.gather(*(ask(box, f"u{n}", stream=stream) for n in range(12)))
    assert [answer.status for answer in answers] == [200] * 12
    assert box.state.metrics.events["engines_died"] == 1
    assert all(load.inflight == 0 for load in box.state.router.loads.values())


async def test_an_engine_that_is_killed_costs_none_of_its_requests(start_box: Start) -> None:
    box = await start_box()
    await start_engines(box, "e0")
    asked = [asyncio.ensure_future(ask(box, f"u{n}", stream=n % 2 == 0)) for n in range(10)]
    await box.until(lambda: len(box.engines["e0"].requests) == 10)
    await box.engines["e0"].stop()
    await start_engines(box, "e1")
    assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 10
    assert box.state.metrics.events["engines_died"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_engines_of_a_node_that_is_gone_did_not_die_of_the_request(start_box: Start, stream: bool) -> None:
    """One breaks off under it, and the others cannot be reached."""
    box = await start_box()
    gone = [f"gone{n}" for n in range(6)]

    async def node_goes(request: UpstreamRequest, reply: Reply) -> None:
        for name in gone:
            await box.engines[name].stop()

    for name in gone:
        await box.engine(name, node_goes)
    box.serve("m", *gone)
    asked = asyncio.ensure_future(ask(box, stream=stream))
    await box.until(lambda: box.state.metrics.events["upstream_unreached"] >= 5)
    await start_engines(box, "home")
    box.serve("m", *gone, "home")
    answer = await asked
    assert answer.status == 200 and b"error" not in answer.body
    assert box.state.metrics.events["engines_died"] == 0
