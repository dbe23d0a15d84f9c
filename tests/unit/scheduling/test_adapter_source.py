"""An engine asks for an adapter that is in neither shared memory nor the library on disk."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from appliance.controller.engines.versions import AdapterSource
from serve.core.adapter_source import AdapterUnavailable, brought_in
from tests.unit.weights.conftest import check, write
from weights.format.errors import VersionLeased
from weights.format.names import Name

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
