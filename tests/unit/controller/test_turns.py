"""What a read costs is no matter of how many there are in a minute: few of one owner are at work at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from appliance.controller.http.middleware import CONVERSATIONS_AT_ONCE, READS_AT_ONCE, InFlight, ReadsInTurns
from appliance.controller.interfaces.identity import ADMIN, BOX, Identity


class Asked:
    """An app whose requests wait for `go`, and then for `end` with the rest of their answers."""

    def __init__(self) -> None:
        self.at_work: list[str] = []
        self.go, self.end = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.at_work.append(scope["path"])
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200})
        await self.end.wait()


def scope(identity: Identity, path: str = "/v1/files", method: str = "GET") -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "state": {"identity": identity}}


async def ignore(message: Any) -> None:
    return None


async def silent() -> Any:
    await asyncio.Event().wait()


OWNERS = {"key_1": "ann", "key_2": "ann", "key_3": "bob"}
KEYS = {name: Identity(name, frozenset({"fine_tuning"})) for name in OWNERS}


async def turned() -> None:
    """All that can be done without waiting has been, however slow the machine."""
    for _ in range(100):
        await asyncio.sleep(0)


async def begun(app: Asked, *scopes: dict[str, Any]) -> tuple[ReadsInTurns, list[asyncio.Task[None]]]:
    turns = ReadsInTurns(app, owner_of=OWNERS.__getitem__)
    tasks = [asyncio.ensure_future(turns(one, silent, ignore)) for one in scopes]
    await turned()
    return turns, tasks


async def test_few_reads_of_an_owner_are_at_work_and_others_come_between():
    app = Asked()
    hers = [scope(KEYS["key_1"]), scope(KEYS["key_2"], method="DELETE")] * 10
    _, tasks = await begun(app, *hers, scope(KEYS["key_3"], "/v1/batches"))
    assert app.at_work == ["/v1/files"] * READS_AT_ONCE + ["/v1/batches"]
    app.go.set()
    await turned()
    assert len(app.at_work) == 21  # one whose answer has begun holds up nobody, however long its client takes
    app.end.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    "free",
    [
        scope(BOX),
        scope(Identity("key_1", frozenset({ADMIN}))),
        scope(KEYS["key_1"], method="POST"),
    ],
)
async def test_who_is_not_held_up(free: dict[str, Any]):
    app = Asked()
    _, tasks = await begun(app, *[free] * 20)
    assert len(app.at_work) == 20
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_conversations_that_gateways_ask_for_have_turns_of_their_own_until_they_are_answered():
    """Of one of 7 MiB a hundred at once held 850 MiB, and an owner may ask for 1,200 in a minute."""
    app, path = Asked(), "/internal/responses/context"
    app.go.set()
    hers = [scope(KEYS[name], path) for name in ("key_1", "key_2")] * 20
    _, tasks = await begun(app, *hers, scope(KEYS["key_1"]), scope(KEYS["key_3"], path))
    assert app.at_work == [path] * CONVERSATIONS_AT_ONCE + ["/v1/files", path]
    app.end.set()
    await asyncio.gather(*tasks)
    assert len(app.at_work) == 42


async def test_a_turn_comes_back_from_whoever_fails_or_leaves():
    app = Asked()
    turns, tasks = await begun(app, *[scope(KEYS["key_1"])] * 6)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    app.at_work.clear()
    again = [asyncio.ensure_future(turns(scope(KEYS["key_1"]), silent, ignore)) for _ in range(6)]
    await turned()
    assert len(app.at_work) == READS_AT_ONCE
    for task in again:
        task.cancel()
    await asyncio.gather(*again, return_exceptions=True)


async def test_who_has_left_waits_for_no_turn():
    """A gateway drops the requests of clients that leave, and counts them no more: they waited on, one in a second was
    looked at, and 20 came in each."""
    app, gone = Asked(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    turns, working = await begun(app, *[scope(KEYS["key_1"])] * READS_AT_ONCE)
    waiting = [asyncio.ensure_future(turns(scope(KEYS["key_1"]), receive, ignore)) for _ in range(50)]
    await turned()
    gone.set()
    done, _ = await asyncio.wait(waiting, timeout=60)
    assert len(done) == 50 and len(app.at_work) == READS_AT_ONCE
    app.go.set()
    app.end.set()
    await asyncio.gather(*working)
    await asyncio.gather(*[turns(scope(KEYS["key_1"]), silent, ignore) for _ in range(2 * READS_AT_ONCE)])


async def test_who_waits_for_a_turn_still_has_what_came_meanwhile():
    app, got = Asked(), list[Any]()

    async def asks(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/v1/batches":
            got.append(await receive())
        else:
            await app(scope, receive, send)

    messages = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Event().wait()

    turns = ReadsInTurns(asks, owner_of=OWNERS.__getitem__)
    working = [asyncio.ensure_future(turns(scope(KEYS["key_1"]), silent, ignore)) for _ in range(READS_AT_ONCE)]
    await turned()
    one = asyncio.ensure_future(turns(scope(KEYS["key_1"], "/v1/batches"), receive, ignore))
    await turned()
    assert not messages and not got
    app.go.set()
    app.end.set()
    await asyncio.gather(*working, one)
    assert [message["type"] for message in got] == ["http.request"]


async def test_an_owner_has_so_many_requests_at_the_controller_whether_he_waits_for_them_or_not():
    app, sent = Asked(), list[Any]()

    async def keep(message: Any) -> None:
        sent.append(message)

    few = InFlight(app, owner_of=OWNERS.__getitem__, most=3)
    hers = [asyncio.ensure_future(few(scope(KEYS["key_1"], method="POST"), silent, keep)) for _ in range(5)]
    others = [few(scope(one, "/v1/batches"), silent, keep) for one in (KEYS["key_3"], BOX)]
    others = [asyncio.ensure_future(one) for one in others]
    await turned()
    assert app.at_work == ["/v1/files"] * 3 + ["/v1/batches"] * 2
    assert [message["status"] for message in sent if message["type"] == "http.response.start"] == [429, 429]
    app.go.set()
    app.end.set()
    await asyncio.gather(*hers, *others)
    await few(scope(KEYS["key_2"]), silent, ignore)
    assert len(app.at_work) == 6
