"""The host's memory as the box sees it, and what the box does about it; no process is started."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from appliance.memory.box_memory import STARTING_FOR_S, HostMemory, Means
from appliance.memory.memory_policy import CALM_S
from appliance.store.objects import jobs
from appliance.store.records import audit
from scheduler.devices.host_reading import MemoryReading, ask_store, read_memory

GB = 10**9
MEMINFO = "MemTotal: 24000000 kB\nMemFree: 1 kB\nMemAvailable: 8000000 kB\nSwapTotal: 100 kB\nSwapFree: 40 kB\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_group_above_us_counts_with_its_files_as_free(tmp_path: Path):
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


def test_the_older_kind_of_groups_too_seen_from_inside_a_container(tmp_path: Path):
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


class World:
    """A host with as much memory as the test says, a loop that is only asked, and ranks that are only named."""

    def __init__(self) -> None:
        self.now_s, self.reading = 1000.0, MemoryReading(24 * GB, 20 * GB)
        self.replicas: list[dict[str, Any]] = []
        self.jobs: list[dict[str, Any]] = []
        self.nudges, self.enough, self.saved = 0, 0, 0

    def status(self) -> dict[str, Any]:
        return {"replicas": self.replicas, "jobs": self.jobs}

    def nudge(self) -> None:
        self.nudges += 1

    def count(self, what: str) -> None:
        setattr(self, what, getattr(self, what) + 1)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def host(db, store, world: World) -> HostMemory:
    means = Means(
        engine_bytes=lambda model: 2 * GB,
        job_bytes=lambda row: {1: 6 * GB},
        devices=lambda node: 8,
        nudge=world.nudge,
        on_enough=lambda: world.count("enough"),
        save=lambda: world.count("saved"),
    )
    return HostMemory(db, partial(ask_store, store), GB, means, lambda: world.reading, lambda: world.now_s)


async def looks(host: HostMemory, world: World, available: int, seconds: float) -> list[str]:
    """What was done in this time, with so much available all along."""
    world.reading = replace(world.reading, available=available)
    before = len(host.status()["given_back"])
    for _ in range(round(seconds / 0.5)):
        await host.look(world.status())
        world.now_s += 0.5
    return [f"{'+' if one['back'] else '-'}{one['what']}" for one in host.status()["given_back"][before:]]


def waits_for(host: HostMemory, job: Any) -> str:
    """As the box asks when it has no other node."""
    lacking = host.lacks(job)
    if lacking:
        host.want(job)
    return lacking


async def test_a_job_waits_says_why_and_goes_on_by_itself(host, world, db, add_model, add_job):
    add_model()
    add_job("ftjob-1", phase="running")
    add_job("ftjob-2", phase="running")
    world.jobs = [{"id": f"ftjob-{n}", "devices": ["n0/0"], "phase": "running"} for n in (1, 2)]
    assert await looks(host, world, 20 * GB, 5) == [] and world.nudges == 0
    assert await looks(host, world, GB // 2, 2) == ["-job"]
    waits = waits_for(host, jobs.get(db, "ftjob-2"))
    assert waits.startswith("Memory is short (0.5 GB available") and "continues by itself" in waits
    assert waits_for(host, jobs.get(db, "ftjob-1")) == "", "one after the other"
    (note,) = host.notes()
    assert note.startswith("memory is short: 0.5 GB available") and note.endswith("; training waits")
    assert world.saved == 1 and world.nudges > 0 and world.enough == 0
    world.jobs[1] |= {"devices": [], "phase": "suspended"}
    jobs.set_phase(db, "ftjob-2", "suspended")
    assert await looks(host, world, 20 * GB, CALM_S + 1) == ["+job"]
    assert waits_for(host, jobs.get(db, "ftjob-2")) == "" and host.notes() == [] and world.enough == 1
    rows = audit.page(db, after=None, limit=10).data
    assert sorted((row.action, row.target) for row in rows) == [
        ("memory.given", "ftjob-2"),
        ("memory.taken", "ftjob-2"),
    ]
    assert all("available" in row.detail["reason"] for row in rows)


async def test_a_job_is_admitted_against_what_other_programs_leave(host, world, db, add_model, add_job):
    add_model()
    add_job("ftjob-1")
    await looks(host, world, 20 * GB, 0.5)
    assert waits_for(host, jobs.get(db, "ftjob-1")) == ""
    await looks(host, world, 6 * GB, 0.5)
    told = waits_for(host, jobs.get(db, "ftjob-1"))
    assert "Needs about 6.0 GB of host memory; 5.0 GB can be allocated now" in told
    assert told.endswith("It starts by itself when there is enough.")
    jobs.set_phase(db, "ftjob-1", "running")
    assert waits_for(host, jobs.get(db, "ftjob-1")) == "", "who has its memory is not asked again"


async def test_engines_that_start_count_before_their_memory_shows(host, world):
    await looks(host, world, 6 * GB, 0.5)
    assert host.book_engine("chat") and host.book_engine("code") and not host.book_engine("third")
    world.now_s += STARTING_FOR_S
    await looks(host, world, 3 * GB, 0.5)
    assert host.book_engine("third")
