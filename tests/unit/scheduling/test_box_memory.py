"""The home node and joined nodes follow the same memory policy; the tests start no processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.memory.box_memory import STARTING_FOR_S, BoxMemory, Means
from appliance.memory.memory_policy import CALM_S, Holdings, MemoryState, decide
from appliance.store import jobs
from appliance.store.rows import AUDIT
from scheduler.core.errors import EffectFailed
from scheduler.devices.host_reading import MemoryReading, read_memory

GB = 10**9


class World:
    """The home node and a node n1 with memory set by the test; records the actions on n1."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.home = self.away = MemoryReading(24 * GB, 20 * GB)
        self.replicas: list[dict[str, Any]] = []
        self.jobs: list[dict[str, Any]] = []
        self.idle = 0
        self.done: list[tuple[Any, ...]] = []
        self.there, self.fails = True, False

    def status(self) -> dict[str, Any]:
        return {"replicas": self.replicas, "jobs": self.jobs}

    def memory(self) -> dict[str, MemoryReading]:
        return {"n1": self.away} if self.there else {}

    def alike(self) -> tuple[str, ...]:
        return ("n0", "n1") if self.there else ("n0",)

    async def of_store(self, name: str, method: str, *arguments: int) -> Any:
        if self.fails:
            raise EffectFailed("its node died")
        if method == "idle_bytes":
            return self.idle
        self.done.append((method, name))
        freed, self.idle = self.idle, 0
        return freed


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def box(db, store, world: World) -> BoxMemory:
    means = Means(
        engine_bytes=lambda model: 2 * GB,
        job_bytes=lambda row: {1: 6 * GB},
        devices={"n0": 1, "n1": 2}.__getitem__,
        nudge=lambda: None,
    )

    made = BoxMemory(db, store, world, GB, means, lambda: world.home, lambda: world.now_s)
    await made.look(world.status())
    return made


async def pass_by(box: BoxMemory, world: World, seconds: float) -> None:
    for _ in range(round(seconds / 0.5)):
        await box.look(world.status())
        world.now_s += 0.5


def given(db) -> list[tuple[str, str]]:
    """Return audited pairs (action, target) of memory given up or taken back, oldest first."""
    return [(row.action, row.target) for row in AUDIT.page(db, after=None, limit=10).data][::-1]


