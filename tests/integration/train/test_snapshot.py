"""Snapshots: shared memory that others fill at the worst moment costs one, not the job; and the best validation."""

import errno

import pytest

from tests.integration.train.test_deepspeed_contract import engine_of, steps, world_of_one  # noqa: F401
from tests.train_support.specs import host_spec
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
    store, told = WeightStore(tmp_path / "store", budget_bytes=None), []
    spec, grid = host_spec(run_dir=str(tmp_path)), fragments.grid(engine)
    rank = Rank(spec, store, engine, grid, lambda event, **data: told.append(event), Progress())
    return Snapshots(rank, "digest", Validations({1: 0.5}, [1]), {}), store, told


def fail(code):
    def failing(*_, **__):
        raise OSError(code, "cannot write")

    return failing


def test_save_without_space_for_manifest_is_skipped(run, monkeypatch):
    snapshots, store, told = run
    monkeypatch.setattr(store_module, "write_file", fail(errno.ENOSPC))
    for _ in range(2):
        snapshots.save(2)
    assert told == ["message"], "once, not at each try"
    assert store.list("snapshot") == [] and store.usage().draft_bytes == 0, "it is given back"
    monkeypatch.undo()
    snapshots.save(2)
    assert told == ["message", "snapshot"] and store.list("snapshot", "j")
    monkeypatch.setattr(store_module, "write_file", fail(errno.ENOSPC))
    snapshots.save(3)
    assert told == ["message", "snapshot", "message"]


def test_suspend_without_space_for_manifest_writes_to_disk(run, monkeypatch):
    snapshots, store, told = run
    full, write = fail(errno.ENOSPC), store_module.write_file
    monkeypatch.setattr(
        store_module, "write_file", lambda path, *more: (full if store.root in path.parents else write)(path, *more)
    )
    assert not snapshots.suspend(2).path.startswith(str(store.root)) and told == ["message", "snapshot"]


def test_save_other_commit_error_is_raised(run, monkeypatch):
    monkeypatch.setattr(store_module, "write_file", fail(errno.EIO))
    with pytest.raises(OSError, match="cannot write"):
        run[0].save(2)


def test_read_snapshot_with_other_tokens_is_refused(run):
    snapshots, store, _ = run
    snapshots.save(2)
    (stored,) = store.list("snapshot", "j")
    snapshots._validations = Validations()
    assert snapshots.read(str(stored.path)) == 2 and snapshots._validations == Validations({1: 0.5}, [1])
    snapshots._tokens = "other"
    with pytest.raises(SnapshotMismatch):
        snapshots.read(str(stored.path))


@pytest.mark.parametrize(
    ("key", "values", "best", "since"),
    [
        ("loss", {}, 0, 0),
        ("loss", {0: 0.1, 5: 2.0, 10: 1.5, 15: 1.5, 20: float("nan")}, 10, 2),
        ("loss", {5: 2.0, 10: 1.5, 25: 1.0}, 25, 0),
        ("mean_reward", {5: 0.2, 10: 0.9, 15: 0.5}, 10, 1),
    ],
)
def test_best_step_is_first_of_equals_and_not_base(key, values, best, since):
    found = Validations()
    for step, value in values.items():
        found.add(step, {"loss": 0.0, key: value})
    assert (found.best_step, found.since_best) == (best, since)
