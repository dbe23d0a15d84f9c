"""Tier flow copies versions and snapshots to tiers, reads them back for engines, and survives failures."""

import asyncio
import shutil
from unittest.mock import AsyncMock

import pytest

from appliance.controller.engines.versions import AdapterSource, LibraryOps, VersionProvider
from appliance.store import jobs, models
from appliance.store.rows import TIER_REMOVALS, VersionRow
from appliance.tiers.tiers import TierFlow
from serve.core.adapter_source import AdapterUnavailable, brought_in
from tests.unit.weights.conftest import check, write
from weights.format.config import KeepRules
from weights.format.errors import VersionLeased
from weights.format.layout import Layout, TensorSpec
from weights.format.names import Name
from weights.memory.lease import take_lease
from weights.memory.store import WeightStore
from weights.tiers.copies import verify

V1 = Name("version", "starter", "v1")


@pytest.fixture
def publish(db, store, add_model):
    """Return a function that commits versions of `starter` to shared memory, as publishing does."""
    add_model(version="v0")

    def made(*versions):
        for version in versions:
            models.insert_version(db, VersionRow("starter", version, "job", 10, float(version[1:])))
            yield write(store, version)

    return lambda *versions: list(made(*versions))


def snapshot(store, step, job="ftjob-1"):
    with store.reserve(
        Layout.plan([TensorSpec("master.w", "F32", (400,))]), kind="snapshot", model=job, version=f"step-{step}"
    ) as draft:
        draft.view("master.w")[:] = bytes([step]) * 1600
        return draft.commit(meta={"step": step})


def versions(tier):
    return {name.version for name in tier.copies.manifests() if name.kind == "version"}


def put_off(tiers, tier):
    return next(status for status in tiers.status() if status["name"] == tier)


async def passes(flow, *tiers):
    for tier in tiers:
        await flow.run_once(tier)


def damage(path):
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)


async def test_flow_copies_published_version_to_every_tier_once(flow, publish, db, tmp_path, tiers):
    (stored,) = publish("v1")
    assert tiers.tiers_of(V1) == ["memory"]
    await passes(flow, "disk", "remote")
    assert tiers.tiers_of(V1) == ["memory", "disk", "remote"]
    row = models.find_version(db, "starter", "v1")
    assert row.disk_path == str(tmp_path / "data/models/starter/v1") and not stored.pinned
    written = {p: p.stat().st_mtime_ns for p in (tmp_path / "mount/objects").rglob("*") if p.is_file()}
    await passes(flow, "disk", "remote")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "mount/objects").rglob("*") if p.is_file()} == written
    status = put_off(tiers, "remote")
    assert status["versions"] == 1 and status["backlog"] == 0 and status["bytes"] > 0 and status["last_error"] is None


async def test_in_memory_falls_back_to_remote_if_disk_is_damaged(flow, publish, db, store, tmp_path, caplog, tiers):
    (stored,) = publish("v1")
    models.activate(db, "starter", "v1")
    await passes(flow, "disk", "remote")
    assert store.evict(1 << 40) > 0 and tiers.tiers_of(V1) == ["disk", "remote"]
    damage(tmp_path / "data/models/starter/v1/model.safetensors")
    provider = VersionProvider(db, store, tiers, None, None, None)
    path = await provider.in_memory("starter", "v1")
    check(store, store.find(*V1))
    assert path == stored.path and provider.holds(V1)
    assert not (tmp_path / "data/models/starter/v1").exists(), "the damaged copy is gone"
    told = put_off(tiers, "disk")
    assert told["damaged"] == 1 and told["last_error"] in caplog.text
    assert "to write it again; the remote tier has a good one" in told["last_error"]
    assert f"{tmp_path}/data/models/starter/v1/model.safetensors" in caplog.text
    await passes(flow, "disk")
    verify(tmp_path / "data/models/starter/v1")


