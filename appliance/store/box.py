"""Facts about the box itself, by name: its mode, cordoned devices, when it started. Values are JSON. Also holds the
scheduler's journal, which stores each step before and after the step runs."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from appliance.store.database import Database
from appliance.store.rows import HANDOVERS, HandoverRow
from scheduler.handover.effects import HandoverState, StepRecord


def get(db: Database, name: str, default: Any = None) -> Any:
    found = db.value("SELECT value FROM box WHERE name = ?", [name])
    return default if found is None else json.loads(found)


def put(db: Database, name: str, value: Any) -> None:
    db.execute("INSERT OR REPLACE INTO box VALUES (?, ?)", [name, json.dumps(value, separators=(",", ":"))])


class SqliteJournal:
    """Implements `scheduler.handover.effects.Journal` in the database.

    ended: {outcome: (number of hand-overs that ended since this process began, their total seconds)}.
    """

    def __init__(self, db: Database):
        self._db = db
        self.ended: defaultdict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))

    def last_id(self) -> int:
        return self._db.value("SELECT max(id) FROM handovers") or 0

    def begin(self, handover_id: int, reason: str, started_s: float, asked_by: str, asked_for: str) -> None:
        HANDOVERS.insert(self._db, HandoverRow(handover_id, reason, started_s, asked_by, asked_for))

    def step(self, handover_id: int, record: StepRecord) -> None:
        with self._db.transaction():
            steps = [step for step in HANDOVERS.get(self._db, handover_id).steps if step["seq"] != record.seq]
            steps = sorted([*steps, asdict(record)], key=lambda step: step["seq"])
            HANDOVERS.update(self._db, handover_id, steps=steps)

    def end(self, handover_id: int, state: HandoverState, ended_s: float, error: str = "") -> None:
        HANDOVERS.update(self._db, handover_id, state=state, ended_s=ended_s, error=error)
        count, seconds = self.ended[state]
        self.ended[state] = count + 1, seconds + ended_s - HANDOVERS.get(self._db, handover_id).started_s

    def unfinished(self) -> list[int]:
        return self._db.column("SELECT id FROM handovers WHERE ended_s IS NULL ORDER BY id")

    def steps_since(self, handover_id: int) -> list[StepRecord]:
        rows = HANDOVERS.list_all(self._db, "id > ?", handover_id)
        return [StepRecord(**step) for row in rows for step in row.steps]
