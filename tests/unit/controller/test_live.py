"""The event stream: who hears of what, what is missed and said to be, bounds, and the ends of streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest

from appliance.controller.interfaces.errors import ApiError
from appliance.controller.interfaces.principal import Principal
from appliance.controller.live import hub as hubs
from appliance.controller.live.hub import MOST_IDS, MOST_OF_A_KEY, ROUNDS_KEPT, UNREAD_S, Hub
from appliance.controller.live.routes import Sources
from appliance.controller.live.topics import TABLES, TOPICS
from appliance.store.records import keys
from appliance.store.row_changes import unwatch

from .conftest import Clock, Control

EVENTS = "/admin/v1/events"


def caller(*scopes: str, owner: str = "ann", key: str = "key_1") -> Principal:
    return Principal(key, frozenset(scopes), "req_1", owner)


@pytest.fixture
async def hub(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    """Its rounds end when `told` says so."""
    monkeypatch.setattr(hubs, "ROUND_S", 1e6)
    made = Hub(clock)
    made.begin()
    yield made
    made.close()


async def test_what_a_follower_may_hear_of_is_asked_for_a_topic_and_not_for_each_id(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
):
    """256 followers, most of whom heard nothing of it, held the loop for 0.2 s of each round of many changes."""
    asked: list[str] = []
    hears = hubs.hears
    monkeypatch.setattr(hubs, "hears", lambda caller, topic, owner: asked.append(topic) or hears(caller, topic, owner))
    events = hub.follow(caller("inference"), None)
    told(hub, *((topic, f"{topic}-{n}", "ann") for topic in TOPICS for n in range(MOST_IDS - 1)))
    assert len(asked) <= 2 * len(TOPICS)
    (follower,) = hub._followers
    assert follower.waiting == {"batches": {f"batches-{n}" for n in range(MOST_IDS - 1)}}
    await events.aclose()


def told(hub: Hub, *rows: tuple[str, str | None, str | None]) -> None:
    """These are a round."""
    for row in rows:
        hub.tell(*row)
    if hub._due is not None:
        hub._due.cancel()
    hub._end_round()


async def read(stream: AsyncGenerator[bytes, None]) -> tuple[str, str, dict[str, Any]]:
    """The next event: its kind, id and data."""
    async with asyncio.timeout(60):
        while (event := await anext(stream)).startswith(b":"):
            continue
    lines = dict(line.split(": ", 1) for line in event.decode().strip().split("\n"))
    return lines["event"], lines["id"], json.loads(lines["data"])


async def begun(hub: Hub, who: Principal, last: str | None = None) -> AsyncGenerator[bytes, None]:
    """A stream that has said `reload`, as each one does that continues none."""
    stream = hub.follow(who, last)
    assert (await read(stream))[0] == "reload"
    return stream


@pytest.mark.parametrize(
    ("scopes", "heard"),
    [
        (["admin"], set(TOPICS)),
        (["read"], {"box", "handovers", "jobs", "models"}),
        (["fine_tuning"], {"jobs", "files", "evals"}),
        (["inference"], {"batches"}),
        (["read", "inference"], {"box", "handovers", "jobs", "models", "batches"}),
    ],
)
async def test_a_key_hears_of_what_it_may_see(hub: Hub, scopes: list[str], heard: set[str]) -> None:
    stream = await begun(hub, caller(*scopes))
    told(hub, *((topic, "hers", "ann") for topic in TOPICS))
    assert (await read(stream))[2] == {topic: ["hers"] for topic in heard}


async def test_others_things_are_not_named(hub: Hub) -> None:
    stream = await begun(hub, caller("fine_tuning", "inference"))
    told(hub, *((topic, "his", "bob") for topic in TOPICS), *((topic, "nobodys", None) for topic in TOPICS))
    told(hub, ("jobs", "hers", "ann"), ("jobs", "his", "bob"))
    assert (await read(stream))[2] == {"jobs": ["hers"]}


async def test_what_is_not_taken_is_joined_and_too_many_are_anything(hub: Hub) -> None:
    stream = await begun(hub, caller("admin"))
    for number in range(3):
        told(hub, ("jobs", f"j{number}", "bob"), ("box", None, None))
    kind, _, data = await read(stream)
    assert (kind, data) == ("changed", {"jobs": ["j0", "j1", "j2"], "box": []})
    told(hub, *(("jobs", f"j{number}", "bob") for number in range(MOST_IDS + 1)))
    assert (await read(stream))[2] == {"jobs": []}


async def test_who_comes_back_is_told_what_he_missed(hub: Hub) -> None:
    stream = await begun(hub, caller("admin"))
    told(hub, ("jobs", "j1", "ann"))
    _, last, _ = await read(stream)
    await stream.aclose()
    told(hub, ("jobs", "j2", "ann"))
    told(hub, ("files", "f1", "ann"))
    again = hub.follow(caller("admin"), last)
    kind, now, data = await read(again)
    assert (kind, data) == ("changed", {"jobs": ["j2"], "files": ["f1"]})
    told(hub, ("jobs", "j3", "ann"))
    assert (await read(again))[2] == {"jobs": ["j3"]}
    nothing = hub.follow(caller("admin"), now)
    told(hub, ("jobs", "j4", "ann"))
    assert (await read(nothing))[2] == {"jobs": ["j3", "j4"]}


@pytest.mark.parametrize("last", [None, "", "x", "0-1", "{run}-99999", "{run}-x", "{run}--1", "{run}-" + "9" * 40])
async def test_a_gap_is_said(hub: Hub, last: str | None) -> None:
    told(hub, ("jobs", "j1", "ann"))
    given = None if last is None else last.replace("{run}", hub._run)
    assert await read(hub.follow(caller("admin"), given)) == ("reload", f"{hub._run}-1", {})


async def test_a_gap_longer_than_what_is_kept_is_said(hub: Hub) -> None:
    for number in range(ROUNDS_KEPT + 2):
        told(hub, ("jobs", f"j{number}", "ann"))
    assert (await read(hub.follow(caller("admin"), f"{hub._run}-1")))[0] == "reload"
    assert (await read(hub.follow(caller("admin"), f"{hub._run}-2")))[0] == "changed"


async def test_streams_are_bounded_by_key_and_by_box(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [hub.follow(caller("read"), None) for _ in range(MOST_OF_A_KEY)]
    with pytest.raises(ApiError) as refused:
        hub.follow(caller("read"), None)
    assert refused.value.status_code == 429 and refused.value.code == "too_many_streams"
    monkeypatch.setattr(hubs, "MOST", MOST_OF_A_KEY + 1)
    other = hub.follow(caller("read", key="key_2"), None)
    with pytest.raises(ApiError):
        hub.follow(caller("read", key="key_3"), None)
    await anext(other)
    await other.aclose()
    del streams[0]  # one that was never asked for an event
    await asyncio.sleep(0)
    hub.follow(caller("read"), None)
    assert len(hub._followers) <= MOST_OF_A_KEY


async def test_one_owner_with_many_keys_leaves_others_their_places(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "MOST", 4)
    anns = [hub.follow(caller("read", key=f"key_{number}"), None) for number in range(4)]
    with pytest.raises(ApiError):
        hub.follow(caller("read", key="key_5"), None)
    bens = [hub.follow(caller("read", owner="ben", key="key_b"), None) for _ in range(2)]
    assert hub._of_owner == {"ann": 2, "ben": 2}
    with pytest.raises(ApiError):
        hub.follow(caller("read", owner="ben", key="key_b"), None)
    with pytest.raises(StopAsyncIteration):
        await anext(anns[0])
        await anext(anns[0])
    del anns, bens
    await asyncio.sleep(0)
    assert not hub._of_owner and not hub._followers


async def test_who_does_not_read_is_let_go(hub: Hub, clock: Clock) -> None:
    slow, quick = await begun(hub, caller("read")), await begun(hub, caller("read"))
    told(hub, ("box", None, None))
    await read(slow)
    await read(quick)
    # Both have been sent something; one of them asks for more, as a client that reads does.
    asked = asyncio.ensure_future(anext(quick))
    await asyncio.sleep(0)
    clock.now_s += UNREAD_S + 1
    told(hub, ("box", None, None))
    assert b"event: changed" in await asked
    assert len(hub._followers) == 1
    with pytest.raises(StopAsyncIteration):
        await anext(slow)


async def test_a_quiet_stream_has_a_heartbeat(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "HEARTBEAT_S", 0.01)
    stream = await begun(hub, caller("read"))
    assert [await anext(stream) for _ in range(3)] == [b": here\n\n"] * 3


async def test_streams_end_with_the_process(hub: Hub) -> None:
    stream = await begun(hub, caller("read"))
    hub.close()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    with pytest.raises(ApiError):
        hub.follow(caller("read"), None)


def fresh(control: Control) -> dict[str, Any]:
    found, control.app.state.live._fresh = control.app.state.live._fresh, {}
    return found


async def test_each_row_that_is_written_is_told_of_whoever_writes_it(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubs, "ROUND_S", 1e6)
    hub = control.app.state.live
    fresh(control)
    key_id = control.as_key("ann", owner="ann")
    assert fresh(control)["keys"] == {(key_id, None)}
    file_id = await control.upload()
    assert (file_id, "ann") in fresh(control)["files"]
    job_id = await control.job(training_file=file_id)
    assert fresh(control)["jobs"] == {(job_id, "ann")}
    control.db.execute("INSERT INTO job_metrics (job_id, step, created_s) VALUES (?, 1, 0)", [job_id])
    assert fresh(control) == {"jobs": {(job_id, "ann")}}
    control.db.execute("UPDATE models SET task = 'generate'")
    assert fresh(control) == {"models": {("starter", None)}}
    control.db.execute("DELETE FROM jobs WHERE id = ?", [job_id])
    assert (job_id, "ann") in fresh(control)["jobs"]
    assert {topic for topic, _ in TABLES.values()} | {"box"} == set(TOPICS)
    unwatch(control.db, {table: watched for table, (_, watched) in TABLES.items()})
    control.as_key("bob")
    assert fresh(control) == {} and not hub._followers


async def test_the_box_is_looked_at_while_somebody_follows_it(hub: Hub, control: Control) -> None:
    sources = Sources(control.context, hub)
    await sources.look()
    assert sources._seen == b""
    stream = await begun(hub, caller("read"))
    await sources.look()
    await sources.look()
    assert hub._fresh == {}
    control.scheduler.devices[0]["health"] = "bad"
    await sources.look()
    assert hub._fresh == {"box": None}
    await stream.aclose()


async def test_the_route_streams_what_a_key_may_see(control: Control) -> None:
    row, _ = keys.create(control.db, "tuner", ["fine_tuning"], owner="key_test")
    headers = {"x-appliance-key-id": row.id, "x-appliance-scopes": "fine_tuning"}
    assert (await control.http.get(EVENTS, headers=headers)).status_code == 400
    metrics = {"x-appliance-key-id": row.id, "x-appliance-scopes": "metrics"}
    assert (await control.http.get(f"{EVENTS}?stream=true", headers=metrics)).status_code == 403
    hub = control.app.state.live

    async def close_once_told() -> None:
        try:
            async with asyncio.timeout(60):
                while not hub._followers:
                    await asyncio.sleep(0)
                control.db.execute("UPDATE models SET task = 'generate'")
                await control.upload()
                (follower,) = hub._followers
                while follower.waiting or not any("files" in changes for _, changes in hub._rounds):
                    await asyncio.sleep(0.01)
        finally:
            hub.close()

    closing = asyncio.ensure_future(close_once_told())
    answer: httpx.Response = await control.http.get(f"{EVENTS}?stream=true", headers=headers)
    await closing
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert "event: reload" in answer.text and '"files":' in answer.text and "models" not in answer.text
