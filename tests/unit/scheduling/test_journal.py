"""The journal on the store."""

from __future__ import annotations

from dataclasses import replace

from appliance.controller import retention
from appliance.store.database import Database
from appliance.store.records.journal import SqliteJournal
from scheduler.handover.ports import HandoverRecord, StepRecord

RECORD = HandoverRecord(
    3,
    "mode train",
    "running",
    10.0,
    steps=(StepRecord(0, "free r1", "drain_replica", "r1"), StepRecord(1, "free r1", "sleep_replica", "r1")),
)


def test_what_was_begun_is_found_after_a_restart(tmp_path):
    with Database(tmp_path / "a.db") as db:
        journal = SqliteJournal(db)
        assert journal.last_id() == 0
        journal.begin(RECORD)
        journal.step(3, replace(RECORD.steps[0], state="doing", started_s=11.0))
    with Database(tmp_path / "a.db") as db:
        journal = SqliteJournal(db)
        assert journal.last_id() == 3
        (open_,) = journal.unfinished()
        assert open_.steps[0].state == "doing" and open_.steps[1] == RECORD.steps[1]
        journal.end(3, "undone", 12.0, "the engine died")
        assert journal.unfinished() == ()
        (record,) = journal.since(0)
        assert (record.id, record.state, record.error) == (3, "undone", "the engine died")


def test_numbers_go_on_where_every_handover_was_kept_long_enough(tmp_path):
    with Database(tmp_path / "a.db") as db:
        journal = SqliteJournal(db)
        for number in (1, 2):
            journal.begin(replace(RECORD, id=number))
            journal.end(number, "done", 12.0)
        retention.delete_aged(db, "handovers", 1e9)
        assert journal.last_id() == 2
