"""Runs of jobs: snapshots, checkpoints, base versions and policies."""

import shutil
from types import SimpleNamespace

import pytest

from appliance.controller.interfaces.errors import OperationFailed
from appliance.controller.scheduling.job_runs import JobRuns
from appliance.store import jobs, keys, models
from appliance.store.rows import JobJudgeRow, VersionRow
from scheduler.loop.cluster_state import Inbox
from tests.unit.scheduling.fakes import NO_ROUTING
from tests.unit.scheduling.test_tier_flow import damage, snapshot
from tests.unit.weights.conftest import check, write
from weights.format.layout import Layout, TensorSpec
from weights.format.names import Name, policy_name
from weights.memory.lease import StoredVersion


@pytest.fixture
def runs(db, events, store, tmp_path, tiers):
    jobs_dir, follower = tmp_path / "data" / "jobs", SimpleNamespace(follow=lambda: None)
    (jobs_dir / "ftjob-1").mkdir(parents=True)
    return JobRuns(db, store, jobs_dir, tmp_path / "shm", events, tiers, NO_ROUTING, Inbox(), follower)


async def test_newest_snapshot_is_read_from_memory_or_else_from_tiers(runs, flow, store, add_job, tmp_path, tiers):
    add_job(phase="running")
    assert runs.newest_snapshot("ftjob-1") is None
    snapshot(store, 9)
    newest = snapshot(store, 10)
    assert runs.newest_snapshot("ftjob-1") == newest.path
    for tier in ("disk", "remote"):
        await flow.run_once(tier)
    assert tiers.tiers_of(Name("snapshot", "ftjob-1", "step-10")) == ["memory", "disk", "remote"]
    assert tiers.tiers_of(Name("snapshot", "ftjob-1", "step-9")) == ["memory"], "one is kept"
    shutil.rmtree(tmp_path / "data" / "snapshots")
    runs.taken("ftjob-1")
    for stored in store.list("snapshot"):
        store.remove(stored)
    again = runs.newest_snapshot("ftjob-1")
    assert again is not None and again.name == newest.path.name
    assert StoredVersion.read(again).manifest.meta["step"] == 10


async def test_snapshot_is_not_evicted_before_ranks_read_it(runs, flow, store, add_job):
    add_job(phase="running")
    snapshot(store, 53)
    await flow.run_once("disk")
    path = runs.newest_snapshot("ftjob-1")
    assert store.evict(10**9) == 0 and StoredVersion.read(path).manifest.meta["step"] == 53
    runs.taken("ftjob-1")
    runs.taken("ftjob-1")  # a cancelled start releases the snapshot a second time
    assert store.evict(10**9) > 0 and not path.exists()


def published(step):
    told = {"version": f"step-{step}", "path": f"/shm/step-{step}", "step": step, "bytes": 9, "epoch": step / 2}
    return {"event": "published", **told}


def steps(db):
    """Steps of all checkpoints in the database."""
    return [int(version.removeprefix("step-")) for _, _, version in models.checkpoint_names(db)]


@pytest.mark.parametrize("publish", ["checkpoints", "best"])
async def test_publish_keeps_three_checkpoints_and_used_ones(runs, db, add_model, add_job, publish):
    add_model()
    row = add_job(phase="running", resolved={"publish": publish})
    name, removed = row.output_model, []

    async def remove(version):
        removed.append(version.version)

    async def unload(names):
        pass

    jobs.insert_judge(db, JobJudgeRow(add_job("ftjob-2").id, {"teacher": f"{name}:ckpt-step-2"}))
    for step in (2, 6, 8, 8, 10, 12):
        runs.on_event("ftjob-1", published(step))
    kept = steps(db)
    assert kept == [2, 8, 10, 12] and [one.version for one in models.list_versions(db, name)] == [
        f"step-{step}" for step in kept
    ]
    assert not removed, "the bytes follow"
    await runs.tidy(unload, remove)
    assert removed == ["step-6"]
    runs.on_event("ftjob-1", published(4))  # the job resumed from an earlier step
    await runs.tidy(unload, remove)
    assert steps(db) == [2, 8, 10, 12] and removed[1:] == ["step-4"]


RESOLVED = {"publish": "end", "full": False, "lora_publish": "adapter"}


def test_job_trains_base_version_of_its_start(runs, db, add_model, add_job, tmp_path):
    add_model()
    for version in ("v1", "v2"):
        (tmp_path / "bytes" / version).mkdir(parents=True)
    models.update_version(db, "starter", "v1", disk_path=str(tmp_path / "bytes" / "v1"))
    add_job(resolved={**RESOLVED, "base_version": "v1"})
    first = runs.spec("ftjob-1", "cpu")
    assert (first.base_model, first.base_version) == ("starter", "v1") and first.base_path.endswith("v1")
    models.insert_version(db, VersionRow("starter", "v2", "", 1, 1.0, disk_path=str(tmp_path / "bytes" / "v2")))
    models.activate(db, "starter", "v2")
    assert runs.spec("ftjob-1", "cpu") == first
    jobs.update(db, "ftjob-1", estimate={"memory": {"limit_bytes": 99}})
    assert runs.spec("ftjob-1", "cpu").shm_budget_bytes == 99


