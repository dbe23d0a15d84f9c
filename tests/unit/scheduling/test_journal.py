"""The journal on the store."""

from __future__ import annotations

from dataclasses import replace

from appliance.controller import retention
from appliance.store.database import Database
from appliance.store.records.journal import SqliteJournal
from appliance.store.rows import HANDOVERS
from scheduler.handover.effects import StepRecord

STEP = StepRecord(0, "free r1", "drain_replica", "r1", started_s=11.0)


def test_journal_after_a_restart_knows_what_was_begun(tmp_path):
    with Database(tmp_path / "a.db") as db:
        journal = SqliteJournal(db)
        assert journal.last_id() == 0
        journal.begin(3, "mode train", 10.0, "ann", "mode train")
        journal.step(3, STEP)
    with Database(tmp_path / "a.db") as db:
        journal = SqliteJournal(db)
        assert journal.last_id() == 3 and journal.unfinished() == [3]
        journal.step(3, replace(STEP, state="failed", ended_s=12.0, detail={"error": "e"}))
        assert journal.steps_since(2) == [replace(STEP, state="failed", ended_s=12.0, detail={"error": "e"})]
        journal.end(3, "undone", 12.0, "the engine died")
        row = HANDOVERS.get(db, 3)
        assert journal.unfinished() == [] and (row.state, row.error) == ("undone", "the engine died")
        retention.delete_records(db, 1e9)
        assert journal.last_id() == 3, "numbers are never used again"