def short(world: World, available: int = GB // 2) -> None:
    world.away = replace(world.away, available=available)


async def test_job_waits_only_if_no_node_has_memory(box, world, db, add_model, add_job):
    add_model()
    job = add_job("ftjob-1")
    assert box.job_nodes(job) == ("n0", "n1")
    short(world, 3 * GB)
    await box.look(world.status())
    assert box.job_nodes(job) == ("n0",) and box.waits_for(job) == ""
    world.home, world.away = world.away, MemoryReading(24 * GB, 20 * GB)
    await box.look(world.status())
    assert box.job_nodes(job) == ("n1",) and box.waits_for(job) == ""
    short(world, 3 * GB)
    await box.look(world.status())
    assert "Needs about 6.0 GB" in box.waits_for(job) and box.job_nodes(job) == ("n0", "n1")


async def test_memory_shortage_on_n1_releases_memory_in_order_only_there(box, world, db, add_model, add_job):
    add_model()
    for number in (0, 1, 2):
        add_job(f"ftjob-{number}", phase="running", devices=[f"n{min(number, 1)}/{number}"])
    world.jobs = [{"id": f"ftjob-{n}", "devices": [f"n{min(n, 1)}/{n}"], "phase": "running"} for n in (0, 1, 2)]
    world.replicas = [
        {"model": "chat", "state": "open", "devices": ["n1/0"]},
        {"model": "chat", "state": "open", "devices": ["n0/1"]},
        {"model": "code", "state": "asleep", "devices": ["n1/3"]},
        {"model": "code", "state": "asleep", "devices": ["n0/2"]},
    ]
    world.idle = GB // 10
    short(world)
    await pass_by(box, world, 2)
    assert box.max_asleep() == {"n1": 0} and given(db) == [("memory.given", "n1")]
    del world.replicas[2]
    await pass_by(box, world, 3.5)
    assert world.done == [("evict", "n1")]
    assert given(db) == [("memory.given", "n1"), ("memory.given", "ftjob-2")]
    assert box.status()["short"] == "" and "0.5 GB of n1 available" in box.nodes()["n1"]["short"]
    assert box.notes() == ["memory of n1 is short: 0.5 GB available; training waits"]

    assert box.job_nodes(jobs.get(db, "ftjob-2")) == ("n0",), "the last in the queue there leaves for home"
    assert box.job_nodes(jobs.get(db, "ftjob-1")) == ("n0", "n1"), "one after the other"
    assert "n0" in box.job_nodes(jobs.get(db, "ftjob-0")) and box.waits_for(jobs.get(db, "ftjob-0")) == ""

    world.jobs[2] |= {"devices": [], "phase": "suspended"}
    short(world, 20 * GB)
    await pass_by(box, world, 65)
    assert given(db)[2:] == [("memory.taken", "ftjob-2"), ("memory.taken", "n1")]
    assert box.max_asleep() == {} and box.notes() == []
    assert box.job_nodes(jobs.get(db, "ftjob-2")) == ("n0", "n1")


async def test_look_ignores_failing_or_missing_node(box, world, caplog):
    world.fails = True
    short(world)
    await box.look(world.status())
    assert "its node died" in caplog.text
    world.there = False
    await box.look(world.status())
    assert box.nodes() == {} and box.notes() == [] and box.max_asleep() == {}


async def test_book_engine_reserves_memory_for_starting_engines(box, world):
    world.home = replace(world.home, available=6 * GB)
    await box.look(world.status())
    assert [box.book_engine(model, "n0") for model in ("chat", "code", "third")] == [True, True, False]
    world.now_s += STARTING_FOR_S
    await box.look(world.status())
    assert box.book_engine("third", "n0")


def test_decide_resumes_suspended_job_while_another_waits():
    reading, waits = MemoryReading(24 * GB, 10 * GB), Holdings(job_wanted=20 * GB)
    state, action = decide(reading, waits, MemoryState(jobs=("small",)), 0.0, GB)
    assert action is None
    _, action = decide(reading, waits, state, CALM_S, GB)
    assert action is not None and (action.back, action.job) == (True, "small")


def test_decide_between_thresholds_does_nothing():
    """Memory is given up below the reserve and taken back above 1.5 times the reserve, to avoid oscillation."""
    state = MemoryState(jobs=("a",))
    for now_s in range(0, 600, 10):
        state, action = decide(MemoryReading(24 * GB, int(GB * 1.2)), Holdings(), state, now_s, GB)
        assert action is None


MEMINFO = "MemTotal: 24000000 kB\nMemFree: 1 kB\nMemAvailable: 8000000 kB\nSwapTotal: 100 kB\nSwapFree: 40 kB\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_of_tightest_cgroup_counts_its_cache_as_free(tmp_path: Path):
    group = "sys/fs/cgroup/system.slice"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/appliance.service\n",
            "proc/pressure/memory": "some avg10=9.00 avg60=0 total=1\nfull avg10=3.50 avg60=0.00 avg300=0.00 total=5\n",
            f"{group}/appliance.service/memory.max": "max\n",
            f"{group}/appliance.service/memory.current": "5\n",
            f"{group}/appliance.service/memory.stat": "",
            f"{group}/memory.max": f"{10 * GB}\n",
            f"{group}/memory.current": f"{9 * GB}\n",
            f"{group}/memory.stat": f"anon 1\ninactive_file {GB}\nactive_file {GB}\nshmem {GB}\n",
        },
    )
    assert read_memory(root) == MemoryReading(10 * GB, 3 * GB, 3.5, "control group /system.slice", 60 * 1024)


def test_cgroup_v1_limits_are_read_inside_a_container(tmp_path: Path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GB}",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GB}",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GB // 2}\ntotal_active_file 0\n",
        },
    )
    found = read_memory(root)
    assert (found.total, found.available, found.where) == (4 * GB, 3 * GB // 2, "control group /")