async def test_job_without_access_to_its_model_does_not_start(runs, db, add_model, add_job, tmp_path):
    add_model()
    (tmp_path / "bytes").mkdir()
    models.update_version(db, "starter", "v1", disk_path=str(tmp_path / "bytes"))
    models.unshare(db, "starter", models.EVERYBODY)
    models.share(db, "starter", "mallory")
    key, _ = keys.create(db, "mallory", ["fine_tuning"])
    add_job(resolved=RESOLVED, key_id=key.id, owner="mallory")
    assert runs.spec("ftjob-1", "cpu").base_model == "starter"
    models.unshare(db, "starter", "mallory")
    with pytest.raises(LookupError, match="not shared with the job's owner any more"):
        runs.spec("ftjob-1", "cpu")
    with pytest.raises(LookupError):
        await runs.prepare("ftjob-1")


async def test_base_damaged_on_disk_is_loaded_from_the_next_tier(runs, flow, store, db, add_model, add_job, tmp_path):
    add_model()
    write(store, "v1")
    for tier in ("disk", "remote"):
        await flow.run_once(tier)
    add_job(resolved=RESOLVED)
    store.evict(1 << 40)
    on_disk = tmp_path / "data" / "models" / "starter" / "v1"
    await runs.prepare("ftjob-1")
    assert runs.spec("ftjob-1", "cpu").base_path == str(on_disk), "whole, and there is no need to read it in"
    runs._verified.clear()  # as in a restarted controller
    damage(on_disk / "model.safetensors")
    await runs.prepare("ftjob-1")
    check(store, store.find("version", "starter", "v1"))
    assert runs.spec("ftjob-1", "cpu").base_path == str(store.find("version", "starter", "v1").path)


def test_job_on_an_adapter_trains_the_merged_base(runs, db, add_model, add_adapter, add_job, tmp_path):
    add_model()
    add_adapter("ft:a")
    for model, version in (("starter", "v1"), ("ft:a", "step-2")):
        (tmp_path / "bytes" / version).mkdir(parents=True)
        models.update_version(db, model, version, disk_path=str(tmp_path / "bytes" / version))
    add_job(resolved=RESOLVED | {"lora_publish": "merged"})
    jobs.update(db, "ftjob-1", model="ft:a")
    spec = runs.spec("ftjob-1", "cpu")
    assert (spec.base_model, spec.base_version) == ("ft:a", "step-2")
    assert spec.base_path.endswith("v1") and spec.base_adapter.endswith("step-2") and spec.published_kind == "version"
    models.delete_version(db, "starter", "v1")
    with pytest.raises(LookupError, match="the base of ft:a, was deleted"):
        runs.spec("ftjob-1", "cpu")


LAYOUT = Layout.plan([TensorSpec("a", "F32", (2,))], stem="adapter_model")
OURS, USERS = policy_name("ftjob-1"), "ft:starter:acme::1"


@pytest.fixture
def trained(runs, add_job):
    add_job(phase="running", resolved={"publish": "end", "options": {"staleness": 1}})
    return runs


def write_policy(store, model, version):
    with store.reserve(LAYOUT, kind="adapter", model=model, version=version) as draft:
        draft.commit(meta={})


def left(store):
    return [stored.version for stored in store.list("adapter", OURS)]


async def test_tidy_policies_of_running_job_keeps_newest_three(trained, store):
    write_policy(store, USERS, "step-1")
    # Ranks that resume from an earlier snapshot count steps from that snapshot, so 2 to 4 are newer than 8 and 9.
    written = [f"step-{step}.old" for step in (8, 9)] + [f"step-{step}.new" for step in (2, 3, 4)]
    unloaded = []

    async def unload(names):
        unloaded.extend(names)

    for version in written:
        write_policy(store, OURS, version)
    await trained._tidy_policies(unload)
    assert left(store) == written[2:] and len(store.list("adapter", USERS)) == 1
    assert unloaded == [f"{OURS}@{version}" for version in written[:2]]


async def test_policies_of_an_ended_job_are_removed_when_unused(trained, store, db):
    write_policy(store, OURS, "step-2.new")
    jobs.set_phase(db, "ftjob-1", "failed")

    async def busy(names):
        raise OperationFailed("its requests run", code="adapter_in_use")

    async def unload(names):
        pass

    await trained._tidy_policies(busy)
    assert left(store)
    with store.lease(store.find("adapter", OURS, "step-2.new")):
        await trained._tidy_policies(unload)
    assert left(store)
    await trained._tidy_policies(unload)
    assert not left(store)
