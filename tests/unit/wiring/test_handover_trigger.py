"""Who asked for a hand-over."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.wiring.handover_trigger import HandoverTrigger
from appliance.wiring.journal import SqliteJournal
from scheduler.handover.journal import HandoverRecord

BY_HAND = {"schedule": None, "since_s": 1.0, "window": None, "kind": "auto"}
NIGHT = {"schedule": "0 22 * * *", "since_s": 9.0, "window": "win_1", "kind": "train"}


def test_the_newest_ask_that_is_not_settled_is_why_devices_move():
    status = {"settled": 3, "policy": BY_HAND}
    trigger = HandoverTrigger(lambda: status)
    assert trigger.now() == {"asked_by": "scheduler", "asked_for": "demand and queue"}
    trigger.note(4, "ops", "mode train")
    trigger.note(5, "alice", "pause of ftjob-1")
    assert trigger.now() == {"asked_by": "alice", "asked_for": "pause of ftjob-1"}
    status["settled"] = 5
    assert trigger.now()["asked_by"] == "scheduler", "what happens after it settled is not theirs"
    trigger.note(6, "", "mode serve")
    assert trigger.now() == {"asked_by": "box", "asked_for": "mode serve"}


def test_a_window_asks_once_each_time_it_begins():
    status = {"settled": 0, "policy": NIGHT}
    trigger = HandoverTrigger(lambda: status)
    assert trigger.now() == {"asked_by": "window win_1", "asked_for": "mode train"}
    assert trigger.now()["asked_by"] == "scheduler"
    status["policy"] = {**NIGHT, "since_s": 10.0}
    assert trigger.now()["asked_by"] == "window win_1"


def test_the_journal_keeps_who_asked_to_the_end(tmp_path):
    with Database(tmp_path / "a.db") as db:
        journal = SqliteJournal(db, lambda: {"asked_by": "ops", "asked_for": "mode train"})
        journal.begin(HandoverRecord(1, "mode train: …", "running", 10.0))
        journal.end(1, "failed", 12.0, "the engine died")
        row = db.execute("SELECT detail FROM handovers").fetchone()
        assert row["detail"] == '{"asked_by":"ops","asked_for":"mode train","error":"the engine died"}'
