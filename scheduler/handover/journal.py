"""The record of every hand-over: a log of events, written before and after each step.

A journal write returns when it is durable. The loop needs the journal neither for the current state (it observes) nor
for the wanted state (it plans), but to close what a crash left open, to never reuse a number, and as a history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

StepState = Literal["doing", "done", "failed", "skipped"]
HandoverState = Literal["running", "done", "undone", "failed"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, or one step of an undo. `seq`: numbers the steps of a hand-over from 0 as they begin. `chain`: the move
    that it is of. skipped: cancelled while in progress. `undoes`: of an undo, the step whose failure caused it."""

    seq: int
    chain: str
    verb: str
    target: str
    state: StepState = "doing"
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
        """Durably record a new hand-over, before its first step starts."""

    def step(self, handover_id: int, record: StepRecord) -> None:
        """Durably insert or replace the step with this `seq`."""

    def end(self, handover_id: int, state: HandoverState, ended_s: float, error: str = "") -> None:
        """Durably close a hand-over."""

    def unfinished(self) -> tuple[HandoverRecord, ...]:
        """Hand-overs in state "running", oldest first: after a start, those that a crash interrupted."""

    def since(self, handover_id: int) -> tuple[HandoverRecord, ...]:
        """Those with a higher number, oldest first."""
