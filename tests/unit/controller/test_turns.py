"""What a read costs is no matter of how many there are in a minute: few of one owner are at work at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from appliance.controller.http.middleware import CONVERSATIONS_AT_ONCE, READS_AT_ONCE, ReadsInTurns
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


OWNERS = {"key_1": "ann", "key_2": "ann", "key_3": "bob"}
KEYS = {name: Identity(name, frozenset({"fine_tuning"})) for name in OWNERS}


async def begun(app: Asked, *scopes: dict[str, Any]) -> tuple[ReadsInTurns, list[asyncio.Task[None]]]:
    turns = ReadsInTurns(app, owner_of=OWNERS.__getitem__)
    tasks = [asyncio.ensure_future(turns(one, ignore, ignore)) for one in scopes]
    await asyncio.sleep(0.01)
    return turns, tasks


async def test_few_reads_of_an_owner_are_at_work_and_others_come_between():
    app = Asked()
    hers = [scope(KEYS["key_1"]), scope(KEYS["key_2"], method="DELETE")] * 10
    _, tasks = await begun(app, *hers, scope(KEYS["key_3"], "/v1/batches"))
    assert app.at_work == ["/v1/files"] * READS_AT_ONCE + ["/v1/batches"]
    app.go.set()
    await asyncio.sleep(0.01)
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
    again = [asyncio.ensure_future(turns(scope(KEYS["key_1"]), ignore, ignore)) for _ in range(6)]
    await asyncio.sleep(0.01)
    assert len(app.at_work) == READS_AT_ONCE
    for task in again:
        task.cancel()
    await asyncio.gather(*again, return_exceptions=True)
