"""Interfaces the loop needs besides effects: the store of workloads, the journal of hand-overs.

A journal is a log of events, written before and after each step; a write returns when it is durable. The loop needs it
neither for the current state (it observes) nor for the wanted state (it plans), but to close what a crash left open, to
never reuse a number, and as a history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from scheduler.core.failures import Failure
from scheduler.core.workload import Build, Workload

StepState = Literal["doing", "done", "failed", "skipped"]
HandoverState = Literal["done", "undone", "failed"]


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


class Journal(Protocol):
    """Where hand-overs are recorded. Only the loop writes."""

    def last_id(self) -> int:
        """The highest hand-over number ever used; 0 if none."""

    def begin(self, handover_id: int, reason: str, started_s: float, asked_by: str, asked_for: str) -> None:
        """Durably record a new hand-over, before its first step starts. asked_by: a key's name, "box", "window <id>" or
        "scheduler"; asked_for: what that asked for."""

    def step(self, handover_id: int, record: StepRecord) -> None:
        """Durably insert or replace the step with this `seq`."""

    def end(self, handover_id: int, state: HandoverState, ended_s: float, error: str = "") -> None:
        """Durably close a hand-over. done: every chain reached the wanted state. undone: some chain failed and was
        undone. failed: some undo failed too; later rounds repair the rest."""

    def unfinished(self) -> list[int]:
        """Hand-overs without an end, oldest first: after a start, those that a crash interrupted."""

    def steps_since(self, handover_id: int) -> list[StepRecord]:
        """The steps of hand-overs with a higher number, oldest first."""


Outcome = Literal["succeeded", "failed", "cancelled"]


class StateStore(Protocol):
    """The store of jobs, deployments and policy. Calls are short and durable when they return."""

    def load(self, *, free_devices: int) -> Workload:
        """Everything to schedule now, where nobody holds this many devices: unfinished jobs, deployments with their
        demand, the policy.

        Re-read in every round. A job that a person cancelled or deleted is absent; a job to be paused has phase
        "paused". The loop itself fills `devices`, `since_s`, `not_before_s`, `failed` and `busy` of jobs.
        """

    def job_running(self, job_id: str, devices: tuple[str, ...]) -> None:
        """Its ranks train on these devices now."""

    def job_coming(self, job_id: str, devices: tuple[str, ...], answering: int) -> None:
        """It gets these devices: its ranks start once the engines on `answering` of them have finished."""

    def job_waiting(self, job_id: str, reason: str) -> None:
        """It holds no devices; `reason` is one sentence for users. Called again when the reason changes."""

    def job_ended(self, job_id: str, outcome: Outcome, error: str) -> None:
        """It has ended; the next `load` omits it. May be repeated after a crash."""

    def model_trouble(self, model: str, trouble: Failure | None) -> None:
        """Its replicas fail and are retried at `trouble.not_before_s`; open ones stay open. None: the trouble is
        over."""

    def model_served(self, model: str, build: Build) -> None:
        """An engine with the model's version, devices and settings has opened: the next `load` has it as `served`."""

    def settings_failed(self, model: str, failed: Build, served: Build, reason: str) -> bool:
        """No engine starts with these settings: put those that served in force again, unless they were changed
        meanwhile. False if those that served are gone."""
