"""Counting failures: how long to wait before the next try, and whose fault they are.

Nothing is given up for ever. The wait doubles up to `backoff_max_s`; where the cause of a failure may have gone
(`retry`), there is none. Only a job can come to an end by failing, and only by its own fault: see `Failure.hopeless`.

What fails while the wait of an earlier failure runs is an echo of that one (nothing was tried in between): the same
death heard from several handles, or several engines that died of one thing. It is not counted again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from scheduler.core.config import SchedulerConfig
from scheduler.core.errors import Blame
from scheduler.core.workload import Workload

Cause = Literal["memory", "device", "configuration"]
"""What may be gone, so that trying again makes sense at once: memory was short, a device was missing, a setting was
wrong."""


LONGEST_REASON = 300  # characters of a failure that are shown; logs have all


def first_line(reason: str) -> str:
    """What people are shown of a failure."""
    return reason.partition("\n")[0][:LONGEST_REASON]


@dataclass(slots=True)
class Failure:
    """The failures of a job or model in a row.

    count: those that are its own fault; a step of progress, or a replica that stayed open long enough, starts it anew.
    tries: all of them, whoever's fault; what lived for longer than the wait before it starts them anew. reason, blame:
    of the last one. step: training progress at the last one. version: what they are about.
    """

    count: int = 0
    tries: int = 0
    step: int = -1
    version: str = ""
    reason: str = ""
    blame: Blame = "own"
    wait_s: float = 0.0
    not_before_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """A model whose engines fail, for people and for who waits. lasting: it failed so often by its own fault, or by
    what somebody configured, that a wait for the next try is most likely in vain."""

    model: str
    version: str
    reason: str
    blame: Blame
    count: int
    tries: int
    not_before_s: float
    lasting: bool


class Failures:
    """Failures of jobs, models and hand-over chains. Lives in the loop's memory: a restarted controller tries again."""

    def __init__(self, config: SchedulerConfig):
        self._config = config
        self._jobs: dict[str, Failure] = {}
        self._models: dict[str, Failure] = {}
        self._chains: dict[str, int] = {}

    def backoff_s(self, count: int) -> float:
        return min(self._config.backoff_first_s * 2.0 ** min(count - 1, 32), self._config.backoff_max_s)

    def job_failed(
        self, job_id: str, step: int, reason: str, now_s: float, *, blame: Blame = "own", lived_s: float = 0.0
    ) -> Failure:
        """One more failure of a job; progress since the last one starts the count anew. lived_s: how long it ran."""
        failure = self._jobs.setdefault(job_id, Failure())
        if step > failure.step:
            failure.count, failure.step = 0, step
        self._add(failure, reason, now_s, blame, lived_s)
        return failure

    def hopeless(self, failure: Failure) -> bool:
        """Whether a job ends by it: its input is at fault, or it failed by itself too often without progress."""
        return failure.blame == "input" or (failure.blame == "own" and failure.count >= self._config.job_attempts)

    def model_failed(
        self, model: str, version: str, reason: str, now_s: float, *, blame: Blame = "own", lived_s: float = 0.0
    ) -> Failure:
        """One more failure of a model's replica. lived_s: how long it had been open."""
        failure = self._models.setdefault(model, Failure())
        if failure.version != version:
            failure = self._models[model] = Failure(version=version)
        if lived_s >= self._config.replica_stable_s:
            failure.count = 0
        self._add(failure, reason, now_s, blame, lived_s)
        return failure

    def _add(self, failure: Failure, reason: str, now_s: float, blame: Blame, lived_s: float) -> None:
        if failure.not_before_s > now_s:  # an echo; of two words on whose fault it is, the excuse counts
            if failure.blame == "own" and blame != "own":
                failure.count -= blame != "input"
                failure.blame, failure.reason = blame, reason
            return
        if lived_s > failure.wait_s:
            failure.tries = 0
        failure.tries += 1
        failure.count += blame in ("own", "input")
        failure.reason, failure.blame = reason, blame
        failure.wait_s = self.backoff_s(failure.tries)
        failure.not_before_s = now_s + failure.wait_s

    def model_stable(self, model: str, version: str) -> bool:
        """A replica of this version stayed open long enough. True if there was something to forget."""
        failure = self._models.get(model)
        if failure is None or failure.version != version:
            return False
        del self._models[model]
        return True

    def job(self, job_id: str) -> Failure | None:
        return self._jobs.get(job_id)

    def model(self, model: str, version: str) -> Failure | None:
        failure = self._models.get(model)
        return failure if failure is not None and failure.version == version else None

    def troubles(self) -> Iterator[Trouble]:
        for model, failure in self._models.items():
            yield self.trouble(model, failure)

    def trouble(self, model: str, failure: Failure) -> Trouble:
        lasting = failure.blame == "input" or failure.count >= self._config.replica_attempts
        return Trouble(
            model,
            failure.version,
            first_line(failure.reason),
            failure.blame,
            failure.count,
            failure.tries,
            failure.not_before_s,
            lasting,
        )

    def forget_job(self, job_id: str) -> None:
        self._jobs.pop(job_id, None)

    def keep(self, workload: Workload) -> None:
        """Forget what is not in the workload any more: a job that was cancelled fails no more."""
        if self._jobs:
            there = {job.id for job in workload.jobs}
            self._jobs = {job_id: failure for job_id, failure in self._jobs.items() if job_id in there}
        if self._models:
            there = {deployment.model for deployment in workload.deployments}
            self._models = {model: failure for model, failure in self._models.items() if model in there}

    def forget_model(self, model: str) -> bool:
        """True if there was something to forget."""
        return self._models.pop(model, None) is not None

    def retry(self, cause: Cause) -> list[str]:
        """Try at once what may have failed for this cause; the models among it. Memory that came back says nothing of
        what raised an error of its own."""
        failures = [*self._jobs.values(), *self._models.values()]
        for failure in failures:
            if cause != "memory" or failure.blame != "own":
                failure.not_before_s, failure.tries, failure.wait_s = 0.0, 0, 0.0
        return [model for model, failure in self._models.items() if not failure.tries]

    def chain_failed(self, name: str) -> float:
        """Seconds to leave the holder of a failed chain alone."""
        self._chains[name] = self._chains.get(name, 0) + 1
        return self.backoff_s(self._chains[name])

    def chain_failures(self, name: str) -> int:
        return self._chains.get(name, 0)

    def chain_done(self, name: str) -> None:
        self._chains.pop(name, None)
