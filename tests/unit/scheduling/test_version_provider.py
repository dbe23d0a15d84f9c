"""Versions that engines are about to load, and how long they are held for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from appliance.controller.engines.versions import VersionProvider
from tests.unit.weights.conftest import check, write
from weights.checkpoint.errors import OpeningRefused
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


async def test_what_may_not_be_opened_reaches_no_engine(provider, store: WeightStore, monkeypatch):
    def refuse(folder: Path, model: str) -> None:
        raise OpeningRefused(model, "config.json", "has 'auto_map'")

    monkeypatch.setattr("appliance.controller.engines.versions.may_open", refuse)
    with pytest.raises(LookupError, match=r"config.json: has 'auto_map'.*appliance model rm starter"):
        await provider.in_memory("starter", "v1")
    assert store.find("version", "starter", "v1") is not None and store.evict(1 << 40) > 0
    assert not provider.holds(Name("version", "starter", "v1"))
