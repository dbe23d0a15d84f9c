"""Models in training leave engines and shared memory once nobody samples from them."""

from __future__ import annotations

import pytest

from appliance.controller.interfaces.errors import OperationFailed
from appliance.controller.scheduling.job_runs import Policies
from weights.format.layout import Layout, TensorSpec
from weights.format.names import policy_name
from weights.memory.store import WeightStore

LAYOUT = Layout.plan([TensorSpec("a", "F32", (2,))], stem="adapter_model")


@pytest.fixture
def store(tmp_path):
    return WeightStore(tmp_path / "store", budget_bytes=None)


def write(store, model, version):
    with store.reserve(LAYOUT, kind="adapter", model=model, version=version) as draft:
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


async def test_what_is_older_than_the_newest_goes_from_engines_and_memory(store):
    ours, users = policy_name("ftjob-1"), "ft:starter:acme::1"
    write(store, users, "step-1")
    for version in ("step-3.old", "step-2.new", "step-1.new"):
        write(store, ours, version)
    engines = Engines()
    policies = Policies(store, lambda job: True)
    await policies.tidy(engines.unload)  # no question yet: any may be the newest
    assert len(left(store)) == 4
    with policies.sampled("ftjob-1", "step-2.new"):
        pass
    await policies.tidy(engines.unload)
    # What the ranks write next is there before they ask for it; what is a user's stays.
    assert left(store) == [(ours, "step-2.new"), (ours, "step-3.old"), (users, "step-1")]
    assert engines.unloaded == [f"{ours}@step-1.new"]
    with policies.sampled("ftjob-1", "step-4.new"):
        await policies.tidy(engines.unload)
    assert left(store) == [(users, "step-1")]


async def test_with_its_job_the_last_one_goes_and_what_is_in_use_goes_later(store):
    ours = policy_name("ftjob-1")
    write(store, ours, "step-2.new")
    unfinished, engines = {"ftjob-1"}, Engines(busy=[f"{ours}@step-2.new"])
    policies = Policies(store, unfinished.__contains__)
    with policies.sampled("ftjob-1", "step-2.new"):
        await policies.tidy(engines.unload)
    unfinished.clear()
    await policies.tidy(engines.unload)
    assert left(store) == [(ours, "step-2.new")]
    engines.busy.clear()
    with store.lease(store.find("adapter", ours, "step-2.new")):
        await policies.tidy(engines.unload)
    assert left(store)
    await policies.tidy(engines.unload)
    assert left(store) == []
