"""Stores the scheduler's journal in the database: durable before the step, durable after it."""

from __future__ import annotations

from pydantic_core import to_jsonable_python

from appliance.store.database import Database
from appliance.store.records import handovers
from appliance.store.rows import HandoverRow, HandoverStepRow, columns
from scheduler.handover.ports import HandoverRecord, HandoverState, StepRecord


class SqliteJournal:
    """Implements `scheduler.handover.ports.Journal`. Hand-over numbers are the rows' ids as text."""

    def __init__(self, db: Database):
        self._db = db

    def last_id(self) -> int:
        newest = handovers.page(self._db, limit=1).data
        return int(newest[0].id) if newest else 0

    def begin(self, record: HandoverRecord) -> None:
        detail = columns(record, "asked_by asked_for")
        row = HandoverRow(str(record.id), record.reason, record.state, record.started_s, detail=detail)
        handovers.insert(self._db, row, [_step_row(record.id, step) for step in record.steps])

    def step(self, handover_id: int, record: StepRecord) -> None:
        handovers.put_step(self._db, _step_row(handover_id, record))

    def end(self, handover_id: int, state: HandoverState, ended_s: float, error: str = "") -> None:
        row = handovers.find(self._db, str(handover_id))
        detail = {**(row.detail if row else {}), **({"error": error} if error else {})}
        handovers.update(self._db, str(handover_id), state=state, ended_s=ended_s, detail=detail)

    def unfinished(self) -> tuple[HandoverRecord, ...]:
        return tuple(self._record(row) for row in handovers.list_open(self._db))

    def since(self, handover_id: int) -> tuple[HandoverRecord, ...]:
        found = (handovers.find(self._db, str(number)) for number in range(handover_id + 1, self.last_id() + 1))
        return tuple(self._record(row) for row in found if row is not None)

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
        detail=to_jsonable_python(dict(step.detail)),
    )


def _step_record(row: HandoverStepRow) -> StepRecord:
    return StepRecord(
        seq=row.position,
        chain=row.arguments["chain"],
        **columns(row, "verb target state started_s ended_s detail"),
        undoes=row.arguments["undoes"],
    )