async def test_flow_with_lost_mount_continues_and_retries(flow, publish, store, tmp_path, tiers):
    publish("v1")
    await passes(flow, "disk", "remote")
    shutil.move(tmp_path / "mount", tmp_path / "elsewhere")
    (tmp_path / "mount").mkdir()  # the directory without its mount is empty
    publish("v2")
    await passes(flow, "disk", "remote")
    status = put_off(tiers, "remote")
    assert "mounted" in status["last_error"] and list((tmp_path / "mount").iterdir()) == []
    assert tiers.tiers_of(Name("version", "starter", "v2")) == ["memory", "disk"]
    (tmp_path / "mount").rmdir()
    shutil.move(tmp_path / "elsewhere", tmp_path / "mount")
    await passes(flow, "remote")
    assert tiers.tiers_of(Name("version", "starter", "v2")) == ["memory", "disk", "remote"]


async def test_flow_leaves_location_of_another_box_untouched(flow, publish, db, tiers):
    publish("v1")
    await passes(flow, "remote")
    await passes(TierFlow(db, tiers, owner="box-2"), "remote")
    assert "belongs to box 'box-1'" in put_off(tiers, "remote")["last_error"]


async def test_flow_with_full_disk_still_copies_to_remote(flow, publish, store, tiers):
    (stored,) = publish("v1")
    disk = tiers.disk.copies
    disk._free_bytes = 1 << 60
    await passes(flow, "disk", "remote")
    status = put_off(tiers, "disk")
    assert status["backlog"] == 1 and status["backlog_bytes"] == stored.nbytes and "free" in status["last_error"]
    assert tiers.tiers_of(V1) == ["memory", "remote"]
    assert not await flow.finish(), "the box must not give shared memory back"
    disk._free_bytes = 0
    assert await flow.finish() and put_off(tiers, "disk")["backlog"] == 0


async def test_keep_rules_never_remove_needed_versions(flow, publish, db, tmp_path, tiers):
    publish(*(f"v{n}" for n in range(1, 7)))
    models.activate(db, "starter", "v1")
    await passes(flow, "disk", "remote")
    remote = tiers.all[1]
    remote.version_rules = KeepRules(keep_last=2)
    await passes(flow, "remote")
    assert versions(remote) == {"v1", "v5", "v6"}
    assert len(list((tmp_path / "data/models/starter").iterdir())) == 6, "each tier has its own rules"
    await passes(flow, "remote")
    assert versions(remote) == {"v1", "v5", "v6"}, "nothing goes to and fro"


async def test_forget_removes_version_when_tier_returns(flow, publish, db, store, tmp_path):
    (stored,) = publish("v1")
    await passes(flow, "disk", "remote")
    shutil.move(tmp_path / "mount", tmp_path / "elsewhere")
    models.delete_version(db, "starter", "v1")
    store.remove(stored)
    flow.forget(V1)
    await passes(flow, "disk", "remote")
    assert (
        len(TIER_REMOVALS.list_all(db, "tier = ?", "remote")) == 1
        and TIER_REMOVALS.list_all(db, "tier = ?", "disk") == []
    )
    shutil.move(tmp_path / "elsewhere", tmp_path / "mount")
    await passes(flow, "remote")
    assert TIER_REMOVALS.list_all(db, "tier = ?", "remote") == []
    assert [path.name for path in (tmp_path / "mount").rglob("*") if path.is_file()] == ["owner"]


async def test_flow_copies_snapshots_and_removes_them_with_job(flow, store, db, add_job, tiers):
    add_job(phase="running")
    kept = [snapshot(store, step) for step in (1, 2, 3)]
    await passes(flow, "disk")
    for stored in kept:
        store.remove(stored)
    await passes(flow, "remote")  # copied from disk: memory no longer has the snapshots
    newest = Name("snapshot", "ftjob-1", "step-3")
    assert tiers.tiers_of(newest) == ["disk", "remote"] and list(tiers.snapshots_of("ftjob-1")) == [newest]
    again = tiers.bring_in(newest)
    with store.lease(again) as lease:
        assert bytes(lease.view("master.w")) == bytes([3]) * 1600
    store.remove(again)
    jobs.set_phase(db, "ftjob-1", "cancelled")
    await passes(flow, "disk", "remote")
    assert not tiers.snapshots_of("ftjob-1") and put_off(tiers, "remote")["bytes"] == 0


async def test_bring_in_keeps_last_copy_even_if_damaged(flow, publish, store, tmp_path, tiers):
    publish("v1")
    await passes(flow, "disk")
    store.evict(1 << 40)
    damage(tmp_path / "data/models/starter/v1/model.safetensors")
    with pytest.raises(LookupError, match="damaged in the disk tier"):
        tiers.bring_in(V1)
    assert (tmp_path / "data/models/starter/v1/model.safetensors").exists(), "a person may want to look at it"


