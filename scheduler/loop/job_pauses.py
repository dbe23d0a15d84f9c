"""What a change of size costs each job, as measured on this box: its ranks are suspended, and started again. And how
long a start may take before it gives way.

The rest of the cost (the step that is left and done again, leases, the wait for engines) is not seen in these steps. It
is taken from the box's setting, which holds for a job that is suspended and started in `USUAL_S`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import median

USUAL_S = 2.25
"""The part of `job_pause_s`, as it is set, that suspending and starting take."""
_KEPT = 5
"""Changes of size that are remembered. Their median counts: one may have waited for memory or a slow disk."""
_LEAST_S = 0.1
LONG_START_S = 60.0
"""After this long a start of ranks gives way as a running job would: as long as a step that was left before goes on.
After each start of a job that gave way, the next one has twice as long: little of what a start does is kept, and one
that always gave way would never be done."""
_LONGEST_START_S = 4 * LONG_START_S
"""But no longer than this: who asks a model waits for it meanwhile. A job that takes longer to start begins when nobody
has asked for as long."""


class JobPauses:
    """The pauses and starts of all jobs. setting_s: `job_pause_s`. longest_start_s: `start_group_timeout_s`."""

    def __init__(self, setting_s: float, longest_start_s: float):
        self._rest_s, self._longest_start_s = setting_s - USUAL_S, min(_LONGEST_START_S, longest_start_s)
        self._patience_s: dict[str, float] = {}
        self._gave_way: dict[str, str] = {}
        self._suspended_s: dict[str, float] = {}
        self._found: dict[str, deque[float]] = {}

    def patience_s(self, job_id: str) -> float:
        """How long a start of the job goes on though its devices are wanted."""
        return self._patience_s.get(job_id, min(LONG_START_S, self._longest_start_s))

    def start_gave_way(self, job_id: str, after_s: float) -> None:
        next_s = self._patience_s[job_id] = min(2 * self.patience_s(job_id), self._longest_start_s)
        self._gave_way[job_id] = (
            f"Its start gave way after {after_s:.0f} s, since its devices were wanted; the next has {next_s:.0f} s."
        )

    def gave_way(self, job_id: str) -> str:
        """Why its ranks do not run though they were being started, as a sentence; "" if that is not so."""
        return self._gave_way.get(job_id, "")

    def step_done(self, verb: str, job_id: str, took_s: float) -> None:
        if verb == "start_group":
            self._gave_way.pop(job_id, None)
        if verb == "suspend_group":
            self._suspended_s[job_id] = took_s
        elif verb == "start_group" and job_id in self._suspended_s:
            found = self._found.setdefault(job_id, deque(maxlen=_KEPT))
            found.append(self._suspended_s.pop(job_id) + took_s)

    def keep(self, job_ids: Collection[str]) -> None:
        """Forget all others: they are over."""
        for known in (self._suspended_s, self._found, self._patience_s, self._gave_way):
            for job_id in [job_id for job_id in known if job_id not in job_ids]:
                del known[job_id]

    def pause_s(self, job_id: str) -> float | None:
        """Seconds on each of its devices; None if it has not changed its size yet."""
        found = self._found.get(job_id)
        return max(median(found) + self._rest_s, _LEAST_S) if found else None
