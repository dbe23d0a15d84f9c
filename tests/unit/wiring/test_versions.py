"""Versions that engines are about to load, and how long they are held for them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from appliance.config import BoxConfig
from appliance.store.objects import models
from appliance.store.rows import ModelRow, VersionRow
from appliance.wiring.version_provider import VersionShelf
from tests.unit.weights.conftest import check, write
from weights.memory.lease import take_lease
from weights.memory.store import WeightStore
from weights.tiers.record import Name

GB = 10**9


@pytest.fixture
async def shelf(db, store, back, flow, add_model):
    """Two models, both on disk and evicted from memory; the budget has room for one of them."""
    add_model()
    models.insert(db, ModelRow(id="other", kind="base", arch="LlamaForCausalLM", params=5, bytes=10, owned_by="org",
                               source="here", created_s=1.0))  # fmt: skip
    models.insert_version(db, VersionRow("other", "v1", "here", 10, 1.0))
    models.activate(db, "other", "v1")
    nbytes = write(store, "v1").nbytes
    write(store, "v1", model="other")
    await flow.run_once("disk")
    store.evict(1 << 40)
    store.budget_bytes = store._keeper.budget_bytes = nbytes * 3 // 2
    return VersionShelf(db, store, back, None, None)


async def test_what_a_sleeping_engine_served_makes_room_for_another_model(shelf, store: WeightStore):
    """It stayed leased while the engine slept: with room for one model, no other could be served ever after."""
    first = await shelf.in_memory("starter", "v1")
    assert store.evict(1 << 40) == 0, "the engine has not come to load it yet"
    shelf.taken("starter")
    await shelf.in_memory("other", "v1")
    shelf.taken("other")
    assert store.find("version", "starter", "v1") is None and not first.exists()
    assert shelf.holds(Name("version", "starter", "v1")), "retention still knows that an engine is served from it"
    check(store, store.find("version", "other", "v1"))
    again = await shelf.in_memory("starter", "v1")
    assert again == first and store.evict(1 << 40) == 0


async def test_it_is_held_until_all_engines_that_it_was_brought_in_for_have_it(shelf, store: WeightStore):
    paths = await asyncio.gather(shelf.in_memory("starter", "v1"), shelf.in_memory("starter", "v1"))
    assert paths[0] == paths[1]
    shelf.taken("starter")
    with pytest.raises(LookupError, match="no room for"):
        await shelf.in_memory("other", "v1")
    shelf.taken("starter")
    await shelf.in_memory("other", "v1")
    assert store.find("version", "starter", "v1") is None


async def test_what_an_awake_engine_reads_does_not(shelf, store: WeightStore):
    await shelf.in_memory("starter", "v1")
    with take_lease(store.find("version", "starter", "v1")), pytest.raises(LookupError, match="no room for"):
        shelf.taken("starter")
        await shelf.in_memory("other", "v1")
    assert store.find("version", "starter", "v1") is not None


async def test_what_an_engine_takes_of_the_host_is_less_once_its_version_is_in_memory(shelf, db, store):
    models.update(db, "starter", bytes=GB)
    shelf._config, shelf._device = BoxConfig(), SimpleNamespace(kind="cpu")
    assert shelf.host_bytes("starter") == 2 * GB + 256 * 2**20 + 400_000_000  # in shared memory, and its own copy
    await shelf.in_memory("starter", "v1")
    assert shelf.host_bytes("starter") == GB + 256 * 2**20 + 400_000_000
    shelf._device = SimpleNamespace(kind="cuda")
    assert shelf.host_bytes("starter") == 4 * 2**30 and shelf.host_bytes("nobody") == 0
    shelf.taken("starter")
