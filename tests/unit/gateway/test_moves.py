"""Requests that wait for a first token move to a replica that opens, where they are served sooner."""

from __future__ import annotations

import asyncio

from appliance.gateway.routing.moves import Waiting, moves
from appliance.gateway.routing.router import Load

from .conftest import Box, chat, request_bytes
from .upstreams import Reply, UpstreamRequest


def loads(**pending: int) -> dict[str, Load]:
    return {name: Load(inflight=tokens // 1000, tokens=tokens, pending=tokens) for name, tokens in pending.items()}


def waiting(count: int, tokens: int = 1000, sent_s: float = 0.0) -> list[Waiting[int]]:
    return [Waiting(n, "a", tokens, sent_s + n / 100) for n in range(count)]


def test_half_of_a_queue_moves_but_not_the_prompt_that_is_being_computed() -> None:
    assert moves(waiting(10), ["b"], loads(a=10_000, b=0), 10_000.0, 0.2) == [1, 2, 3, 4, 5]
    assert moves(waiting(1), ["b"], loads(a=1000, b=0), 10_000.0, 0.2) == []
    assert moves(waiting(10), ["b"], loads(a=10_000, b=9000), 10_000.0, 0.2) == [], "no sooner there"
    assert moves(waiting(10), [], loads(a=10_000, b=0), 10_000.0, 0.2) == []
    assert moves(waiting(10), ["b"], loads(a=10_000, b=0), None, 99.0) == [1, 2, 3, 4, 5], "without a rate too"


def test_what_waits_for_a_full_cache_moves_however_short_its_prompt() -> None:
    full = {"a": Load(inflight=50, tokens=90_000, pending=40), "b": Load()}
    assert moves(waiting(4, 10), ["b"], full, 10_000.0, 3.0) == [0, 1, 2, 3]
    assert moves(waiting(4, 10), ["b"], full, 10_000.0, 0.5) == [1, 2], "they have hardly waited"


async def test_streams_that_wait_move_and_are_answered_by_the_engine_that_opened(box: Box) -> None:
    async def silent(request: UpstreamRequest, reply: Reply) -> None:
        await asyncio.Event().wait()

    box.engines["e0"].script = silent
    await box.engine("e1")
    wires = [await box.connect() for _ in range(6)]
    for wire in wires:
        await wire.send(request_bytes("POST", "/v1/chat/completions", chat(stream=True)))
        await box.until(lambda: len(box.engines["e0"].requests) == wires.index(wire) + 1)  # noqa: B023
    plain = await box.connect()
    await plain.send(request_bytes("POST", "/v1/chat/completions", chat()))
    await box.until(lambda: len(box.engines["e0"].requests) == 7)
    box.serve("m", "e0", "e1")
    moved = box.state.metrics.events["moved"]
    assert 0 < moved < 6, "not the first, which may be computed, nor the one that shows no first token"
    await box.until(lambda: len(box.engines["e1"].requests) == moved)
    for wire in wires[1 : 1 + moved]:
        assert (await wire.response()).status == 200
    await box.until(lambda: box.state.router.loads["e1"].inflight == 0)
    assert box.state.router.loads["e0"].inflight == 7 - moved
