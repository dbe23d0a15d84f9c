"""Events of a rank are numbered and kept until acknowledged, also for the next listener."""

import ast
import asyncio
from pathlib import Path

import pytest

import train
from runtime.errors import SupervisorDied
from train.control.group import Group, PingLimits, RankHost


class Child:
    """A fake forked rank, driven by the test."""

    def __init__(self, arguments, env):
        self.name, self.pid, self.alive, self.says, self.starved = "rank", 1, True, asyncio.Queue(), False
        self.arguments, self.env = arguments, env

    def how_it_ended(self):
        return "was ended by SIGKILL"

    async def next_event(self):
        return await self.says.get()

    async def call(self, method, timeout_s=None, **args):
        return {"phase": "step", "step": 0, "in_phase_s": 0.0}

    def kill(self):
        if self.alive:
            self.alive = False
            self.says.put_nowait(None)

    async def kill_and_wait(self):
        self.kill()

    def say(self, event, **data):
        self.says.put_nowait({"event": event, **data})


@pytest.fixture
def children(monkeypatch):
    made = []

    async def spawn(_socket, _entry, arguments, *, env, **__):
        made.append(Child(arguments, env))
        return made[-1]

    monkeypatch.setattr("train.control.group.Child.spawn", spawn)
    return made


@pytest.fixture
async def ranks(children, tmp_path):
    """Hosts and children of two ranks of a group."""
    hosts = [RankHost(str(tmp_path / "warm.sock"), str(tmp_path)) for _ in range(2)]
    for rank, host in enumerate(hosts):
        await host.start({"job_id": "j", "device_kind": "cpu"}, rank, 2, "abc", "cpu")
    return list(zip(hosts, children, strict=True))


async def ended(group):
    async with asyncio.timeout(10):
        return await group.wait()


async def test_rank_events_are_kept_until_acknowledged(ranks):
    one, child = ranks[0]
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
    assert (await one.status())["job_id"] == "j"
    await one.kill()
    assert (await one.status())["job_id"] == "", "cleared: nobody adopts it any more"


async def test_ranks_meet_at_private_file_and_use_loopback(ranks, tmp_path):
    (one, child), (_, other) = ranks
    meeting = tmp_path / "worlds" / "abc"
    assert child.arguments["meeting"] == other.arguments["meeting"] == str(meeting)
    assert meeting.parent.stat().st_mode & 0o777 == 0o700
    assert "MASTER_ADDR" not in child.env, "torch's store listens on all interfaces"
    assert child.env["GLOO_SOCKET_IFNAME"] == "lo"
    meeting.touch()
    await one.kill()
    assert not meeting.exists(), "a world dies as one, and leaves nothing"


