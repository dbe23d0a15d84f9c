"""What a change of size costs each job, as measured here, and how long a start of ranks goes on before it gives way.

Steps show only that ranks are suspended and started. The rest of the cost (the step that is done again, leases, the
wait for engines) is taken from the box's setting, which holds for a job whose two steps take `USUAL_S`.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

USUAL_S = 2.25
_LEAST_S = 0.1
LONG_START_S = 60.0
"""After this long a start gives way as a running job would. The next one has twice as long, up to four times: little of
what a start does is kept, and one that always gave way would never be done."""


class JobPauses:
    """The pauses and starts of all jobs. setting_s: `job_pause_s`. longest_start_s: `start_group_timeout_s`."""

    def __init__(self, setting_s: float, longest_start_s: float):
        self._rest_s, self._longest_start_s = setting_s - USUAL_S, min(4 * LONG_START_S, longest_start_s)
        self._patience_s: dict[str, float] = {}
        self._suspended_s: dict[str, float] = {}
        self.pause_s: dict[str, float] = {}
        """By job, seconds on each of its devices at its last change of size."""

    def patience_s(self, job_id: str) -> float:
        """How long a start of the job goes on though its devices are wanted."""
        return self._patience_s.get(job_id, min(LONG_START_S, self._longest_start_s))

    def start_gave_way(self, job_id: str) -> None:
        self._patience_s[job_id] = min(2 * self.patience_s(job_id), self._longest_start_s)

    def step_done(self, verb: str, job_id: str, took_s: float) -> None:
        if verb == "suspend_group":
            self._suspended_s[job_id] = took_s
        elif verb == "start_group" and (suspended_s := self._suspended_s.pop(job_id, None)) is not None:
            self.pause_s[job_id] = max(suspended_s + took_s + self._rest_s, _LEAST_S)

    def keep(self, job_ids: AbstractSet[str]) -> None:
        """Forget all others: they are over."""
        for known in (self._patience_s, self._suspended_s, self.pause_s):
            for job_id in known.keys() - job_ids:
                del known[job_id]
