"""Shared memory that others fill at the worst moment costs a snapshot, not the job."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.train_support.specs import host_spec
from tests.unit.train.test_deepspeed_contract import engine_of, steps, world_of_one  # noqa: F401
from train.data.packing import StepPlan
from train.state import saving as saving_module
from train.state.cadence import Cadence
from train.state.saving import Saving
from weights.format.errors import StoreFull
from weights.memory import draft
from weights.memory.store import WeightStore


@pytest.fixture
def run(tmp_path):
    """What writes the snapshots of a run, on its engine after two steps, and what it told."""
    engine = engine_of(1, "fp32")
    steps(engine, 2)
    spec = host_spec(run_dir=str(tmp_path))
    store, told = WeightStore(tmp_path / "store", budget_bytes=None), []
    signals = SimpleNamespace(snapshot=True, suspend=False)

    def emit(event, **data):
        told.append((event, data))

    plan = StepPlan(n_packs=4, batch_size=1, micro_batch=1, n_epochs=1, seed=0)
    saving = Saving(spec, store, engine, plan, emit, signals, None)
    saving._make_room = lambda: None  # a thread that is not looked at here
    return saving, store, told


def test_a_snapshot_whose_manifest_finds_no_room_is_left_out(run, monkeypatch):
    saving, store, told = run

    def full(directory_fd, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(draft, "_write_manifest", full)
    saving.snapshot_if_room(2, 0, 0.0)
    saving.finish()
    assert [event for event, _ in told] == ["message"]
    assert "no snapshot at step 2, the next is tried in 5 s" in told[0][1]["text"] and told[0][1]["level"] == "warn"
    assert store.list("snapshot") == [] and store.usage().draft_bytes == 0, "it is given back"
    monkeypatch.undo()
    saving.snapshot_if_room(2, 0, 0.0)
    saving.finish()
    assert [event for event, _ in told] == ["message", "snapshot"] and store.list("snapshot", "j")


def test_what_else_goes_wrong_at_the_commit_ends_the_world(run, monkeypatch):
    saving, _, _ = run

    def broken(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    saving.snapshot_if_room(2, 0, 0.0)
    monkeypatch.setattr(draft, "_write_manifest", broken)
    with pytest.raises(OSError, match="Input/output"):
        saving.finish()


def test_not_even_a_directory_is_no_room_either(run, monkeypatch):
    saving, _, told = run

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StoreFull):
        saving._reserve_snapshot(2, "d")
    saving.snapshot_if_room(2, 0, 0.0)
    saving.finish()
    assert [event for event, _ in told] == ["message"]


def test_a_version_of_an_epoch_without_room_is_left_out_and_training_goes_on(run, monkeypatch):
    """It ended the world, which went on from its last snapshot."""
    saving, _, told = run
    saving.spec = replace(saving.spec, batch_size=2)
    saving._progress = SimpleNamespace(enter=lambda phase: None)
    refused = StoreFull(needed_bytes=2, used_bytes=1, budget_bytes=1, free_bytes=0)

    def refuse(*_, **__):
        raise refused

    monkeypatch.setattr(saving_module, "begin_publish", refuse)
    monkeypatch.setattr(saving_module, "fingerprint", lambda engine: None)
    saving.publish_if_room(2, 0.0)
    saving.finish()
    assert [event for event, _ in told] == ["message"] and told[0][1]["level"] == "warn"
    assert told[0][1]["text"] == f"the version of step 2, epoch 1, is not published: {refused}"


def test_what_is_due_is_wished_for(run):
    saving, _, _ = run
    saving._signals.snapshot = False
    saving._cadence = Cadence(None, lambda: 0.0)
    saving.foresee(3)
    assert not saving._signals.snapshot
    saving._cadence = Cadence(0.001, iter(range(9)).__next__)
    saving.foresee(3)
    assert saving._signals.snapshot
    saving.drop_reserved()


def test_what_a_world_began_with_is_there_until_it_has_something_newer(run):
    """A first step that was left, or had no samples yet, had it removed for a draft of the same step: the job started
    over."""
    saving, store, told = run
    saving.snapshot_if_room(2, 0, 0.0)
    saving.finish()
    (kept,) = store.list("snapshot", "j")
    saving.began_at, saving._signals.suspend, saving._signals.snapshot = 2, True, True
    saving.foresee(2)
    assert saving.reserved(2) == 0
    saving.snapshot_if_room(2, 0, 0.0)
    saving.finish()
    assert store.list("snapshot", "j") == [kept] and not saving._signals.snapshot
    assert [event for event, _ in told] == ["snapshot"]
    saving.foresee(3)
    assert saving.reserved(3), "the next one is foreseen"
    saving.drop_reserved()
