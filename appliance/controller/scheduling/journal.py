"""Stores the scheduler's journal in the database: durable before the step, durable after it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from appliance.store.database import Database
from appliance.store.errors import RowNotFound
from appliance.store.records import handovers
from appliance.store.rows import HandoverRow, HandoverStepRow, columns
from scheduler.handover.journal import HandoverRecord, HandoverState, StepRecord


class SqliteJournal:
    """Implements `scheduler.handover.journal.Journal`. Hand-over numbers are the rows' ids as text."""

    def __init__(self, db: Database):
        self._db = db

    def last_id(self) -> int:
        newest = handovers.list_recent(self._db, 1)
        return int(newest[0].id) if newest else 0

    def begin(self, record: HandoverRecord) -> None:
        detail = columns(record, "asked_by asked_for")
        row = HandoverRow(str(record.id), record.reason, record.state, record.started_s, detail=detail)
        handovers.insert(self._db, row, [_step_row(record.id, step) for step in record.steps])

    def step(self, handover_id: int, record: StepRecord) -> None:
        row = _step_row(handover_id, record)
        changes = {"state": row.state, "started_s": row.started_s, "ended_s": row.ended_s, "detail": row.detail}
        try:
            handovers.update_step(self._db, row.handover_id, row.position, **changes)
        except RowNotFound:  # a step of an undo, which was not planned
            handovers.insert_step(self._db, row)

    def end(self, handover_id: int, state: HandoverState, ended_s: float, error: str = "") -> None:
        row = handovers.find(self._db, str(handover_id))
        detail = {**(row.detail if row else {}), **({"error": error} if error else {})}
        handovers.update(self._db, str(handover_id), state=state, ended_s=ended_s, detail=detail)

    def unfinished(self) -> tuple[HandoverRecord, ...]:
        return tuple(self._record(row) for row in handovers.list_open(self._db))

    def get(self, handover_id: int) -> HandoverRecord | None:
        row = handovers.find(self._db, str(handover_id))
        return self._record(row) if row is not None else None

    def since(self, handover_id: int) -> tuple[HandoverRecord, ...]:
        found = (self.get(number) for number in range(handover_id + 1, self.last_id() + 1))
        return tuple(record for record in found if record is not None)

    def _record(self, row: HandoverRow) -> HandoverRecord:
        steps = tuple(_step_record(step) for step in handovers.steps(self._db, row.id))
        return HandoverRecord(
            int(row.id), row.reason, row.state, row.started_s, row.ended_s, steps, row.detail.get("error", "")
        )


def _step_row(handover_id: int, step: StepRecord) -> HandoverStepRow:
    return HandoverStepRow(
        handover_id=str(handover_id),
        position=step.seq,
        **columns(step, "verb target state started_s ended_s"),
        arguments={"chain": step.chain, "undoes": step.undoes},
        detail=_plain(step.detail),
    )


def _step_record(row: HandoverStepRow) -> StepRecord:
    return StepRecord(
        seq=row.position,
        chain=row.arguments["chain"],
        **columns(row, "verb target state started_s ended_s detail"),
        undoes=row.arguments["undoes"],
    )


def _plain(value: Any) -> Any:
    """What a verb measured, as JSON: dataclasses become objects, paths text."""
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    if hasattr(value, "__fspath__"):
        return str(value)
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value
