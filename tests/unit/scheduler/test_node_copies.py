"""What travels between nodes: two nodes of one box, each with its own shared memory, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import errno
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.errors import TunnelRefused
from runtime.network.tunnel import Shared, fetch_directory
from scheduler.devices.discovery import logical_devices
from scheduler.ray import node_copies
from scheduler.ray.node import Node, NodeConfig
from serve.adapters.source import AdapterServer, AdapterUnavailable, brought_in
from tests.unit.weights.conftest import check, write
from weights.format.errors import StoreFull, VersionLeased
from weights.memory.segment import forget_mappings
from weights.memory.store import WeightStore
from weights.tiers.record import Name

BASE, SNAPSHOT, TUNED = Name("version", "m", "v1"), Name("snapshot", "job-1", "step-7"), Name("adapter", "ft:m", "s1")


class OneNode:
    def __init__(self, folder: Path, name: str):
        for part in ("shm/run/r", "jobs"):
            (folder / name / part).mkdir(parents=True, mode=0o700)
        (folder / name / "shm").chmod(0o700)
        (folder / name / "token").write_text("the same on all nodes")
        shm = folder / name / "shm"
        self.config = NodeConfig(
            name,
            "127.0.0.1",
            logical_devices(1, name),
            shm / "run",
            folder,
            shm,
            (),
            folder / name / "token",
            folder / name / "jobs",
        )
        self.node, self.store = Node(self.config), WeightStore(shm, budget_bytes=None)
        self.shared = Shared(self.config.token_path.read_bytes())


@pytest.fixture
def nodes():
    folder = Path(tempfile.mkdtemp(prefix="n-"))  # short, because Unix sockets lie below it
    yield OneNode(folder, "n0"), OneNode(folder, "n1")
    forget_mappings()
    shutil.rmtree(folder)


async def test_a_copy_is_whole_and_stays_for_its_holder_until_that_takes_another(nodes):
    home, away = nodes
    address = await home.node.tunnel_address()
    first, second = write(home.store, "v1", model="m"), write(home.store, "v2", model="m")
    copied = await away.node.take(address, BASE, first.path, "serve m")
    assert copied["bytes"] > first.nbytes
    assert (await away.node.take(address, BASE, first.path, "job 1 base"))["bytes"] == 0, "it is there already"
    check(away.store, away.store.find(*BASE))
    await away.node.take(address, BASE._replace(version="v2"), second.path, "serve m")
    with pytest.raises(VersionLeased):
        away.store.remove(away.store.find(*BASE))  # a job still trains on it
    await away.node.forget_job("1", leases_only=True)
    away.store.remove(away.store.find(*BASE))
    with pytest.raises(VersionLeased):
        away.store.remove(away.store.find("version", "m", "v2"))


async def test_a_copy_of_what_home_has_deleted_goes_whoever_had_it(nodes):
    """A model's weights stayed in the other node's memory for good, leased for the engines that it had there."""
    home, away = nodes
    first, tuned = write(home.store, "v1", model="m"), write(home.store, "s1", model="ft:m", kind="adapter")
    address = await home.node.tunnel_address()
    await away.node.take(address, BASE, first.path, "serve m")
    lease, _ = await away.node.leased(address, TUNED, tuned.path)
    await away.node.forget([BASE, TUNED, BASE._replace(version="v9")])
    assert away.store.find(*BASE) is None
    assert away.store.find(*TUNED) is not None, "an engine reads it"
    lease.release()
    await away.node.forget([TUNED])
    assert away.store.find(*TUNED) is None
    assert home.store.find(*BASE) is not None


async def test_of_shared_memory_nothing_is_lent_but_versions_adapters_and_snapshots(nodes, tmp_path):
    """Beside them lie the gateways' token, and what arrives or is being written."""
    home, away = nodes
    address, shm = await home.node.tunnel_address(), home.config.shm_root
    (shm / "run" / "gateway.token").write_text("of this run")
    for folder in (shm, shm / "run", shm / "staging", shm / "pool"):
        with pytest.raises(TunnelRefused, match="is not below"):
            await fetch_directory(address, away.shared, folder, tmp_path / "copy")
    made = write(home.store, "v1", model="m")
    assert await fetch_directory(address, away.shared, made.path, tmp_path / "copy") > made.nbytes


async def test_what_is_copied_from_here_is_not_written_over_meanwhile(nodes):
    _, away = nodes
    made = write(away.store, SNAPSHOT.version, model=SNAPSHOT.model, kind="snapshot")
    assert made.pinned and await away.node.lend(made.path)
    with pytest.raises(VersionLeased):
        away.store.remove(made)
    await away.node.take_back(made.path, safe=True)
    assert not made.pinned, "home has it"
    away.store.remove(made)
    assert not await away.node.lend(made.path)