def test_collectives_never_pickle():
    """torch's object collectives unpickle, and so run code of the sender."""
    found = [
        f"{path.name}:{node.lineno} {node.attr}"
        for path in Path(train.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.endswith(("_object", "_object_list", "_objects"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "last, rank, code, blame",
    [
        ({"type": "StoreFull", "message": "no room"}, 1, "StoreFull", "own"),
        ({"type": "RuntimeError", "message": "connection closed"}, 0, "rank_died", "outside"),
    ],
    ids=["own error", "symptom"],
)
async def test_group_blames_the_rank_with_its_own_error(monkeypatch, ranks, last, rank, code, blame):
    (one, first), (other, second) = ranks

    async def late(after, next_event=other.next_event):
        await asyncio.sleep(0.05)
        return await next_event(after)

    monkeypatch.setattr(other, "next_event", late)
    group = Group()
    await group.adopt("j", [one, other])
    first.says.put_nowait(None)
    second.say("fatal", **last)
    error = (await ended(group)).error
    assert (error.rank, error.code, error.blame) == (rank, code, blame)


async def test_group_blames_the_first_of_equal_failures(ranks):
    (one, first), (other, second) = ranks
    group = Group()
    await group.adopt("j", [one, other])
    second.say("fatal", type="RuntimeError", message="CUDA error: device-side assert triggered")
    await asyncio.sleep(0.01)
    first.say("fatal", type="RuntimeError", message="connection closed by peer")
    assert (await ended(group)).error.rank == 1


@pytest.mark.parametrize("starved, blame", [(None, "outside"), (False, "outside"), (True, "memory")])
async def test_group_does_not_blame_job_for_killed_rank(monkeypatch, ranks, starved, blame):
    one, child = ranks[0]

    async def lost(after):
        raise SupervisorDied("rank:n0/1", "its process was killed")

    if starved is None:
        monkeypatch.setattr(one, "next_event", lost)
    child.starved = bool(starved)
    child.says.put_nowait(None)
    group = Group()
    await group.adopt("j", [one])
    error = (await ended(group)).error
    assert error.blame == blame and error.retryable


async def test_group_reports_end_if_kill_of_host_fails(monkeypatch, ranks):
    one, _ = ranks[0]

    async def lost() -> None:
        raise RuntimeError("the machine ran out of memory")  # any error; otherwise a suspend could wait forever

    monkeypatch.setattr(one, "kill", lost)
    group = Group()
    await group.adopt("j", [one])
    async with asyncio.timeout(60):
        outcome = await group.kill()
    assert (outcome.outcome, outcome.error.code, outcome.error.blame) == ("failed", "killed", "outside")


@pytest.mark.parametrize("whole", [True, False], ids=["dead", "incomplete"])
async def test_adopt_of_ended_ranks_reads_steps_once(ranks, whole):
    one, child = ranks[0]
    child.say("ready", step=0)
    for step in range(1, 6):
        child.say("metrics", step=step)
    if whole:
        await child.kill_and_wait()
    steps = []
    group = Group(lambda event: steps.append(event["step"]) if event["event"] == "metrics" else None)
    await group.adopt("j", [one], whole=whole)
    outcome = await ended(group)
    assert steps == [1, 2, 3, 4, 5]
    assert (outcome.outcome, outcome.step, outcome.error.blame, child.alive) == ("failed", 5, "outside", False)


async def test_late_ready_of_another_rank_does_not_lower_the_step(ranks):
    (one, first), (other, second) = ranks
    group = Group()
    await group.adopt("j", [one, other])
    first.say("metrics", step=5)
    await asyncio.sleep(0.01)
    second.say("ready", step=0)
    second.say("fatal", type="StoreFull", message="no room")
    first.says.put_nowait(None)
    assert (await ended(group)).step == 5


async def test_group_ends_when_a_phase_lasts_too_long(children, tmp_path):
    limits = PingLimits(ping_every_s=0.0, phase_limit_s=-1.0)
    host = RankHost(str(tmp_path / "warm.sock"), str(tmp_path), limits=limits)
    await host.start({"job_id": "j", "device_kind": "cpu"}, 0, 1, "abc", "cpu")
    assert (await host.next_event(0))["event"] == "hung"
    assert (await host.next_event(1))["event"] == "ended" and not children[0].alive, "without a group too"
    group = Group()
    await group.adopt("j", [host])
    error = (await ended(group)).error
    assert (error.code, error.blame, error.retryable, children[0].alive) == ("rank_hung", "outside", True, False)


async def test_group_waits_for_snapshot_after_error_of_other_rank(ranks):
    (one, first), (other, second) = ranks
    steps = []
    group = Group(lambda event: steps.append(event["step"]) if event["event"] == "snapshot" else None)
    await group.adopt("j", [one, other])
    second.say("fatal", type="StoreFull", message="no room")
    await asyncio.sleep(0.05)
    if first.alive:
        first.say("snapshot", step=2)
        first.say("fatal", type="StoreFull", message="no room")
    assert (await ended(group)).error.code == "StoreFull" and steps == [2]


async def test_group_ends_when_an_event_cannot_be_handled(ranks):
    one, child = ranks[0]

    def full(event):
        if event["event"] == "metrics":
            raise OSError("no space left on device")

    group = Group(full)
    await group.adopt("j", [one])
    child.say("metrics", step=1)
    outcome = await ended(group)
    assert (outcome.outcome, outcome.error.retryable, child.alive) == ("failed", True, False)
