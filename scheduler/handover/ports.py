"""What the loop needs besides effects and journal: where the truth about workloads stands, and the time."""

from __future__ import annotations

import time
from typing import Literal, Protocol

from scheduler.core.failures import Trouble
from scheduler.core.workload import Workload

Outcome = Literal["succeeded", "failed", "cancelled"]


class StateStore(Protocol):
    """The store of jobs, deployments and policy. Calls are short and durable when they return."""

    def load(self) -> Workload:
        """Everything that should be scheduled now: jobs that are not over, deployments with their demand, the policy.

        Read anew in every round. A job that a person cancelled or deleted is simply not in it any more; a job to be
        paused has phase "paused". `devices`, `since_s`, `not_before_s`, `failed` and `busy` of jobs are the loop's to
        fill.
        """

    def job_running(self, job_id: str, devices: tuple[str, ...]) -> None:
        """Its ranks train on these devices now."""

    def job_waiting(self, job_id: str, reason: str, suspended: bool) -> None:
        """It holds no devices; `reason` is one sentence for a person. Called again when the reason changes.

        suspended: it ran before and a snapshot waits (False: it never ran, or the caller does not know)."""

    def job_ended(self, job_id: str, outcome: Outcome, error: str) -> None:
        """It is over; the next `load` does not contain it. May be repeated after a crash."""

    def model_trouble(self, model: str, trouble: Trouble | None) -> None:
        """Its replicas fail and are tried again at `trouble.not_before_s`, what is open stays open; None: not any
        more."""


class Clock(Protocol):
    """The box's clock. Timers use the event loop's own time, which a simulation replaces together with this."""

    def now_s(self) -> float:
        """Seconds since the epoch."""


class SystemClock:
    def now_s(self) -> float:
        return time.time()
