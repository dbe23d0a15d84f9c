"""Copies between two nodes of a box, each with its own shared memory; agents run without Ray."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from ray.exceptions import RayActorError

from runtime.errors import CopyFailed
from scheduler.devices.discovery import logical_devices
from scheduler.ray import node as ray_node
from scheduler.ray.node import Node, NodeConfig
from serve.core.adapter_source import AdapterServer, AdapterUnavailable, brought_in
from tests.unit.scheduler.fakes import Handle
from tests.unit.weights.conftest import check, write
from weights.format.errors import VersionLeased
from weights.format.names import Name
from weights.memory.segment import mappings
from weights.memory.store import WeightStore

BASE, SNAPSHOT, TUNED = Name("version", "m", "v1"), Name("snapshot", "job-1", "step-7"), Name("adapter", "ft:m", "s1")


class Gone:
    def __getattr__(self, method: str) -> Any:
        return AsyncMock(side_effect=RayActorError)


class OneNode:
    def __init__(self, folder: Path, name: str):
        for part in ("shm/run/r", "jobs"):
            (folder / name / part).mkdir(parents=True, mode=0o700)
        (folder / name / "shm").chmod(0o700)
        shm = folder / name / "shm"
        devices, jobs = logical_devices(1, name), folder / name / "jobs"
        self.config = NodeConfig(name, "127.0.0.1", devices, shm / "run", folder, shm, (), jobs)
        self.node, self.store = Node(self.config), WeightStore(shm, budget_bytes=None)
        self.agent = Handle(self.node)


@pytest.fixture
def nodes():
    folder = Path(tempfile.mkdtemp(prefix="n-"))  # short, because it contains Unix sockets
    yield OneNode(folder, "n0"), OneNode(folder, "n1")
    mappings.clear()
    shutil.rmtree(folder)


async def test_take_leases_copy_until_holder_takes_another(nodes):
    home, away = nodes
    first, second = write(home.store, "v1", model="m"), write(home.store, "v2", model="m")
    await away.node.take(home.agent, BASE, first.path, "serve m")
    await away.node.take(None, BASE, first.path, "job 1 base")  # already on the node
    check(away.store, away.store.find(*BASE))
    await away.node.take(home.agent, BASE._replace(version="v2"), second.path, "serve m")
    with pytest.raises(VersionLeased):
        away.store.remove(away.store.find(*BASE))  # a job still uses it
    assert await away.node.holds_jobs()
    await away.node.forget_job("1", leases_only=True)
    assert not await away.node.holds_jobs()
    away.store.remove(away.store.find(*BASE))
    with pytest.raises(VersionLeased):
        away.store.remove(away.store.find("version", "m", "v2"))


async def test_forget_removes_copies_unless_an_engine_reads_them(nodes):
    home, away = nodes
    first, tuned = write(home.store, "v1", model="m"), write(home.store, "s1", model="ft:m", kind="adapter")
    await away.node.take(home.agent, BASE, first.path, "serve m")
    lease = await away.node.leased(home.agent, TUNED, tuned.path)
    await away.node.forget([BASE, TUNED, BASE._replace(version="v9")])
    assert away.store.find(*BASE) is None
    assert away.store.find(*TUNED) is not None, "an engine reads it"
    lease.release()
    await away.node.forget([TUNED])
    assert away.store.find(*TUNED) is None
    assert home.store.find(*BASE) is not None


async def test_keep_pins_snapshot_and_removes_old_ones(nodes):
    home, away = nodes
    for step in (3, 7, 10):
        made = write(away.store, f"step-{step}", model="job-1", kind="snapshot")
        path = await home.node.keep(away.agent, SNAPSHOT._replace(version=f"step-{step}"), made.path)
    assert {stored.version for stored in home.store.list("snapshot")} == {"step-7", "step-10"}
    newest = home.store.find("snapshot", "job-1", "step-10")
    assert newest.path == path and newest.pinned
    check(home.store, newest)


async def test_take_from_lost_node_or_of_missing_version_leaves_nothing(nodes):
    home, away = nodes
    with pytest.raises(FileNotFoundError):
        await away.node.take(home.agent, BASE, home.config.shm_root / "versions" / "m" / "v1", "x")
    with pytest.raises(CopyFailed):
        await away.node.take(Handle(Gone()), BASE, home.config.shm_root / "versions" / "m" / "v1", "x")
    with pytest.raises(CopyFailed):
        await away.node.take_job(Handle(Gone()), home.config.jobs_dir / "job-1")
    assert list((away.config.shm_root / "incoming").glob("*")) == list(away.config.jobs_dir.iterdir()) == []


async def test_take_job_copies_its_data_and_tokens(nodes):
    home, away = nodes
    for name in ("train.jsonl", "tokens/key/tokens", "spec.json"):
        (home.config.jobs_dir / "job-1" / name).parent.mkdir(parents=True, exist_ok=True)
        (home.config.jobs_dir / "job-1" / name).write_text(name)
    folder = await away.node.take_job(home.agent, home.config.jobs_dir / "job-1")
    taken = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert taken == {name: name for name in ("train.jsonl", "tokens/key/tokens")}


async def test_engines_on_other_nodes_load_adapters(nodes, monkeypatch):
    home, away = nodes
    agents = {"node:n0": home.agent}
    monkeypatch.setattr(ray_node, "find_actor", agents.get)
    made = write(home.store, TUNED.version, model=TUNED.model, kind="adapter")

    async def bring_in(model, version):
        if (model, version) != TUNED[1:]:
            raise LookupError(f"{model} {version} is not an adapter of this box")
        return home.store.lease(made)

    source = AdapterServer(home.config.adapter_socket, bring_in, (LookupError,))
    await source.start()
    for _ in range(2):  # a restarted controller starts the node again
        await away.node.start()
    async with brought_in(str(away.config.adapter_socket), "ft:m@s1", 10) as path:
        found = away.store.find(*TUNED)
        assert path == str(found.path) and found.path.is_relative_to(away.config.adapters)
        check(away.store, found)
        with pytest.raises(VersionLeased):
            away.store.remove(found)
    with pytest.raises(AdapterUnavailable, match="not an adapter of this box"):
        async with brought_in(str(away.config.adapter_socket), "ft:m@s9", 10):
            pass
    await source.stop()
    while away.store.evict(1 << 40) == 0:
        await asyncio.sleep(0.001)  # the node releases the lease when the connection ends
    agents.clear()
    with pytest.raises(AdapterUnavailable):
        async with brought_in(str(away.config.adapter_socket), "ft:m@s1", 10):
            pass
