"""Owners' workers: none waits for another's code."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from train.graders import hosts
from train.graders.hosts import MAX_BUSY, MAX_IDLE, GraderHosts


class Host:
    """In place of a worker process."""

    stopped = 0

    async def stop(self) -> None:
        Host.stopped += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> GraderHosts:
    owner = hosts._Owner
    monkeypatch.setattr(hosts, "_Owner", lambda: owner(Host()))  # type: ignore[arg-type]
    Host.stopped = 0
    return GraderHosts()


async def test_what_one_has_graded_for_minutes_keeps_no_other_waiting(made: GraderHosts) -> None:
    end, begun = asyncio.Event(), []

    async def slow(owner: str) -> None:
        async with made.of(owner):
            begun.append(owner)
            await end.wait()

    tasks = [asyncio.create_task(slow("greedy")) for _ in range(2 * MAX_BUSY)]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        for number in range(MAX_BUSY - 1):  # however many of one owner wait, they take one place
            tasks.append(asyncio.create_task(slow(f"owner {number}")))
            await asyncio.sleep(0)
        assert begun == ["greedy", *(f"owner {number}" for number in range(MAX_BUSY - 1))]
        tasks.append(asyncio.create_task(slow("late")))
        await asyncio.sleep(0)
        assert "late" not in begun
        end.set()
        await asyncio.gather(*tasks)
    assert begun.count("greedy") == 2 * MAX_BUSY and "late" in begun


async def test_few_idle_workers_are_kept(made: GraderHosts) -> None:
    used = []
    for number in range(5):
        async with made.of(f"owner {number}") as host:
            used.append(host)
    assert Host.stopped == 5 - MAX_IDLE
    async with made.of("owner 4") as host:
        assert host is used[4]
    async with made.of("owner 0") as host:
        assert host is not used[0]
    await made.stop()
    assert Host.stopped == 6


async def test_a_worker_that_is_wanted_again_is_not_ended(made: GraderHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one idle worker ends, which takes a moment, owners of others come and go."""
    ending, go_on = asyncio.Event(), asyncio.Event()

    async def slow_stop(self: Host) -> None:
        ending.set()
        await go_on.wait()

    async with contextlib.AsyncExitStack() as busy:
        for number in range(MAX_BUSY):
            await busy.enter_async_context(made.of(f"owner {number}"))
        monkeypatch.setattr(Host, "stop", slow_stop)
        for number in range(MAX_BUSY):  # all but the last are idle once `busy` ends; nothing is ended in between
            made._owners[f"owner {number}"].wanted += 1
    for one in made._owners.values():
        one.wanted = 0
    first = asyncio.create_task(made._end_idle())
    await ending.wait()
    kept = list(made._owners)[0]
    async with made.of(kept):
        second = asyncio.create_task(made._end_idle())
        go_on.set()
        await asyncio.gather(first, second)
        assert kept in made._owners


async def test_code_that_takes_long_to_read_keeps_no_other_owner_waiting(
    made: GraderHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker reads the code of all: they went first come, first served, however many requests one owner had."""
    read: list[str] = []

    async def exchange(header: bytes, written: bytes) -> dict[str, Any]:
        read.extend(json.loads(written)["sources"])
        await asyncio.sleep(0)
        return {"unusable": []}

    monkeypatch.setattr(made._reader, "_exchange", exchange)
    owners = ["greedy"] * 5 + ["ann"]
    reading = [asyncio.create_task(made.unusable(owner, {owner: "1"})) for owner in owners]
    assert await asyncio.gather(*reading) == [[]] * 6
    assert read.index("ann") == 1, read
    await made.stop()
