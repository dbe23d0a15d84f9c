"""Engines that die of one request, among others that have nothing to do with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from appliance.gateway.inference.retry import (
    MAX_ATTEMPTS,
    MAX_ECHOES,
    MAX_UNREACHED,
    TRIAL_S,
    Verdict,
    is_suspect,
    verdict_on,
)
from appliance.gateway.routing.holds import Bounds, Holds
from appliance.gateway.routing.router import Model, Replica, Router
from runtime.network.tunnel import UNREACHED_HEAD

from .conftest import Box, Response, Start, chat
from .test_continuation import TEXT, greedy_engine, text_of
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
    told = response.error["code"] == "engines_died" and "not sent to a third" in response.error["message"]
    return response.status == 502 and told and response.headers["x-should-retry"] == "false"


async def ask(box: Box, user: str = "", **more: Any) -> Response:
    return await box.ask("POST", "/v1/chat/completions", chat(**({"user": user} if user else {}), **more))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("engines", [3, 5])
async def test_a_request_that_ends_engines_ends_two_and_no_other_request_is_lost(
    start_box: Start, engines: int, stream: bool
) -> None:
    box = await start_box()
    await start_engines(box, *(f"e{n}" for n in range(engines)))
    innocent = [ask(box, f"u{n}", stream=stream) for n in range(12)]
    *answers, last = await asyncio.gather(*innocent[:6], *innocent[6:], ask(box, POISON, stream=stream))
    assert [answer.status for answer in answers] == [200] * 12
    assert is_condemned(last) and len(dead(box)) == 2
    assert box.state.metrics.events["condemned"] == 1
    assert all(load.inflight == 0 and load.trial is None for load in box.state.router.loads.values())


async def test_a_death_counts_over_a_connection_that_was_there_before_too(start_box: Start) -> None:
    """The end of such a connection was taken for that of an idle one, so that each engine was ended in turn."""
    box = await start_box()
    await start_engines(box, "e0", "e1", "e2", "e3")
    for name, engine in box.engines.items():
        box.serve("m", name)
        assert (await ask(box)).status == 200 and engine.connections == 1
    box.serve("m", *box.engines)
    assert is_condemned(await ask(box, POISON))
    assert len(dead(box)) == 2 and all(len(engine.requests) <= 2 for engine in box.engines.values())


async def test_where_one_engine_is_left_the_suspects_go_there_one_by_one(start_box: Start) -> None:
    box = await start_box()

    async def dies_with_all_five(request: UpstreamRequest, reply: Reply) -> None:
        """Whenever they come: by the clock, on a busy machine, some were answered before the one that ends it came."""
        if request.json.get("user") == POISON:
            await box.until(lambda: len(box.engines["e0"].requests) == 5)
            asyncio.ensure_future(box.engines["e0"].stop())  # noqa: RUF006 - it cancels this script, too
        await asyncio.Event().wait()

    await box.engine("e0", dies_with_all_five)
    box.serve("m", "e0")
    asked = [asyncio.ensure_future(ask(box, user)) for user in ("u0", "u1", POISON, "u2", "u3")]
    await box.until(lambda: bool(dead(box)))
    box.serve("m")
    await box.until(lambda: box.state.holds.held("m") == 5)
    await start_engines(box, "e1")
    await box.until(lambda: len(dead(box)) == 2)
    box.serve("m")
    await start_engines(box, "e2")
    answers = await asyncio.gather(*asked)
    assert is_condemned(answers.pop(2)) and [answer.status for answer in answers] == [200] * 4
    assert dead(box) == ["e0", "e1"]


async def test_an_engine_that_is_killed_costs_none_of_its_requests(start_box: Start) -> None:
    box = await start_box()
    await start_engines(box, "e0")
    asked = [asyncio.ensure_future(ask(box, f"u{n}", stream=n % 2 == 0)) for n in range(10)]
    await box.until(lambda: len(box.engines["e0"].requests) == 10)
    await box.engines["e0"].stop()
    await start_engines(box, "e1")
    assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 10
    assert box.state.metrics.events["condemned"] == 0


async def test_new_requests_do_not_wait_for_those_that_stand_trial(start_box: Start) -> None:
    box = await start_box()
    gate = asyncio.Event()

    async def dies(request: UpstreamRequest, reply: Reply) -> None:
        reply.die()

    async def waits(request: UpstreamRequest, reply: Reply) -> None:
        if request.json["user"] != "new":
            await gate.wait()
        await answer_chat(request, reply)

    await box.engine("e0", dies)
    box.serve("m", "e0")
    asked = [asyncio.ensure_future(ask(box, f"u{n}")) for n in range(3)]
    await box.until(lambda: box.state.holds.held("m") == 3)
    await box.engine("e1", waits)
    box.serve("m", "e1")
    await box.until(lambda: len(box.engines["e1"].requests) == 1)
    assert box.state.holds.held("m") == 2, "one at a time"
    assert (await ask(box, "new")).status == 200
    assert box.state.holds.held("m") == 2
    for conn in list(box.state.connections):
        conn.tick(asyncio.get_running_loop().time() + TRIAL_S + 1.0)
    await box.until(lambda: len(box.engines["e1"].requests) == 3)
    assert box.state.holds.held("m") == 1, "who has been there for a while stands trial no longer"
    gate.set()
    assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 3


async def test_a_stream_outlives_two_engines_that_another_request_ended(start_box: Start) -> None:
    """Both engines die with it in mid-stream; the second death is put down to the request that stands trial there."""
    box = await start_box()
    waits: dict[str, asyncio.Event] = {}

    def script_of(name: str, dies_after: int | None):
        greedy = greedy_engine({} if dies_after is None else {"tokens": dies_after})

        async def script(request: UpstreamRequest, reply: Reply) -> None:
            if request.json.get("user") == POISON:
                waits[name].set()
                await asyncio.sleep(60)
                return

            def die() -> None:
                async def once_the_other_is_there() -> None:
                    await waits[name].wait()
                    await box.engines[name].stop()

                asyncio.ensure_future(once_the_other_is_there())  # noqa: RUF006 - it cancels this script, too

            reply.die = die  # type: ignore[method-assign]
            await greedy(request, reply)
            if dies_after is not None:
                await asyncio.sleep(60)

        return script

    for name, dies_after in (("e0", 2), ("e1", 2), ("e2", None)):
        waits[name] = asyncio.Event()
        await box.engine(name, script_of(name, dies_after))
    box.serve("m", "e0")
    stream = asyncio.ensure_future(ask(box, "u", stream=True, temperature=0, max_tokens=50))
    await box.until(lambda: len(box.engines["e0"].requests) == 1)
    poison = asyncio.ensure_future(ask(box, POISON))
    await box.until(lambda: bool(dead(box)))
    box.serve("m", "e1")
    await box.until(lambda: len(dead(box)) == 2)
    box.serve("m", "e2")
    assert text_of((await stream).body) == TEXT
    assert is_condemned(await poison) and dead(box) == ["e0", "e1"]


async def test_a_replica_that_breaks_off_twice_has_died_once(start_box: Start) -> None:
    """The way to an engine of another node breaks off, and takes the request once more before that is known."""
    box = await start_box()
    broken: list[UpstreamRequest] = []

    async def breaks_off_twice(request: UpstreamRequest, reply: Reply) -> None:
        broken.append(request)
        if len(broken) <= 2:
            reply.die()
        else:
            await answer_chat(request, reply)

    await box.engine("e0", breaks_off_twice)
    box.serve("m", "e0")
    assert (await ask(box)).status == 200 and len(broken) == 3
    assert box.state.metrics.events["condemned"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_engines_of_a_node_that_is_gone_did_not_die_of_the_request(start_box: Start, stream: bool) -> None:
    """One breaks off under it; the tunnels to the others of the node say that they lead nowhere."""
    box = await start_box()
    gone = [f"gone{n}" for n in range(6)]

    async def node_goes(request: UpstreamRequest, reply: Reply) -> None:
        if sum(len(box.engines[name].requests) for name in gone) == 1:
            reply.die()
        else:
            await reply.raw(UNREACHED_HEAD)

    for name in gone:
        await box.engine(name, node_goes)
    box.serve("m", *gone)
    asked = asyncio.ensure_future(ask(box, stream=stream))
    await box.until(lambda: all(box.engines[name].requests for name in gone))
    await start_engines(box, "home")
    box.serve("m", *gone, "home")
    answer = await asked
    assert answer.status == 200 and b"error" not in answer.body
    assert box.state.metrics.events["condemned"] == 0 and box.state.metrics.events["upstream_unreached"] >= 5


async def test_a_request_goes_on_where_it_has_not_broken_off(start_box: Start, monkeypatch) -> None:
    monkeypatch.setattr("appliance.gateway.routing.router.SUSPECT_FIRST_S", 0.0)
    box = await start_box()

    async def breaks_off(request: UpstreamRequest, reply: Reply) -> None:
        reply.die()

    await box.engine("e0", breaks_off)
    await box.engine("e1", answer_chat)
    box.serve("m", "e0", "e1")
    for n in range(8):  # they begin differently, so both engines are preferred by some
        assert (await ask(box, f"u{n}", messages=[{"role": "user", "content": str(n)}])).status == 200
    assert len(box.engines["e0"].requests) < 8


def test_how_often_a_request_is_sent() -> None:
    def verdict(sent: int, deaths: int, relayed: bool = False, resumable: bool = False, echoes: int = 0) -> Verdict:
        return verdict_on(sent, deaths, echoes, relayed=relayed, resumable=resumable)

    assert verdict(1, 0) is verdict(1, 1) is verdict(2, 1) is Verdict.AGAIN
    assert verdict(2, 2) is verdict(2, 2, True, True) is Verdict.CONDEMN
    assert verdict(MAX_ATTEMPTS, 0) is verdict(MAX_ATTEMPTS, 1, True, True) is Verdict.FAIL
    assert verdict(1, 1, True, True) is Verdict.CONTINUE
    assert verdict(MAX_ATTEMPTS, 1, echoes=1) is verdict(MAX_ECHOES, 1, echoes=MAX_ECHOES - 1) is Verdict.AGAIN
    assert verdict(1 + MAX_ECHOES, 1, echoes=MAX_ECHOES) is Verdict.FAIL
    assert verdict_on(MAX_UNREACHED, 1, 0, relayed=False, resumable=False, unreached=MAX_UNREACHED - 1) is Verdict.AGAIN
    assert verdict_on(MAX_UNREACHED, 0, 0, relayed=False, resumable=False, unreached=MAX_UNREACHED) is Verdict.FAIL
    assert verdict(1, 1, True, False) is Verdict.FAIL
    assert is_suspect(0.0, False) and not is_suspect(0.0, True) and not is_suspect(TRIAL_S, False)


def test_an_engine_died_of_the_request_that_stood_trial_there_in_whatever_order_they_hear_of_it() -> None:
    for trial_first in (True, False):
        router = Router(max_inflight=9)
        replicas = tuple(Replica(name, f"/{name}", "v", "open") for name in ("a", "b"))
        router.apply([Model("m", "v", "ready", "generate", 30.0, replicas)])
        on_trial = router.choose("m", 1, False, bytes, 0.0, alone=True)
        second = router.choose("m", 1, False, bytes, 0.0, alone=True)
        assert on_trial is not None and second is not None and on_trial.replica != second.replica
        assert router.choose("m", 1, False, bytes, 0.0, alone=True) is None
        router.acquit(second)
        router.end(second)
        router.fail(second, 0.0)  # the next goes to the other one
        other = router.choose("m", 1, False, bytes, 0.1)
        assert other is not None and other.replica is on_trial.replica
        blamed = {}
        for choice in (on_trial, other) if trial_first else (other, on_trial):
            blamed[choice] = router.died(choice, 5.0)
            router.end(choice)
        assert blamed == {on_trial: True, other: False}
        later = router.choose("m", 1, False, bytes, 9.0)
        assert later is not None and router.died(later, 9.0), "that was another death"


def test_those_who_go_alone_wait_in_a_queue_of_their_own() -> None:
    holds: Holds[str] = Holds(Bounds(requests=9, requests_per_model=3, body_bytes=100))
    alone = holds.add("m", "suspect", 1, 9.0, 0.0, alone=True)
    plain = holds.add("m", "plain", 1, 9.0, 0.0)
    assert holds.first("m") is plain and holds.first("m", alone=True) is alone
    assert holds.held("m") == 2 and holds.models() == ["m"] and {t.item for t in holds} == {"plain", "suspect"}
    assert {ticket.item for ticket in holds.expired(9.0)} == {"plain", "suspect"} and holds.count == 0
