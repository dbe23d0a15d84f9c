"""What a job's ranks on another node make is told of when it is at home, in its order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scheduler.core.errors import EffectFailed
from scheduler.ray.groups import ResultTransfer
from weights.format.names import Name

THERE = Path("/dev/shm/there")
SNAPSHOT = {"event": "snapshot", "step": 5, "path": str(THERE / Name("snapshot", "job-1", "step-5").key)}
PUBLISHED = {
    "event": "published",
    "step": 9,
    "version": "step-9",
    "path": str(THERE / Name("adapter", "ft:m:a/b", "step-9").key),
}


def steps(*numbers):
    return [{"event": "metrics", "step": number} for number in numbers]


class Nodes:
    """What a ResultTransfer asks of `ray_nodes.Nodes`."""

    def __init__(self):
        self.lost, self.gate, self.forgotten = set(), asyncio.Event(), []
        self.gate.set()

    async def bring_home(self, node, name, remote):
        await self.gate.wait()
        if name.kind in self.lost:
            raise EffectFailed("node n1 is gone")
        return Path("/dev/shm/home") / remote.relative_to(THERE)

    async def on(self, node, method, job_id, leases_only):
        self.forgotten.append((job_id, leases_only))


@pytest.fixture
def nodes():
    return Nodes()


def coming(nodes, told):
    return ResultTransfer(nodes, "n1", "job-1", told.append)


async def test_events_wait_for_what_they_speak_of_and_keep_their_order(nodes):
    told: list[dict] = []
    home = coming(nodes, told)
    nodes.gate.clear()
    for event in [*steps(4), SNAPSHOT, *steps(5)]:
        home.take(event)
    await asyncio.sleep(0)
    over = asyncio.create_task(home.over(suspended=True))
    await asyncio.sleep(0)
    assert told == steps(4) and not over.done()
    nodes.gate.set()
    assert await over == ""
    assert told == [*steps(4), {**SNAPSHOT, "path": SNAPSHOT["path"].replace("there", "home")}, *steps(5)]
    assert nodes.forgotten == [("job-1", True)]


async def test_snapshots_come_home_as_often_as_that_is_cheap_and_the_last_one_always(nodes):
    told: list[dict] = []
    now = [100.0]
    home = ResultTransfer(nodes, "n1", "job-1", told.append, lambda: now[0])

    async def written(step):
        path = SNAPSHOT["path"].replace("step-5", f"step-{step}")
        home.take({**SNAPSHOT, "step": step, "path": path})
        await asyncio.sleep(0.01)
        return [event["step"] for event in told]

    assert await written(5) == [5], "the first at once"
    now[0] += 1
    assert await written(6) == [5] and await written(7) == [5], "it took no time, and five seconds are the least"
    now[0] += 5
    assert await written(8) == [5, 8]
    now[0] += 1
    assert await written(9) == [5, 8]
    assert await home.over(suspended=True) == "" and [event["step"] for event in told] == [5, 8, 9]


async def test_a_lost_snapshot_is_not_told_of_and_a_lost_result_is_no_success(nodes):
    told: list[dict] = []
    home = coming(nodes, told)
    nodes.lost = {"snapshot", "adapter"}
    for event in (SNAPSHOT, *steps(9)):
        home.take(event)
    home.take(PUBLISHED)
    assert await home.over(suspended=False) == "its version step-9 was not copied home: node n1 is gone"
    assert told == steps(9) and nodes.forgotten == [], "what is nowhere else is not thrown away"


async def test_an_event_that_cannot_be_taken_ends_the_job_instead_of_hanging_it(nodes):
    def refuse(event):
        raise ValueError("no such column")

    home = ResultTransfer(nodes, "n1", "job-1", refuse)
    home.take(*steps(1))
    home.take(*steps(2))
    async with asyncio.timeout(60):
        assert "no such column" in await home.over(suspended=False)
