"""Interfaces the loop needs besides effects and journal: the store of workloads, and the clock."""

from __future__ import annotations

import time
from typing import Literal, Protocol

from scheduler.core.failures import Trouble
from scheduler.core.workload import Build, Workload

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

    def model_trouble(self, model: str, trouble: Trouble | None) -> None:
        """Its replicas fail and are retried at `trouble.not_before_s`; open ones stay open. None: the trouble is
        over."""

    def model_served(self, model: str, build: Build) -> None:
        """An engine with the model's version, devices and settings has opened: the next `load` has it as `served`."""

    def settings_failed(self, model: str, failed: Build, served: Build, reason: str) -> bool:
        """No engine starts with these settings: put those that served in force again, unless they were changed
        meanwhile. False if those that served are gone."""


class Clock(Protocol):
    """The box's clock. Timers use the event loop's own time, which a simulation replaces together with this."""

    def now_s(self) -> float:
        """Seconds since the epoch."""


class SystemClock:
    def now_s(self) -> float:
        return time.time()