async def test_what_comes_home_is_pinned_and_old_snapshots_make_room(nodes):
    home, away = nodes
    address = await away.node.tunnel_address()
    for step in (3, 7, 10):
        made = write(away.store, f"step-{step}", model="job-1", kind="snapshot")
        path, received_bytes = await home.node.keep(address, SNAPSHOT._replace(version=f"step-{step}"), made.path)
        assert received_bytes > made.nbytes
    assert {stored.version for stored in home.store.list("snapshot")} == {"step-7", "step-10"}
    newest = home.store.find("snapshot", "job-1", "step-10")
    assert newest.path == path and newest.pinned
    check(home.store, newest)


async def test_a_snapshot_that_memory_has_no_room_for_goes_to_disk(nodes):
    home, away = nodes
    made = write(away.store, SNAPSHOT.version, model=SNAPSHOT.model, kind="snapshot")
    tight = Node(replace(home.config, budget_bytes=1000))
    path, _ = await tight.keep(await away.node.tunnel_address(), SNAPSHOT, made.path)
    assert path.is_relative_to(home.config.jobs_dir / "job-1" / "snapshots")


async def test_memory_that_fills_up_while_a_copy_arrives_is_named_and_a_snapshot_goes_to_disk(nodes, monkeypatch):
    home, away = nodes
    made = write(away.store, SNAPSHOT.version, model=SNAPSHOT.model, kind="snapshot")
    base = write(away.store, "v1", model="m")
    address = await away.node.tunnel_address()
    fetch = node_copies.fetch_directory

    async def full(address, shared, remote, target, *names):
        received = await fetch(address, shared, remote, target, *names)
        if target.is_relative_to(home.config.shm_root):
            raise OSError(errno.ENOSPC, "No space left on device")
        return received

    monkeypatch.setattr(node_copies, "fetch_directory", full)
    path, _ = await home.node.keep(address, SNAPSHOT, made.path)
    assert path.is_relative_to(home.config.jobs_dir / "job-1" / "snapshots")
    with pytest.raises(StoreFull, match="no room for"):
        await home.node.take(address, BASE, base.path, "serve m")
    for root in (home.config.shm_root, home.config.jobs_dir / "job-1" / "snapshots"):
        assert list((root / "incoming").glob("*")) == []


async def test_only_a_jobs_data_travels(nodes):
    home, away = nodes
    folder = home.config.jobs_dir / "job-1"
    folder.mkdir()
    for name in ("train.jsonl", "valid.jsonl", "events.jsonl"):
        (folder / name).write_text(name)
    there = await away.node.fetch_job(await home.node.tunnel_address(), folder, "job-1")
    assert there == away.config.jobs_dir / "job-1"
    assert sorted(path.name for path in there.iterdir()) == ["train.jsonl", "valid.jsonl"]
    (there / "tokens").mkdir()
    assert await away.node.fetch_job(("127.0.0.1", 1), folder, "job-1") == there, "the second time nothing is asked"
    await away.node.forget_job("job-1", leases_only=False)
    assert list(away.config.jobs_dir.iterdir()) == []


async def test_a_copy_that_fails_leaves_nothing(nodes):
    home, away = nodes
    with pytest.raises(TunnelRefused):
        await away.node.take(
            await home.node.tunnel_address(), BASE, home.config.shm_root / "versions" / "m" / "v1", "x"
        )
    with pytest.raises(TunnelRefused):
        await away.node.fetch_job(await home.node.tunnel_address(), home.config.jobs_dir.parent, "job-1")
    assert list((away.config.shm_root / "incoming").glob("*")) == list(away.config.jobs_dir.iterdir()) == []


async def test_engines_elsewhere_find_adapters(nodes):
    home, away = nodes
    made = write(home.store, TUNED.version, model=TUNED.model, kind="adapter")

    async def bring_in(model, version):
        if (model, version) != TUNED[1:]:
            raise LookupError(f"{model} {version} is not an adapter of this box")
        return home.store.lease(made)

    source = AdapterServer(home.config.adapter_socket, bring_in, (LookupError,))
    await source.start()
    for _ in range(2):  # every engine that starts there asks for it
        await away.node.serve_adapters(await home.node.tunnel_address(), home.config.adapter_socket)
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
        await asyncio.sleep(0.001)  # the node lets go when it sees the end of the connection
    with pytest.raises(AdapterUnavailable, match="went away"):
        async with brought_in(str(away.config.adapter_socket), "ft:m@s1", 10):
            pass
