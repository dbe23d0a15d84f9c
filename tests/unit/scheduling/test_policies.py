"""Models in training leave engines and shared memory once nobody samples from them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from appliance.controller.interfaces.errors import OperationFailed
from appliance.controller.scheduling.job_runs import JobRuns
from appliance.store.objects import jobs
from scheduler.loop.cluster_state import Inbox
from tests.unit.scheduling.fakes import NO_ROUTING
from weights.format.layout import Layout, TensorSpec
from weights.format.names import policy_name

LAYOUT = Layout.plan([TensorSpec("a", "F32", (2,))], stem="adapter_model")
OURS, USERS = policy_name("ftjob-1"), "ft:starter:acme::1"


@pytest.fixture
def runs(db, events, store, tmp_path, tiers, add_job):
    add_job(phase="running", resolved={"publish": "end", "options": {"staleness": 1}})
    return JobRuns(
        db,
        store,
        tmp_path / "jobs",
        tmp_path / "shm",
        events,
        tiers,
        NO_ROUTING,
        Inbox(),
        SimpleNamespace(follow=lambda: None),
    )


def write(store, model, version):
    with store.reserve(LAYOUT, kind="adapter", model=model, version=version) as draft:
        draft.commit(meta={})


def left(store):
    return [stored.version for stored in store.list("adapter", OURS)]


async def test_policies_of_a_running_job_keep_the_newest_written(runs, store):
    write(store, USERS, "step-1")
    # A world that resumed from an earlier snapshot counts its steps from there.
    written = [f"step-{step}.old" for step in (8, 9)] + [f"step-{step}.new" for step in (2, 3, 4)]
    unloaded = []

    async def unload(names):
        unloaded.extend(names)

    for version in written:
        write(store, OURS, version)
    await runs._tidy_policies(unload)
    assert left(store) == written[2:] and len(store.list("adapter", USERS)) == 1
    assert unloaded == [f"{OURS}@{version}" for version in written[:2]]


async def test_policies_of_an_ended_job_go_once_nobody_uses_them(runs, store, db):
    write(store, OURS, "step-2.new")
    jobs.set_phase(db, "ftjob-1", "failed")

    async def busy(names):
        raise OperationFailed("its requests run", code="adapter_in_use")

    async def unload(names):
        pass

    await runs._tidy_policies(busy)
    assert left(store)
    with store.lease(store.find("adapter", OURS, "step-2.new")):
        await runs._tidy_policies(unload)
    assert left(store)
    await runs._tidy_policies(unload)
    assert not left(store)
