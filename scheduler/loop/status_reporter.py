"""Reports to the store the status of jobs and deployments: why they wait, where they run, how they ended."""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import Any

from scheduler.core.allocation import Allocation
from scheduler.core.failures import Trouble
from scheduler.core.workload import PlanInput
from scheduler.handover.ports import StateStore


class StatusReporter:
    """Writes to the store; it writes a reason for waiting once per change of its sentence or of the job's phase."""

    def __init__(self, store: StateStore):
        self._store = store
        self._told: dict[str, tuple[str, bool]] = {}

    def waiting(self, plan_input: PlanInput, allocation: Allocation, running: Collection[str], now_s: float) -> None:
        """Report why each job waits that is neither in `running` nor about to run."""
        for job in plan_input.jobs:
            reason = allocation.waiting.get(job.id)
            if reason is None or job.id in running or job.busy == "coming":
                continue
            word = (reason, job.phase == "suspended")
            said = self._told.get(job.id)
            counting_down = job.not_before_s > now_s and said is not None
            if said != word and not counting_down:
                self._told[job.id] = word
                self._store.job_waiting(job.id, reason)

    def coming(self, job_id: str, device_ids: tuple[str, ...], freed: int) -> None:
        """Its ranks are about to start on these devices; `freed`: of how many engines answer until then."""
        self._told.pop(job_id, None)
        self._store.job_coming(job_id, device_ids, freed)

    def keep(self, jobs: Container[str]) -> None:
        """Only these jobs are not over: a cancelled one is told of by nobody."""
        self._told = {job_id: word for job_id, word in self._told.items() if job_id in jobs}

    def running(self, job_id: str, device_ids: tuple[str, ...]) -> None:
        self._told.pop(job_id, None)
        self._store.job_running(job_id, device_ids)

    def over(self, job_id: str, outcome: Any, error: str) -> None:
        self._told.pop(job_id, None)
        self._store.job_ended(job_id, outcome, error)

    def trouble(self, model: str, trouble: Trouble | None) -> None:
        self._store.model_trouble(model, trouble)
