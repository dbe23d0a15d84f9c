"""The record of every hand-over, written before and after each step.

A journal write returns when it is durable. The loop needs the journal neither for the current state (it observes) nor
for the wanted state (it plans), but to close what a crash left open, to never reuse a number, and as a history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

StepState = Literal["planned", "doing", "done", "failed", "skipped"]
HandoverState = Literal["running", "done", "undone", "failed"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, or one step of an undo. `seq` numbers the steps of a hand-over from 0; undo steps are appended, and
    their `undoes` names the step whose failure caused them."""

    seq: int
    chain: str
    verb: str
    target: str
    state: StepState = "planned"
    started_s: float | None = None
    ended_s: float | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    undoes: int | None = None


@dataclass(frozen=True, slots=True)
class HandoverRecord:
    """done: every chain reached the wanted state. undone: some chain failed and was undone. failed: some undo failed
    too; later rounds repair the rest. asked_by: a key's name, "box", "window <id>" or "scheduler"; asked_for: what that
    asked for."""

    id: int
    reason: str
    state: HandoverState
    started_s: float
    ended_s: float | None = None
    steps: tuple[StepRecord, ...] = ()
    error: str = ""
    asked_by: str = ""
    asked_for: str = ""


class Journal(Protocol):
    """Where hand-overs are recorded. Only the loop writes."""

    def last_id(self) -> int:
        """The highest hand-over number ever used; 0 if none."""

    def begin(self, record: HandoverRecord) -> None:
        """Durably record a new hand-over with all its planned steps, before the first of them starts."""

    def step(self, handover_id: int, record: StepRecord) -> None:
        """Durably insert or replace the step with this `seq`."""

    def end(self, handover_id: int, state: HandoverState, ended_s: float, error: str = "") -> None:
        """Durably close a hand-over."""

    def unfinished(self) -> tuple[HandoverRecord, ...]:
        """Hand-overs in state "running", oldest first: after a start, those that a crash interrupted."""

    def get(self, handover_id: int) -> HandoverRecord | None: ...

    def since(self, handover_id: int) -> tuple[HandoverRecord, ...]:
        """Those with a higher number, oldest first."""


class MemoryJournal:
    """A journal that lives as long as its object: for the simulator and for tests."""

    def __init__(self, keep: int = 1000) -> None:
        self._records: dict[int, HandoverRecord] = {}
        self._steps: dict[int, dict[int, StepRecord]] = {}
        """Steps by hand-over and `seq`. They are kept apart from the records: a large cluster's hand-over has thousands
        of steps."""
        self._last_id, self._keep = 0, keep

    def last_id(self) -> int:
        return self._last_id

    def begin(self, record: HandoverRecord) -> None:
        self._records[record.id] = replace(record, steps=())
        self._steps[record.id] = {step.seq: step for step in record.steps}
        self._last_id = max(self._last_id, record.id)
        if len(self._records) > self._keep:
            oldest = next(iter(self._records))
            if self._records[oldest].state != "running":
                del self._records[oldest], self._steps[oldest]

    def step(self, handover_id: int, record: StepRecord) -> None:
        self._steps[handover_id][record.seq] = record

    def end(self, handover_id: int, state: HandoverState, ended_s: float, error: str = "") -> None:
        old = self._records[handover_id]
        self._records[handover_id] = replace(old, state=state, ended_s=ended_s, error=error)

    def unfinished(self) -> tuple[HandoverRecord, ...]:
        return tuple(self._whole(r) for r in self._records.values() if r.state == "running")

    def get(self, handover_id: int) -> HandoverRecord | None:
        record = self._records.get(handover_id)
        return None if record is None else self._whole(record)

    def since(self, handover_id: int) -> tuple[HandoverRecord, ...]:
        return tuple(self._whole(r) for number, r in sorted(self._records.items()) if number > handover_id)

    def _whole(self, record: HandoverRecord) -> HandoverRecord:
        steps = self._steps[record.id]
        return replace(record, steps=tuple(steps[seq] for seq in sorted(steps)))
