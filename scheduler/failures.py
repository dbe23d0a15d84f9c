"""Counting failures: how long to wait before the next try, and when to give up."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.config import SchedulerConfig


@dataclass(slots=True)
class Failure:
    """`count` failures in a row; `step`: training progress at the last one; `version`: what they are about."""

    count: int = 0
    step: int = -1
    version: str = ""
    reason: str = ""
    not_before_s: float = 0.0
    given_up: bool = False


class Failures:
    """Failures of jobs, models and hand-over chains. Lives in the loop's memory: a restarted controller tries again."""

    def __init__(self, config: SchedulerConfig):
        self._config = config
        self._jobs: dict[str, Failure] = {}
        self._models: dict[str, Failure] = {}
        self._chains: dict[str, int] = {}

    def backoff_s(self, count: int) -> float:
        return min(self._config.backoff_first_s * 2.0 ** (count - 1), self._config.backoff_max_s)

    def job_failed(self, job_id: str, step: int, reason: str, now_s: float, *, counted: bool = True) -> Failure:
        """One more failure of a job; progress since the last one starts the count anew.

        counted: False for failures that say nothing about the job (its devices could not be fenced)."""
        failure = self._jobs.setdefault(job_id, Failure())
        if step > failure.step:
            failure.count, failure.step = 0, step
        failure.count += 1
        failure.reason, failure.not_before_s = reason, now_s + self.backoff_s(failure.count)
        failure.given_up = counted and failure.count >= self._config.job_attempts
        return failure

    def model_failed(
        self, model: str, version: str, reason: str, now_s: float, *, counted: bool = True, afresh: bool = False
    ) -> Failure:
        """One more failure of a model's replica. afresh: it had served stably before."""
        failure = self._models.setdefault(model, Failure())
        if failure.version != version or afresh:
            failure.version, failure.count, failure.given_up = version, 0, False
        failure.count += 1
        failure.reason, failure.not_before_s = reason, now_s + self.backoff_s(failure.count)
        failure.given_up = failure.given_up or (counted and failure.count >= self._config.replica_attempts)
        return failure

    def model_stable(self, model: str, version: str) -> None:
        """A replica of this version stayed open long enough."""
        failure = self._models.get(model)
        if failure is not None and failure.version == version and not failure.given_up:
            del self._models[model]

    def job(self, job_id: str) -> Failure | None:
        return self._jobs.get(job_id)

    def model(self, model: str, version: str) -> Failure | None:
        failure = self._models.get(model)
        return failure if failure is not None and failure.version == version else None

    def forget_job(self, job_id: str) -> None:
        self._jobs.pop(job_id, None)

    def forget_model(self, model: str) -> None:
        self._models.pop(model, None)

    def chain_failed(self, name: str) -> float:
        """Seconds to leave the holder of a failed chain alone."""
        self._chains[name] = self._chains.get(name, 0) + 1
        return self.backoff_s(self._chains[name])

    def chain_failures(self, name: str) -> int:
        return self._chains.get(name, 0)

    def chain_done(self, name: str) -> None:
        self._chains.pop(name, None)
