"""What a person learns who asks whether everything is whole: of versions, adapters and snapshots, in every tier."""

from __future__ import annotations

import asyncio

import pytest

from appliance.controller.context.model_files import LibraryOps
from appliance.controller.interfaces.errors import OperationFailed
from appliance.store.rows import VersionRow
from tests.unit.scheduling.test_tier_flow import damage, snapshot
from tests.unit.weights.conftest import check, write
from weights.format.names import Name
from weights.memory.lease import take_lease

ADAPTER = VersionRow("ft:x", "step-2", "test", 1, 0.0, meta={"adapter": {"base": "starter"}})


@pytest.fixture
async def ops(db, flow, store, add_model, add_adapter, add_job, tiers):
    """A base, an adapter on it and a job's snapshot, each in shared memory, on disk and in the remote tier."""
    add_model()
    add_adapter("ft:x")
    add_job("ftjob-1", phase="running")
    write(store, "v1")
    write(store, "step-2", model="ft:x", kind="adapter")
    snapshot(store, 7, checksums=True)
    for tier in ("disk", "remote"):
        await flow.run_once(tier)
    return LibraryOps(None, store, tiers, flow, lambda name: None)


def largest(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("mount", ["in the remote tier"]),
        ("data/snapshots", ["snapshot step-7 of ftjob-1 is damaged in the disk tier"]),
        ("data/models/ft:x", ["adapter step-2 of ft:x is damaged in the disk tier"]),
        ("shm/snapshots", ["snapshot step-7 of ftjob-1 is damaged in the memory tier"]),
    ],
)
async def test_a_damaged_copy_is_named_with_its_tier(ops, tmp_path, where, told, tiers):
    damage(largest(tmp_path / where))
    with pytest.raises(OperationFailed) as failed:
        await ops.verify_tiers(lambda *progress: None)
    assert failed.value.code == "copies_damaged"
    assert all(text in str(failed.value) for text in told), failed.value
    noted = {tier["name"]: tier["last_error"] for tier in tiers.status()() if tier["last_error"]}
    assert list(noted) == [name for name in ("disk", "remote") if f"in the {name} tier" in str(failed.value)]
    assert all("is damaged" in text for text in noted.values())


async def test_what_is_damaged_in_memory_goes_at_once_and_comes_back_whole(ops, store, tiers, tmp_path):
    name = Name("adapter", "ft:x", "step-2")
    damage(largest(tmp_path / "shm/adapters"))
    with take_lease(store.find(*name)), pytest.raises(OperationFailed, match="it is in use and stays"):
        await ops.verify_tiers(lambda *progress: None)
    with pytest.raises(OperationFailed, match="comes from the disk tier when it is needed") as failed:
        await ops.verify_tiers(lambda *progress: None)
    assert str(failed.value).count("is damaged") == 1 and store.find(*name) is None
    check(store, tiers.bring_in(name))
    assert (await ops.verify_tiers(lambda *progress: None))["copies"] == 9


async def test_what_is_read_while_it_is_deleted_goes_when_its_reader_has_gone(db, ops, flow, store, tiers):
    library = type("Library", (), {"remove": lambda self, name, version: True})()
    ops = LibraryOps(library, store, tiers, flow, lambda name: None)
    lease = take_lease(store.find("adapter", "ft:x", "step-2"))
    removing = asyncio.create_task(ops.remove("ft:x", [ADAPTER]))
    await asyncio.sleep(0.1)
    assert not removing.done() and store.find("adapter", "ft:x", "step-2")
    lease.release()
    await removing
    assert store.find("adapter", "ft:x", "step-2") is None


async def test_verify_says_which_file_keeps_a_version_from_being_opened(ops, store):
    folder = store.find("version", "starter", "v1").path
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(OperationFailed, match="pytorch_model.bin") as failed:
        await ops.verify([VersionRow("starter", "v1", "test", 1, 0.0, shm_path=str(folder))], lambda *progress: None)
    assert failed.value.code == "opening_refused"
