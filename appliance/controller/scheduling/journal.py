"""Stores the scheduler's journal in the database: durable before the step, durable after it."""

from __future__ import annotations

from pydantic_core import to_jsonable_python

from appliance.store.database import Database
from appliance.store.records import handovers
from appliance.store.rows import HandoverRow, HandoverStepRow, columns
from scheduler.handover.ports import HandoverState, StepRecord


class SqliteJournal:
    """Implements `scheduler.handover.ports.Journal`. Hand-over numbers are the rows' ids as text."""

    def __init__(self, db: Database):
        self._db = db

    def last_id(self) -> int:
        newest = handovers.page(self._db, limit=1).data
        return int(newest[0].id) if newest else 0

    def begin(self, handover_id: int, reason: str, started_s: float, asked_by: str, asked_for: str) -> None:
        detail = {"asked_by": asked_by, "asked_for": asked_for}
        handovers.insert(self._db, HandoverRow(str(handover_id), reason, "running", started_s, detail=detail), [])

    def step(self, handover_id: int, record: StepRecord) -> None:
        row = HandoverStepRow(
            handover_id=str(handover_id),
            position=record.seq,
            **columns(record, "verb target state started_s ended_s"),
            arguments={"chain": record.chain, "undoes": record.undoes},
            detail=to_jsonable_python(dict(record.detail)),
        )
        handovers.put_step(self._db, row)

    def end(self, handover_id: int, state: HandoverState, ended_s: float, error: str = "") -> None:
        row = handovers.find(self._db, str(handover_id))
        detail = {**(row.detail if row else {}), **({"error": error} if error else {})}
        handovers.update(self._db, str(handover_id), state=state, ended_s=ended_s, detail=detail)

    def unfinished(self) -> list[int]:
        return [int(row.id) for row in handovers.list_open(self._db)]

    def steps_since(self, handover_id: int) -> list[StepRecord]:
        numbers = range(handover_id + 1, self.last_id() + 1)
        return [_step_record(row) for number in numbers for row in handovers.steps(self._db, str(number))]


def _step_record(row: HandoverStepRow) -> StepRecord:
    more = columns(row, "verb target state started_s ended_s detail")
    return StepRecord(seq=row.position, **row.arguments, **more)
