"""Versions that engines are about to load, and how long they are held for them."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from appliance.controller.engines.versions import AdapterSource, VersionProvider
from serve.core.adapter_source import AdapterUnavailable, brought_in
from tests.unit.weights.conftest import check, write
from weights.format.errors import VersionLeased
from weights.format.names import Name
from weights.memory.store import WeightStore

GB = 10**9


@pytest.fixture
async def provider(db, store, tiers, flow, add_model):
    """Two models, both on disk and evicted from memory; the budget has room for one of them."""
    add_model()
    add_model("other")
    nbytes = write(store, "v1").nbytes
    write(store, "v1", model="other")
    await flow.run_once("disk")
    store.evict(1 << 40)
    store.budget_bytes = nbytes * 3 // 2
    return VersionProvider(db, store, tiers, None, None, None)


async def test_what_a_sleeping_engine_served_makes_room_for_another_model(provider, store: WeightStore):
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


async def test_it_is_held_until_all_engines_that_it_was_brought_in_for_have_it(provider, store: WeightStore):
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
    """An adapter whose copies in shared memory and on disk are gone."""
    add_model()
    add_adapter(TUNED.model)
    write(store, TUNED.version, model=TUNED.model, kind="adapter")
    for tier in ("disk", "remote"):
        await flow.run_once(tier)
    assert store.evict(1 << 40) > 0
    shutil.rmtree(tmp_path / "data/models")
    await flow.run_once("disk")
    assert tiers.tiers_of(TUNED) == ["remote"]


async def test_it_comes_back_from_the_tier_that_has_it_and_stays_while_the_engine_takes_it(source, only_remote, store):
    async with brought_in(source, "ft:x@step-2", 10) as path:
        found = store.find(*TUNED)
        assert path == str(found.path)
        check(store, found)
        with pytest.raises(VersionLeased):
            store.remove(found)
    await asyncio.sleep(0)
    while store.evict(1 << 40) == 0:
        await asyncio.sleep(0.001)  # the box lets go when it sees the end of the connection


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("ft:x@step-9", "not an adapter of this box"),
        ("starter@v1", "not an adapter of this box"),
        ("", "not an adapter"),
        ("ft:x@step-1", "in no tier"),
    ],
)
async def test_what_no_tier_has_is_refused_with_the_reason(source, only_remote, asked, told):
    with pytest.raises(AdapterUnavailable, match=told):
        async with brought_in(source, asked, 10):
            pass
