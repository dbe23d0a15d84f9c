"""What is looked for again and again is found without the rows that there may be a hundred thousand of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from appliance.store.database import Database
from appliance.store.objects import (
    adapters,
    files,
    job_records,
    jobs,
    models,
    responses,
    uploads,
)
from appliance.store.records import keys

LOOKS: dict[str, Callable[[Database], Any]] = {
    # 6,000 that had ended, 2,000 of an owner, held the loop for 0.13 s, with each plan of the scheduler.
    "jobs that have not ended": jobs.list_unfinished,
    # Each new job under a name, and each import, read all that have not ended.
    "jobs that are to make a model": lambda db: jobs.unfinished_making(db, "boxer"),
    "copies that jobs have": lambda db: jobs.data_of_unfinished(db, "ann"),
    "jobs that want devices": jobs.any_wants_devices,
    "snapshots to give back": jobs.list_left_snapshots,
    # A key is asked for up to forty times in a request: each time all keys there ever were.
    "a key by its name": lambda db: keys.find(db, "nobody"),
    "jobs whose gate is open": jobs.gated,
    "adapters on a model": lambda db: adapters.list_on(db, "starter"),
    # 6,000 jobs that had ended 0.04 s, with each job that starts; 20,000 versions under one name a second, with each
    # that ends (see below).
    "versions that a job has made": lambda db: models.versions_made_by(db, "boxer", "ftjob-1"),
    "the name of a version": lambda db: job_records.checkpoint_of(db, "model", "v1"),
    # 20,000 files 0.09 s, 500,000 uploads that had ended 0.22 s, with each round of housekeeping.
    "files that have expired": lambda db: files.expired(db, now_s=1.0),
    "uploads to forget": lambda db: uploads.delete_ended(db, 1.0),
}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps of the plans of all that is asked from now on."""
    found: list[str] = []
    execute = Database.execute

    def planned(self: Database, sql: str, parameters: Sequence[Any] = ()) -> Any:
        found.extend(row["detail"] for row in execute(self, f"EXPLAIN QUERY PLAN {sql}", parameters))
        return execute(self, sql, parameters)

    monkeypatch.setattr(Database, "execute", planned)
    return found


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_it_is_found_by_an_index(db: Database, plans: list[str], look: Callable[[Database], Any]):
    plans.clear()
    look(db)
    assert plans
    whole = [step for step in plans if step.startswith("SCAN") and "USING INDEX jobs_left" not in step]
    assert not whole, plans
    assert look is not jobs.list_left_snapshots or any("jobs_left" in step for step in plans)


def test_what_stands_behind_long_texts_is_found_by_an_index_alone(db: Database, plans: list[str]):
    """SQLite goes over all pages of a text for a column behind it: 10,000 responses of a key that was changed for
    another held the loop for 0.15 s with each round of housekeeping;
    an owner's 2,000 ended jobs held it for 0.05 s with each line of a batch whose key has a list of models."""
    plans.clear()
    assert not responses.keys_without_owners(db)
    assert not any(step.startswith("SCAN responses") for step in plans) and any("held" in step for step in plans), plans
    plans.clear()
    assert not jobs.names_made_by(db, "ann")
    assert [step for step in plans if " jobs " in step] == ["SEARCH jobs USING COVERING INDEX jobs_named (owner=?)"] * 2


def test_what_belongs_to_a_job_is_found_without_all_that_stands_beside_it(db: Database, plans: list[str]):
    """200,000 events of a job held the loop for 0.24 s with each job."""
    assert not models.versions_made_by(db, "boxer", "ftjob-1")
    assert any("USING INDEX versions_of_job" in step for step in plans), plans
    plans.clear()
    assert not models.names_of_versions(db, "boxer", 20)
    assert any("versions USING COVERING INDEX" in step for step in plans), plans
