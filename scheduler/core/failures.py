"""Counts failures, and computes the wait before the next try and what is to blame.

Retries never end. The wait doubles up to `backoff_max_s`, or up to `start_backoff_max_s` for a model whose engines
repeatedly die at start. `retry` ends the wait when the cause of the failure may be gone. Only jobs can end because of
failures, and only of their own: see `Failures.hopeless`.

A failure during the backoff of an earlier one is an echo (no try ran in between): several handles report the same
death, or several engines died of one cause. Echoes are not counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from scheduler.core.config import SchedulerConfig
from scheduler.core.errors import Blame
from scheduler.core.workload import Build, DeploymentView, Workload

log = logging.getLogger(__name__)

Cause = Literal["memory", "device", "configuration"]
"""Causes whose end justifies an immediate retry: short memory, a missing device, a wrong setting."""


LONGEST_REASON = 700


def first_line(reason: str) -> str:
    """The first line of a failure message, at most LONGEST_REASON characters; logs have the full message."""
    return reason.partition("\n")[0][:LONGEST_REASON]


def reverts_to(deployment: DeploymentView, failed: Build) -> Build | None:
    """Return the build to restore because no engine starts with `failed`; None to keep `failed`.

    The settings are to blame only if nothing else differs from the last build that served: if the version or the
    devices changed too, the cause is unknown."""
    served = deployment.served
    if served is None or not served.version or failed != deployment.build:
        return None
    alike = (served.version, served.tensor_parallel) == (failed.version, failed.tensor_parallel)
    return served if alike and served.settings != failed.settings else None


@dataclass(slots=True)
class Failure:
    """Consecutive failures of a job or model.

    count: failures by its own fault; reset by a step of progress, or by a replica that stayed open long enough. tries:
    all failures; reset by a lifetime longer than the previous wait. step: last training step before the failure.
    version: the version that failed. reason, blame: why the last try failed, and whose fault it was. lasting: True if
    the model failed so often by its own fault, or by its configuration, that the next try will most likely fail too.
    """

    count: int = 0
    tries: int = 0
    step: int = -1
    version: str = ""
    reason: str = ""
    blame: Blame = "own"
    wait_s: float = 0.0
    not_before_s: float = 0.0
    lasting: bool = False


class Failures:
    """Counts failures of jobs, models and hand-over moves, only in memory: a restarted controller retries at once."""

    def __init__(self, config: SchedulerConfig):
        self._config = config
        self.jobs: dict[str, Failure] = {}
        self.models: dict[str, Failure] = {}
        self.moves: Counter[str] = Counter()

    def backoff_s(self, count: int, longest_s: float | None = None) -> float:
        longest_s = longest_s or self._config.backoff_max_s
        return min(self._config.backoff_first_s * 2.0 ** min(count - 1, 32), longest_s)

    def job_failed(
        self, job_id: str, step: int, reason: str, now_s: float, *, blame: Blame = "own", lived_s: float = 0.0
    ) -> Failure:
        """Record a failure of a job; progress since the last failure resets the count. lived_s: seconds the job ran."""
        failure = self.jobs.setdefault(job_id, Failure())
        if step > failure.step:
            failure.count, failure.step = 0, step
        self._add(failure, reason, now_s, blame, lived_s)
        return failure

    def hopeless(self, failure: Failure) -> bool:
        """Whether the failure ends the job: its input is at fault, or it failed too often without progress."""
        return failure.blame == "input" or (failure.blame == "own" and failure.count >= self._config.job_attempts)

    def model_failed(
        self,
        model: str,
        version: str,
        reason: str,
        now_s: float,
        *,
        blame: Blame = "own",
        lived_s: float = 0.0,
        at_start: bool = False,
    ) -> Failure:
        """Record a failure of a model's replica. lived_s: seconds it was open. at_start: True if no engine started."""
        failure = self.models.get(model)
        if failure is None or failure.version != version:
            failure = self.models[model] = Failure(version=version)
        if lived_s >= self._config.replica_stable_s:
            failure.count = 0
        self._add(failure, reason, now_s, blame, lived_s, at_start=at_start)
        failure.lasting = failure.blame == "input" or failure.count >= self._config.replica_attempts
        ids = {"model": model, "version": version}
        log.warning("%s; next try in %.1f s", reason, failure.not_before_s - now_s, extra=ids)
        return failure

    def _add(
        self, failure: Failure, reason: str, now_s: float, blame: Blame, lived_s: float, *, at_start: bool = False
    ) -> None:
        if failure.not_before_s > now_s:  # an echo; if the blames differ, the milder blame counts
            if failure.blame == "own" and blame != "own":
                failure.count -= blame != "input"
                failure.blame, failure.reason = blame, first_line(reason)
            return
        if lived_s > failure.wait_s:
            failure.tries = 0
        own = blame in ("own", "input")
        failure.tries += 1
        failure.count += own
        failure.reason, failure.blame = first_line(reason), blame
        longer = at_start and own and failure.count >= self._config.replica_attempts
        failure.wait_s = self.backoff_s(failure.tries, self._config.start_backoff_max_s if longer else None)
        failure.not_before_s = now_s + failure.wait_s

    def is_echo(self, model: str, version: str, now_s: float) -> bool:
        """Whether an engine of this version died while another version that failed to load is still in backoff."""
        failure = self.models.get(model)
        return failure is not None and failure.version != version and failure.not_before_s > now_s

    def model(self, model: str, version: str) -> Failure | None:
        failure = self.models.get(model)
        return failure if failure is not None and failure.version == version else None

    def keep(self, workload: Workload) -> None:
        """Forget failures of jobs and models that are no longer in the workload."""
        for job_id in self.jobs.keys() - {job.id for job in workload.jobs}:
            del self.jobs[job_id]
        for model in self.models.keys() - {deployment.model for deployment in workload.deployments}:
            del self.models[model]

    def retry(self, cause: Cause) -> None:
        """Retry at once the jobs and models that may have failed for this cause. When memory has recovered, failures
        with an error of their own stay in backoff."""
        for failure in [*self.jobs.values(), *self.models.values()]:
            if cause != "memory" or failure.blame != "own":
                failure.not_before_s, failure.tries, failure.wait_s = 0.0, 0, 0.0
