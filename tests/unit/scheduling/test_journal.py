"""The journal on the store."""

from __future__ import annotations

from dataclasses import dataclass, replace

from appliance.controller import retention
from appliance.controller.scheduling.journal import SqliteJournal
from appliance.store.database import Database
from scheduler.handover.ports import HandoverRecord, StepRecord

RECORD = HandoverRecord(
    3,
    "mode train",
    "running",
    10.0,
    steps=(StepRecord(0, "free r1", "drain_replica", "r1"), StepRecord(1, "free r1", "sleep_replica", "r1")),
)


@dataclass
class Report:
    step: int
    seconds: dict


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


def test_undo_steps_are_added_and_details_become_plain(tmp_path):
    with Database(tmp_path / "a.db") as db:
        journal = SqliteJournal(db)
        journal.begin(RECORD)
        undo = StepRecord(
            2,
            "free replica r1",
            "open_replica",
            "r1",
            "done",
            1.0,
            2.0,
            {"report": Report(4, {"copy": 0.5}), "devices": ("n0/0",)},
            undoes=1,
        )
        journal.step(3, undo)
        read = journal.since(2)[0].steps[2]
        assert read.undoes == 1
        assert read.detail == {"report": {"step": 4, "seconds": {"copy": 0.5}}, "devices": ["n0/0"]}
