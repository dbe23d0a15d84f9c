"""What a change of size costs each job, as measured on this box: its ranks are suspended, and started again.

The rest of the cost (the step that is left and done again, leases, the wait for engines) is not seen in these steps. It
is taken from the box's setting, which holds for a job that is suspended and started in `USUAL_S`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import median

from scheduler.handover.step import Step

USUAL_S = 2.25
"""The part of `job_pause_s`, as it is set, that suspending and starting take."""
_KEPT = 5
"""Changes of size that are remembered. Their median counts: one may have waited for memory or a slow disk."""
_LEAST_S = 0.1


class JobPauses:
    """The pauses of all jobs. setting_s: `job_pause_s`."""

    def __init__(self, setting_s: float):
        self._rest_s = setting_s - USUAL_S
        self._suspended_s: dict[str, float] = {}
        self._found: dict[str, deque[float]] = {}

    def step_done(self, step: Step, took_s: float) -> None:
        if step.verb == "suspend_group":
            self._suspended_s[step.target] = took_s
        elif step.verb == "start_group" and step.target in self._suspended_s:
            found = self._found.setdefault(step.target, deque(maxlen=_KEPT))
            found.append(self._suspended_s.pop(step.target) + took_s)

    def keep(self, job_ids: Collection[str]) -> None:
        """Forget all others: they are over."""
        for known in (self._suspended_s, self._found):
            for job_id in [job_id for job_id in known if job_id not in job_ids]:
                del known[job_id]

    def pause_s(self, job_id: str) -> float | None:
        """Seconds on each of its devices; None if it has not changed its size yet."""
        found = self._found.get(job_id)
        return max(median(found) + self._rest_s, _LEAST_S) if found else None