async def test_remove_of_version_with_readers_leaves_weights_to_eviction(flow, publish, store):
    (stored,) = publish("v1")
    library = type("Library", (), {"remove": lambda self, name, version: True})()
    lease = take_lease(stored)
    rows = [VersionRow("starter", "v1", "job", 10, 1.0)]
    told = AsyncMock()
    ops = LibraryOps(library, store, flow, lambda name: None, told)
    await ops.remove("starter", rows)
    assert store.find(*V1) and store.evict(1 << 40) == 0
    lease.release()
    assert store.evict(1 << 40) > 0 and store.find(*V1) is None
    told.assert_awaited_once_with([V1])


@pytest.fixture
async def provider(db, store, tiers, flow, add_model):
    """A provider for two models on disk; the memory budget has space for one of the models."""
    add_model()
    add_model("other")
    nbytes = write(store, "v1").nbytes
    write(store, "v1", model="other")
    await flow.run_once("disk")
    store.evict(1 << 40)
    store.budget_bytes = nbytes * 3 // 2
    return VersionProvider(db, store, tiers, None, None, None)


async def test_in_memory_evicts_version_of_sleeping_engine(provider, store: WeightStore):
    first = await provider.in_memory("starter", "v1")
    assert store.evict(1 << 40) == 0, "the engine has not come to load it yet"
    provider.taken("starter", "v1")
    await provider.in_memory("other", "v1")
    provider.taken("other", "v1")
    assert store.find("version", "starter", "v1") is None and not first.exists()
    assert provider.holds(Name("version", "starter", "v1")), "retention still knows that an engine is served from it"
    check(store, store.find("version", "other", "v1"))
    again = await provider.in_memory("starter", "v1")
    assert again == first and store.evict(1 << 40) == 0


async def test_version_in_memory_is_leased_until_all_engines_loaded_it(provider, store: WeightStore):
    paths = await asyncio.gather(provider.in_memory("starter", "v1"), provider.in_memory("starter", "v1"))
    assert paths[0] == paths[1]
    provider.taken("starter", "v1")
    with pytest.raises(LookupError, match="no room for"):
        await provider.in_memory("other", "v1")
    provider.taken("starter", "v1")
    await provider.in_memory("other", "v1")
    assert store.find("version", "starter", "v1") is None
    provider.taken("other", "v1")
    assert not provider._leases, "nothing stays of the versions that a job makes in each step"


TUNED = Name("adapter", "ft:x", "step-2")


@pytest.fixture
async def source(db, store, tmp_path, tiers):
    made = AdapterSource(tmp_path / "s", db, store, tiers)
    await made.start()
    yield str(tmp_path / "s")
    await made.stop()


@pytest.fixture
async def only_remote(store, flow, add_model, add_adapter, tmp_path, tiers):
    """Add an adapter whose weights are only in the remote tier."""
    add_model()
    add_adapter(TUNED.model)
    write(store, TUNED.version, model=TUNED.model, kind="adapter")
    for tier in ("disk", "remote"):
        await flow.run_once(tier)
    assert store.evict(1 << 40) > 0
    shutil.rmtree(tmp_path / "data/models")
    await flow.run_once("disk")
    assert tiers.tiers_of(TUNED) == ["remote"]


async def test_brought_in_adapter_is_leased_while_engine_loads(source, only_remote, store):
    async with brought_in(source, "ft:x@step-2", 10) as path:
        found = store.find(*TUNED)
        assert path == str(found.path)
        check(store, found)
        with pytest.raises(VersionLeased):
            store.remove(found)
    await asyncio.sleep(0)
    while store.evict(1 << 40) == 0:
        await asyncio.sleep(0.001)  # wait: the box releases the lease when the connection ends


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("ft:x@step-9", "not an adapter of this box"),
        ("starter@v1", "not an adapter of this box"),
        ("", "not an adapter"),
        ("ft:x@step-1", "no tier has"),
    ],
)
async def test_brought_in_unavailable_adapter_names_reason(source, only_remote, asked, told):
    with pytest.raises(AdapterUnavailable, match=told):
        async with brought_in(source, asked, 10):
            pass
