"""Events of a rank outlive the one who listens: numbered, kept until acknowledged, readable by the next listener."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from runtime.errors import SupervisorDied
from train.control.group import Group, PingLimits
from train.control.rank_host import RankHost
from train.plan.errors import RankFailed
from train.plan.spec import TrainSpec


class Child:
    """A forked rank, driven by the test."""

    def __init__(self, name):
        self.name, self.pid, self.alive, self.says, self.starved = name, 1, True, asyncio.Queue(), False

    async def next_event(self):
        return await self.says.get()

    async def call(self, method, timeout_s=None, **args):
        return {"phase": "step", "step": 0, "in_phase_s": 0.0}

    async def kill_and_wait(self):
        if self.alive:
            self.alive = False
            self.says.put_nowait(None)

    def say(self, event, **data):
        self.says.put_nowait({"event": event, **data})


def host(monkeypatch, tmp_path, **fields):
    made = []

    async def spawn(_socket, _entry, arguments, *, name, env, numa_nodes, **__):
        made.append(Child(name))
        made[-1].arguments = arguments
        made[-1].env, made[-1].numa_nodes = env, numa_nodes
        return made[-1]

    monkeypatch.setattr("train.control.rank_host.Child.spawn", spawn)
    return RankHost(str(tmp_path / "warm.sock"), str(tmp_path), **fields), made


async def test_events_are_kept_until_acknowledged_and_states_for_good(monkeypatch, tmp_path):
    one, made = host(monkeypatch, tmp_path)
    assert (await one.status())["job_id"] == ""
    await one.start({"job_id": "j", "device_kind": "cpu"}, 0, 1, "meeting", "cpu")
    (child,) = made
    child.say("ready", step=0)
    for step in (1, 2, 3):
        child.say("metrics", step=step)
    assert (await one.next_event(0))["event"] == "ready"
    assert (await one.next_event(1))["step"] == 1
    assert (await one.next_event(1))["step"] == 1, "asked again after a lost answer"
    assert (await one.next_event(3))["step"] == 3
    anew = [await one.next_event(0)]
    anew.append(await one.next_event(anew[0]["number"]))
    assert [event["event"] for event in anew] == ["ready", "metrics"] and anew[1]["step"] == 3, "1 and 2 were taken"
    waiting = asyncio.create_task(one.next_event(4))
    child.say("done", outcome="succeeded")
    assert (await waiting)["event"] == "done"
    child.alive = False
    child.says.put_nowait(None)
    assert (await one.next_event(5))["event"] == "ended"
    status = await one.status()
    assert (status["alive"], status["done"], status["job_id"]) == (False, True, "j")
    await one.kill()
    assert (await one.status())["job_id"] == "", "cleared: nobody adopts it any more"


async def started(monkeypatch, tmp_path):
    one, made = host(monkeypatch, tmp_path)
    await one.start({"job_id": "j", "device_kind": "cpu"}, 0, 1, "meeting", "cpu")
    return one, made


@pytest.mark.parametrize(
    "last, rank, code, blame",
    [
        ({"type": "StoreFull", "message": "no room"}, 1, "StoreFull", "own"),
        ({"type": "RuntimeError", "message": "connection closed"}, 0, "rank_failed", "outside"),
    ],
    ids=["own error", "symptom"],
)
async def test_group_blames_the_rank_with_its_own_error(monkeypatch, tmp_path, last, rank, code, blame):
    (one, (first,)), (other, (second,)) = [await started(monkeypatch, tmp_path / name) for name in ("r0", "r1")]

    async def late(after, next_event=other.next_event):
        await asyncio.sleep(0.05)
        return await next_event(after)

    monkeypatch.setattr(other, "next_event", late)
    group = Group(limits=PingLimits(ping_every_s=60))
    await group.adopt("j", [one, other])
    first.says.put_nowait(None)
    second.say("fatal", **last)
    error = (await group.wait()).error
    assert (error["rank"], error["code"], error["blame"]) == (rank, code, blame)


async def test_group_ends_when_its_rank_is_done(monkeypatch, tmp_path):
    one, (child,) = await started(monkeypatch, tmp_path)
    group = Group(limits=PingLimits(ping_every_s=60))
    await group.adopt("j", [one])
    child.say("done", outcome="succeeded", step=3)
    async with asyncio.timeout(10):
        ended = await group.wait()
    assert (ended.outcome, ended.step, child.alive) == ("succeeded", 3, False)


async def test_a_world_meets_at_a_file_of_the_boxes_user_and_talks_over_loopback(monkeypatch, tmp_path):
    ranks = [host(monkeypatch, tmp_path) for _ in range(2)]
    for number, (one, _) in enumerate(ranks):
        await one.start({"job_id": "j", "device_kind": "cpu"}, number, 2, "abc", "cpu")
    child, other = ranks[-1][1]
    assert child.arguments["meeting"] == other.arguments["meeting"] == str(tmp_path / "worlds" / "abc")
    assert (tmp_path / "worlds").stat().st_mode & 0o777 == 0o700
    assert "MASTER_ADDR" not in child.env, "torch's store listens on all interfaces"
    assert child.env["GLOO_SOCKET_IFNAME"] == "lo"
    meeting = tmp_path / "worlds" / "abc"
    meeting.touch()
    await ranks[0][0].kill()
    assert not meeting.exists(), "a world dies as one, and leaves nothing"


async def test_a_host_that_cannot_be_asked_to_kill_does_not_keep_the_end_from_being_told(monkeypatch, tmp_path):
    one, _ = await started(monkeypatch, tmp_path)

    async def lost() -> None:
        raise RuntimeError("the machine ran out of memory")  # whatever it is: a suspend waited for ever for one such

    monkeypatch.setattr(one, "kill", lost)
    group = Group(limits=PingLimits(ping_every_s=60))
    await group.adopt("j", [one])
    async with asyncio.timeout(60):
        ended = await group.kill()
    assert (ended.outcome, ended.error["code"], ended.error["blame"]) == ("failed", "killed", "outside")


@pytest.mark.parametrize("starved, blame", [(None, "outside"), (False, "outside"), (True, "memory")])
async def test_a_rank_that_was_killed_is_not_the_jobs_fault(monkeypatch, tmp_path, starved, blame):
    one, (child,) = await started(monkeypatch, tmp_path)

    async def lost(after):
        raise SupervisorDied("rank:n0/1", "its process was killed")

    if starved is None:
        monkeypatch.setattr(one, "next_event", lost)
    child.starved = bool(starved)
    child.says.put_nowait(None)
    group = Group(limits=PingLimits(ping_every_s=60))
    async with asyncio.timeout(60):
        await group.adopt("j", [one])
        error = (await group.wait()).error
    assert error["blame"] == blame and error["retryable"]


@pytest.mark.parametrize("whole", [True, False], ids=["dead", "incomplete"])
async def test_adopt_of_a_world_that_ended_unwatched_takes_its_steps_once(monkeypatch, tmp_path, whole):
    one, (child,) = await started(monkeypatch, tmp_path)
    child.say("ready", step=0)
    for step in range(1, 6):
        child.say("metrics", step=step)
    if whole:
        await child.kill_and_wait()
    steps = []
    group = Group(lambda event: steps.append(event["step"]) if event["event"] == "metrics" else None)
    await group.adopt("j", [one], whole=whole)
    async with asyncio.timeout(10):
        ended = await group.wait()
    assert steps == [1, 2, 3, 4, 5]
    assert (ended.outcome, ended.step, ended.error["blame"], child.alive) == ("failed", 5, "outside", False)


async def test_events_of_a_rank_are_taken_when_another_one_failed(monkeypatch, tmp_path):
    (one, (first,)), (other, (second,)) = [await started(monkeypatch, tmp_path / name) for name in ("r0", "r1")]
    failed, steps = asyncio.Event(), []

    async def slow(after, next_event=one.next_event):
        await failed.wait()
        return await next_event(after)

    monkeypatch.setattr(one, "next_event", slow)
    monkeypatch.setattr(first, "kill_and_wait", lambda kill=first.kill_and_wait: failed.set() or kill())
    group = Group(lambda event: steps.append(event["step"]) if event["event"] == "metrics" else None)
    await group.adopt("j", [one, other])
    for step in (1, 2):
        first.say("metrics", step=step)
    second.say("fatal", type="StoreFull", message="no room")
    async with asyncio.timeout(10):
        ended = await group.wait()
    assert (ended.error["rank"], ended.error["code"], steps) == (1, "StoreFull", [1, 2])


async def test_group_ends_when_an_event_cannot_be_handled(monkeypatch, tmp_path):
    one, made = host(monkeypatch, tmp_path)

    def full(event):
        if event["event"] == "started":
            raise OSError("no space left on device")

    group = Group(full, PingLimits(ping_every_s=60))
    spec = TrainSpec("j", "/b", "/t", "/r", "/shm", "ft:x", device_kind="cpu")
    starting = asyncio.create_task(group.start(spec, [one], ["cpu"]))
    while not made:
        await asyncio.sleep(0)
    made[0].say("ready", step=0, seconds={"join": 0.0, "prepare": 0.0})
    async with asyncio.timeout(10):
        with suppress(RankFailed):  # all are ready, or it has failed by then
            await starting
        ended = await group.wait()
    assert (ended.outcome, ended.error["retryable"], made[0].alive) == ("failed", True, False)
