"""Shared memory that others fill at the worst moment costs a snapshot, not the job."""

from __future__ import annotations

import errno

import pytest

from tests.train_support.specs import host_spec
from tests.unit.train.test_deepspeed_contract import engine_of, steps, world_of_one  # noqa: F401
from train.control.rank import Progress, Rank
from train.plan.errors import SnapshotMismatch
from train.state import fragments
from train.state.snapshot import Snapshots, Validations
from weights.memory import store as store_module
from weights.memory.store import WeightStore


@pytest.fixture
def run(world_of_one, tmp_path):  # noqa: F811
    """Writer of the snapshots of a run after two steps, its store and its events."""
    engine = engine_of(1, "fp32")
    steps(engine, 2)
    spec = host_spec(run_dir=str(tmp_path))
    store, told = WeightStore(tmp_path / "store", budget_bytes=None), []

    def emit(event, **data):
        told.append((event, data))

    rank = Rank(spec, store, engine, fragments.grid(engine), emit, Progress())
    return Snapshots(rank, "digest", Validations({1: 0.5}, [1])), store, told


def fail(code):
    def failing(*_, **__):
        raise OSError(code, "cannot write")

    return failing


def test_snapshot_whose_manifest_finds_no_room_is_left_out(run, monkeypatch):
    snapshots, store, told = run
    monkeypatch.setattr(store_module, "write_file", fail(errno.ENOSPC))
    for _ in range(2):
        snapshots.save(2)
    assert [(event, data["level"]) for event, data in told] == [("message", "warn")], "once, not at each try"
    assert store.list("snapshot") == [] and store.usage().draft_bytes == 0, "it is given back"
    monkeypatch.undo()
    snapshots.save(2)
    assert [event for event, _ in told] == ["message", "snapshot"] and store.list("snapshot", "j")
    monkeypatch.setattr(store_module, "write_file", fail(errno.ENOSPC))
    snapshots.save(3)
    assert [event for event, _ in told] == ["message", "snapshot", "message"]


def test_other_error_of_a_commit_ends_the_world(run, monkeypatch):
    monkeypatch.setattr(store_module, "write_file", fail(errno.EIO))
    with pytest.raises(OSError, match="cannot write"):
        run[0].save(2)


def test_read_snapshot_of_other_tokens_is_refused(run):
    snapshots, store, _ = run
    snapshots.save(2)
    (stored,) = store.list("snapshot", "j")
    snapshots._validations = Validations()
    assert snapshots.read(str(stored.path)) == 2 and snapshots._validations == Validations({1: 0.5}, [1])
    snapshots._tokens = "other"
    with pytest.raises(SnapshotMismatch):
        snapshots.read(str(stored.path))
