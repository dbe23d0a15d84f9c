"""Groups over supervisors that die: which handles are kept, which ranks adopted, what comes home from other nodes."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError

from scheduler.core.errors import EffectFailed
from scheduler.core.workload import Device
from scheduler.ray import actors, groups
from scheduler.ray.groups import RANK, Groups, ResultTransfer, is_whole
from weights.format.names import Name

START = "j", ("n0/0", "n0/1"), "l1:job:j"
IDLE = {"job_id": "", "rank": 0, "world_size": 0}


class RankHost:
    """The body of a supervisor: a rank that is ready at once and then says nothing. `dead`: what Ray says of it."""

    def __init__(self) -> None:
        self.dead: BaseException | None = None
        self.stopped = False
        self.reported = dict(IDLE)
        self.asked: list[str] = []
        self.killing = asyncio.Event()
        self.killing.set()
        self.died = asyncio.Event()
        self.events = [{"event": "ready", "step": 0}]

    def __getattr__(self, method: str) -> Any:
        body = getattr(type(self), f"do_{method}")

        async def remote(*arguments: Any, **named: Any) -> Any:
            self.asked.append(method)
            if self.stopped:
                await asyncio.Event().wait()
            if self.dead is not None:
                raise self.dead
            return await body(self, *arguments, **named)

        return SimpleNamespace(remote=remote)

    def die(self, error: BaseException) -> None:
        self.dead = error
        self.died.set()

    async def do_life(self) -> dict[str, Any]:
        return {}

    async def do_status(self) -> dict[str, Any]:
        return self.reported

    async def do_start(self, spec, rank, world_size, *_, **__) -> dict[str, Any]:
        self.reported = {"job_id": "j", "rank": rank, "world_size": world_size}
        self.spec = spec
        return {"pid": 7}

    async def do_next_event(self, after: int) -> dict[str, Any]:
        if after < len(self.events):
            return {"number": after + 1, **self.events[after]}
        await self.died.wait()
        if self.dead is not None:
            raise self.dead
        return {"number": after + 1, "event": "ended", "starved": False, "how": "ended"}

    async def do_suspend(self) -> None: ...

    async def do_kill(self) -> None:
        await self.killing.wait()
        self.reported = dict(IDLE)
        self.died.set()


class Box:
    """Two devices, their supervisors by name as Ray would find them, and one job."""

    def __init__(self, monkeypatch) -> None:
        self.alive: dict[str, RankHost] = {}
        self.made = 0
        self.told: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.released: list[str] = []
        here = SimpleNamespace(name="n0", warm_socket=lambda name: "/w", log_dir="/l", numa_nodes=lambda devices: ())
        nodes = SimpleNamespace(
            home=here,
            config_of=lambda ids: here,
            here=self.find_or_make,
            device=lambda device_id: Device(device_id, "n0", int(device_id[-1]), kind="cuda"),
            wait_warm=self.nothing,
            release_job=self.release_job,
        )
        jobs = SimpleNamespace(
            answer=self.nothing,
            prepare=self.nothing,
            spec=lambda job, device_kind: SimpleNamespace(job_id="j", device_kind=device_kind),
            newest_snapshot=lambda job: None,
            taken=lambda job: None,
            on_event=lambda job, event: self.events.append(event),
            will_succeed=self.nothing,
            on_stopped=lambda job: None,
        )
        monkeypatch.setattr("train.control.group.asdict", vars)
        monkeypatch.setattr("train.control.group._GRACE_S", 0.0)
        monkeypatch.setattr(groups, "FRESH_EVERY_S", 0.0)
        monkeypatch.setattr(groups, "actor_names", self.names)
        self.groups = Groups(nodes, jobs, lambda: self.told.append("changed"))

    async def nothing(self, *_: Any) -> None: ...

    async def release_job(self, job_id: str) -> None:
        self.released.append(job_id)

    async def names(self) -> list[str]:
        return list(self.alive)

    def find_or_make(self, body: Any, name: str, *_: Any) -> RankHost:
        if name not in self.alive:
            self.made += 1
            self.alive[name] = RankHost()
        return self.alive[name]

    @property
    def hosts(self) -> list[RankHost]:
        return [self.alive[f"{RANK}n0/{n}"] for n in range(2)]

    def kill(self, error: BaseException) -> None:
        """All supervisors die, and Ray forgets their names."""
        for host in self.hosts:
            host.die(error)
        self.alive.clear()


@pytest.fixture
async def box(monkeypatch):
    one = Box(monkeypatch)
    yield one
    for running in one.groups._groups.values():
        running.watcher.cancel()


@pytest.mark.parametrize("error", [ActorDiedError(), OutOfMemoryError("killed by the memory monitor")])
@pytest.mark.parametrize("verb", ["suspend_group", "stop_group"])
async def test_a_hand_over_of_dead_supervisors_ends_and_the_next_start_has_living_ones(box, error, verb):
    async with asyncio.timeout(60):
        await box.groups.start_group(*START)
        box.kill(error)
        if verb == "suspend_group":
            with pytest.raises(EffectFailed, match="supervisor .* died") as failed:
                await box.groups.suspend_group("j")
            assert failed.value.blame == "outside"
            assert box.told and (await box.groups.observe_groups())[0].ended.blame == "outside"
        await box.groups.stop_group("j")
        assert box.released == ["j"], "its node would wait for the job's copies when it leaves"
        detail = await box.groups.start_group(*START)
        assert detail["snapshot"] is None and box.made == 4


async def test_a_supervisor_that_is_stopped_hides_no_other_and_its_job_stays_as_it_was(box, monkeypatch):
    monkeypatch.setattr(actors, "LOOK_S", 0.01)
    await box.groups.start_group(*START)
    box.hosts[1].stopped = True
    async with asyncio.timeout(60):
        assert [group.job_id for group in await box.groups.observe_groups()] == ["j"]


async def test_one_that_nobody_knows_yet_is_waited_for(box, monkeypatch):
    """After a restart of the controller its devices would look free."""
    monkeypatch.setattr(actors, "ANSWER_S", 0.05)
    monkeypatch.setattr(actors, "LOOK_S", 0.01)
    box.find_or_make(None, f"{RANK}n0/0").stopped = True
    with pytest.raises(EffectFailed, match="rank:n0/0 has not answered"):
        await box.groups.observe_groups()


async def test_ranks_that_are_being_stopped_are_not_adopted(box):
    await box.groups.start_group(*START)
    for host in box.hosts:
        host.killing.clear()
    stopping = asyncio.create_task(box.groups.stop_group("j"))  # the job was cancelled
    while not all("kill" in host.asked for host in box.hosts):
        await asyncio.sleep(0)
    assert await box.groups.observe_groups() == ()
    looking = asyncio.create_task(box.groups.observe_groups())
    await asyncio.sleep(0)
    for host in box.hosts:
        host.killing.set()
    await stopping
    assert await looking == () and box.groups._groups == {} and box.told == []


def status(rank, size=3):
    return {"job_id": "j", "rank": rank, "world_size": size}


@pytest.mark.parametrize(
    "statuses, whole",
    [
        ([status(2), status(0), status(1)], True),
        ([status(0), status(1)], False),  # the controller died before it had started the third
        ([status(0, 1), status(0), status(1)], False),  # two worlds of one job
        ([status(0), status(0), status(1)], False),
    ],
)
def test_a_world_is_whole_when_every_rank_of_it_is_there(statuses, whole):
    assert is_whole(statuses) is whole


@pytest.mark.parametrize("lost", [0, 1], ids=["dead", "incomplete"])
async def test_observe_takes_the_steps_of_ranks_that_died_without_a_controller(box, lost):
    for number in range(2):
        box.find_or_make(None, f"{RANK}n0/{number}")
    for rank, host in enumerate(box.hosts[: 2 - lost]):
        host.reported = status(rank, 2)
        host.events.append({"event": "metrics", "step": 1} if rank == 0 else {"event": "message", "text": ""})
        if not lost:
            host.died.set()
    async with asyncio.timeout(60):
        while not (view := await box.groups.observe_groups())[0].ended:
            await asyncio.sleep(0.01)
    assert [event["step"] for event in box.events if event["event"] == "metrics"] == [1]
    assert (view[0].ended.outcome, view[0].ended.blame, view[0].ended.step) == ("failed", "outside", 1)
    await box.groups.stop_group("j")
    assert await box.groups.observe_groups() == ()


async def test_observe_leaves_out_ranks_of_a_node_that_is_gone(box):
    def gone(*_: Any) -> Any:
        raise EffectFailed("device n1/0 is gone", "outside")

    await box.groups.start_group(*START)
    box.find_or_make(None, f"{RANK}n1/0")  # Ray still lists it
    here = box.groups._nodes.config_of
    box.groups._nodes.config_of = lambda ids: gone() if ids == ("n1/0",) else here(ids)
    assert [group.job_id for group in await box.groups.observe_groups()] == ["j"]


THERE = Path("/dev/shm/there")
SNAPSHOT = {"event": "snapshot", "step": 5, "path": str(THERE / Name("snapshot", "job-1", "step-5").key)}
ADAPTER = str(THERE / Name("adapter", "ft:m:a/b", "step-9").key)
PUBLISHED = {"event": "published", "step": 9, "version": "step-9", "path": ADAPTER}


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


async def test_events_wait_for_what_they_speak_of_and_keep_their_order(nodes):
    told: list[dict] = []
    home = ResultTransfer(nodes, "n1", "job-1", told.append)
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
    home = ResultTransfer(nodes, "n1", "job-1", told.append)
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
