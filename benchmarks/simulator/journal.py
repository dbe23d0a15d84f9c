"""An in-memory journal for simulations and for tests of the loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from scheduler.handover.effects import HandoverState, StepRecord


@dataclass(frozen=True, slots=True)
class HandoverRecord:
    id: int
    reason: str
    state: Literal["running"] | HandoverState
    started_s: float
    asked_by: str
    asked_for: str
    ended_s: float | None = None
    steps: tuple[StepRecord, ...] = ()
    error: str = ""


class MemoryJournal:
    """A journal in memory, without durable writes."""

    def __init__(self, keep: int = 1000) -> None:
        self._records: dict[int, HandoverRecord] = {}
        self._last_id, self._keep = 0, keep

    def last_id(self) -> int:
        return self._last_id

    def begin(self, handover_id: int, reason: str, started_s: float, asked_by: str, asked_for: str) -> None:
        self._records[handover_id] = HandoverRecord(handover_id, reason, "running", started_s, asked_by, asked_for)
        self._last_id = max(self._last_id, handover_id)
        oldest = next(iter(self._records))
        if len(self._records) > self._keep and self._records[oldest].state != "running":
            del self._records[oldest]

    def step(self, handover_id: int, record: StepRecord) -> None:
        old = self._records[handover_id]
        steps = {step.seq: step for step in old.steps} | {record.seq: record}
        self._records[handover_id] = replace(old, steps=tuple(steps[seq] for seq in sorted(steps)))

    def end(self, handover_id: int, state: HandoverState, ended_s: float, error: str = "") -> None:
        self._records[handover_id] = replace(self._records[handover_id], state=state, ended_s=ended_s, error=error)

    def unfinished(self) -> list[int]:
        return [record.id for record in self._records.values() if record.state == "running"]

    def since(self, handover_id: int) -> tuple[HandoverRecord, ...]:
        return tuple(record for number, record in sorted(self._records.items()) if number > handover_id)
