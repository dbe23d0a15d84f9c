"""Shared memory that others fill at the worst moment costs a snapshot, not the job."""

from __future__ import annotations

import errno
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.train_support.specs import host_spec
from tests.unit.train.test_deepspeed_contract import engine_of, steps, world_of_one  # noqa: F401
from train.control.progress import Progress
from train.plan.errors import SnapshotMismatch
from train.state import snapshot
from train.trainer import checkpointer as checkpointing
from train.trainer.checkpointer import Checkpointer, Publisher
from weights.format.errors import StoreFull
from weights.memory import draft
from weights.memory.store import WeightStore


@pytest.fixture
def run(world_of_one, tmp_path):  # noqa: F811
    """What writes the snapshots and versions of a run, on its engine after two steps, and what it reported."""
    engine = engine_of(1, "fp32")
    steps(engine, 2)
    spec = host_spec(run_dir=str(tmp_path))
    store, told = WeightStore(tmp_path / "store", budget_bytes=None), []

    def emit(event, **data):
        told.append((event, data))

    checkpointer = Checkpointer(spec, store, engine, "digest", emit, Progress())
    return checkpointer, Publisher(spec, store, engine, emit, Progress()), store, told


def fail(code):
    def failing(*_, **__):
        raise OSError(code, "cannot write")

    return failing


def test_snapshot_whose_manifest_finds_no_room_is_left_out(run, monkeypatch):
    checkpointer, _, store, told = run
    monkeypatch.setattr(draft, "write_file", fail(errno.ENOSPC))
    for _ in range(2):
        checkpointer.save(2)
    assert [(event, data["level"]) for event, data in told] == [("message", "warn")], "once, not at each try"
    assert store.list("snapshot") == [] and store.usage().draft_bytes == 0, "it is given back"
    monkeypatch.undo()
    checkpointer.save(2)
    assert [event for event, _ in told] == ["message", "snapshot"] and store.list("snapshot", "j")
    monkeypatch.setattr(draft, "write_file", fail(errno.ENOSPC))
    checkpointer.save(3)
    assert [event for event, _ in told] == ["message", "snapshot", "message"]


def test_other_error_of_a_commit_ends_the_world(run, monkeypatch):
    monkeypatch.setattr(draft, "write_file", fail(errno.EIO))
    with pytest.raises(OSError, match="cannot write"):
        run[0].save(2)


def test_snapshot_without_room_for_a_directory_is_left_out_and_a_suspension_goes_to_disk(run, monkeypatch, tmp_path):
    checkpointer, _, store, told = run
    mkdir = Path.mkdir

    def full(path, *args, **named):
        if path.is_relative_to(store.root):
            fail(errno.ENOSPC)()
        return mkdir(path, *args, **named)

    monkeypatch.setattr(Path, "mkdir", full)
    checkpointer.save(2)
    assert [event for event, _ in told] == ["message"]
    assert Path(checkpointer.suspend(2).path).is_relative_to(tmp_path / "snapshots")


def test_version_of_an_epoch_without_room_is_left_out(run, monkeypatch):
    _, publisher, _, told = run
    refused = StoreFull(needed_bytes=2, used_bytes=1, budget_bytes=1, free_bytes=0)

    def refuse(*_, **__):
        raise refused

    monkeypatch.setattr(checkpointing, "publish", refuse)
    monkeypatch.setattr(checkpointing, "fingerprint", lambda engine: None)
    publisher.publish_if_room(2, 1.0)
    assert [(event, data["level"]) for event, data in told] == [("message", "warn")]
    with pytest.raises(StoreFull):
        publisher.publish(2, 1.0)


@pytest.mark.parametrize(("tokens", "step"), [({}, 2), ({"tokens": "other"}, None)], ids=["absent", "other"])
def test_read_snapshot_compares_tokens_where_it_has_them(run, monkeypatch, tokens, step):
    checkpointer, _, store, _ = run
    checkpointer.save(2)
    (stored,) = store.list("snapshot", "j")
    del stored.manifest.meta["tokens"]
    stored.manifest.meta.update(tokens)
    monkeypatch.setattr(snapshot, "_stored", lambda path: stored)
    with nullcontext() if step else pytest.raises(SnapshotMismatch):
        read = snapshot.read_snapshot(checkpointer._engine, checkpointer._spec, store, stored.path, "digest")
        assert read == step
