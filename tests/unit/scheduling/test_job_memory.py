"""A job that has not begun waits while shared memory has no room for its result."""

from __future__ import annotations

import pytest

from appliance.controller.models.capacity import BoxFacts
from appliance.controller.scheduling.state_store import JobMemory
from appliance.store.objects import jobs
from scheduler.plan.queue import allot
from tests.unit.scheduling.fakes import states_of
from train.plan.auto import DatasetStats, ModelStats, resolve
from weights.format.layout import Layout, TensorSpec
from weights.memory.store import WeightStore

MB = 10**6
RESOLVED = resolve({"full": True}, DatasetStats(100, 9000, 100), ModelStats(1_000_000, 2048, device_kind="cpu"), 8)


@pytest.fixture
def store(tmp_path):
    return WeightStore(tmp_path / "store", budget_bytes=20 * MB)


def hold(store, nbytes):
    draft = store.reserve(Layout.plan([TensorSpec("w", "U8", (nbytes,))]), kind="version", model="m", version="v")
    return draft.commit(meta={})


def test_it_waits_with_the_numbers_and_begins_when_room_is_given_back(db, events, store, add_model, add_job):
    add_model(params=1_000_000)  # 2 MB of result and 12 MB of snapshot
    add_job("ftjob-new", resolved=RESOLVED)
    room = JobMemory(db, store, BoxFacts(8, "cpu", 10**9, store.budget_bytes, 20 * MB))
    states = states_of(db, events, job_memory=room)
    served = hold(store, 10 * MB)
    (view,) = states.load(free_devices=0).jobs
    assert "need 14.0 MB, 10.0 MB can be allocated now" in view.lacks
    queue = allot([view], 8, 0.0, 0.0, "", {"n0": 8})
    assert queue.sizes == {} and queue.waiting == {"ftjob-new": view.lacks}
    store.remove(served)
    (view,) = states.load(free_devices=0).jobs
    assert view.lacks == "" and allot([view], 8, 0.0, 0.0, "", {"n0": 8}).sizes == {"ftjob-new": 8}


def test_a_job_that_has_begun_is_never_sent_back(db, store, add_model, add_job):
    add_model(params=1_000_000)
    add_job("ftjob-runs", phase="running", resolved=RESOLVED)
    add_job("ftjob-moved", phase="suspended", resolved=RESOLVED, snapshot={"step": 3, "path": "/p"})
    room = JobMemory(db, store, BoxFacts(8, "cpu", 10**9, store.budget_bytes, 20 * MB))
    hold(store, 19 * MB)
    assert [room.waits_for(jobs.get(db, job_id)) for job_id in ("ftjob-runs", "ftjob-moved")] == ["", ""]


def test_what_a_job_takes_follows_the_devices_that_it_may_run_on(db, events, store, add_model, add_job):
    add_model(params=1_000_000)
    add_job("ftjob-new", resolved=RESOLVED)
    memory = JobMemory(db, store, BoxFacts(8, "cpu", 10**9, store.budget_bytes, 20 * MB))
    needs = memory.host_bytes(jobs.get(db, "ftjob-new"))
    assert list(needs) == [1, 2, 4, 8] and needs[8] - 14 * MB == pytest.approx(8 * (needs[1] - 14 * MB), rel=0.1)
    jobs.update(db, "ftjob-new", allowed_sizes=[1, 2])
    assert memory.host_bytes(jobs.get(db, "ftjob-new")) == {size: needs[size] for size in (1, 2)}
    states = states_of(db, events, job_sizes=lambda row: (1, 8))
    (view,) = states.load(free_devices=0).jobs
    assert view.sizes == (1,) and allot([view], 8, 0.0, 0.0, "", {"n0": 8}).sizes == {"ftjob-new": 1}
