"""What a change of size costs each job, as measured here, and how long a start of ranks goes on before it gives way.

Steps show only that ranks are suspended and started. The rest of the cost (the step that is done again, leases, the
wait for engines) is taken from the box's setting, which holds for a job whose two steps take `USUAL_S`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

USUAL_S = 2.25
_LEAST_S = 0.1
LONG_START_S = 60.0
"""After this long a start gives way as a running job would. The next one has twice as long, up to four times: little of
what a start does is kept, and one that always gave way would never be done."""


@dataclass(slots=True)
class _Job:
    patience_s: float
    suspended_s: float | None = None
    pause_s: float | None = None


class JobPauses:
    """The pauses and starts of all jobs. setting_s: `job_pause_s`. longest_start_s: `start_group_timeout_s`."""

    def __init__(self, setting_s: float, longest_start_s: float):
        self._rest_s, self._longest_start_s = setting_s - USUAL_S, min(4 * LONG_START_S, longest_start_s)
        self._jobs: dict[str, _Job] = {}

    def _job(self, job_id: str) -> _Job:
        return self._jobs.setdefault(job_id, _Job(min(LONG_START_S, self._longest_start_s)))

    def patience_s(self, job_id: str) -> float:
        """How long a start of the job goes on though its devices are wanted."""
        return self._job(job_id).patience_s

    def start_gave_way(self, job_id: str) -> None:
        job = self._job(job_id)
        job.patience_s = min(2 * job.patience_s, self._longest_start_s)

    def step_done(self, verb: str, job_id: str, took_s: float) -> None:
        if verb == "suspend_group":
            self._job(job_id).suspended_s = took_s
        elif verb == "start_group" and (job := self._job(job_id)).suspended_s is not None:
            job.pause_s = max(job.suspended_s + took_s + self._rest_s, _LEAST_S)
            job.suspended_s = None

    def keep(self, job_ids: Collection[str]) -> None:
        """Forget all others: they are over."""
        self._jobs = {job_id: job for job_id, job in self._jobs.items() if job_id in job_ids}

    def pause_s(self, job_id: str) -> float | None:
        """Seconds on each of its devices, at its last change of size; None if it had none yet."""
        return self._job(job_id).pause_s
