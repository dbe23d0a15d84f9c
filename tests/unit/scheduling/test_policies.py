"""Models in training leave engines and shared memory once nobody samples from them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from appliance.controller.interfaces.errors import OperationFailed
from appliance.controller.scheduling.job_runs import JobRuns
from scheduler.loop.inbox import Inbox
from tests.unit.scheduling.fakes import NO_ROUTING
from weights.format.layout import Layout, TensorSpec
from weights.format.names import policy_name

LAYOUT = Layout.plan([TensorSpec("a", "F32", (2,))], stem="adapter_model")


def write(store, model, version, kind="adapter"):
    with store.reserve(LAYOUT, kind=kind, model=model, version=version) as draft:
        draft.commit(meta={})


def left(store):
    return sorted((stored.model, stored.version) for stored in store.list("adapter"))


class Engines:
    def __init__(self, busy=()):
        self.unloaded, self.busy = [], set(busy)

    async def unload(self, names):
        if self.busy & set(names):
            raise OperationFailed("its requests run", code="adapter_in_use")
        self.unloaded += names


@pytest.fixture
def tidy(db, events, store, tmp_path, tiers, add_job):
    add_job("ftjob-1", phase="running")
    rollouts = SimpleNamespace(follow=lambda: None)
    runs = JobRuns(db, store, tmp_path, tmp_path / "shm", events, tiers, NO_ROUTING, Inbox(), rollouts)

    async def keep(version):
        raise AssertionError(version)

    return lambda engines: runs.tidy(engines.unload, keep)


async def test_old_versions_and_those_of_jobs_that_are_over_go_from_engines_and_memory(store, tidy):
    ours, over, users = policy_name("ftjob-1"), policy_name("ftjob-2"), "ft:starter:acme::1"
    for model, version in ((users, "step-1"), (ours, "step-1"), (ours, "step-5"), (ours, "step-6"), (over, "step-2")):
        write(store, model, version)
    write(store, over, "step-3", kind="version")
    engines = Engines(busy=[f"{over}@step-2"])
    await tidy(engines)
    assert left(store) == [(ours, "step-5"), (ours, "step-6"), (over, "step-2"), (users, "step-1")]
    assert engines.unloaded == [f"{ours}@step-1"] and not store.list("version")
    engines.busy.clear()
    with store.lease(store.find("adapter", over, "step-2")):
        await tidy(engines)
    assert (over, "step-2") in left(store)
    await tidy(engines)
    assert (over, "step-2") not in left(store)
