"""MLflow: every job is a run of one experiment."""

from __future__ import annotations

from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from requests import RequestException

from appliance.tracking.follower import TrackerFailed
from appliance.tracking.jobs import Job, Point
from runtime.background_tasks import first_words

# Limits of the server: how many values one request may have, and how long each may be.
METRICS, PARAMS, PARAM_CHARACTERS, TAG_CHARACTERS = 1000, 100, 6000, 5000
_STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_JOB = "appliance.job"


class MlflowTracker:
    """A run is found again by the tag that names its job, and the same point sent twice is one point there: a time, a
    step and a value. So the server decides what was told, whatever this process remembers."""

    name = "MLflow"

    def __init__(self, uri: str, experiment: str):
        self._uri, self._experiment = uri, experiment
        self._client = MlflowClient(tracking_uri=uri)
        self._runs: dict[str, str] = {}

    def wants(self, job: Job) -> bool:
        return True

    def begin(self, job: Job) -> str:
        return self._asked(self._begin, job)

    def log(self, job: Job, points: list[Point]) -> None:
        metrics = [
            Metric(name, value, round(point.at_s * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for first in range(0, len(metrics), METRICS):
            self._asked(self._client.log_batch, self._runs[job.id], metrics=metrics[first : first + METRICS])

    def end(self, job: Job) -> None:
        tags = {"appliance.state": job.phase, "appliance.error": job.error, "appliance.version": job.version}
        told = [RunTag(name, text[:TAG_CHARACTERS]) for name, text in tags.items() if text]
        run_id, end_ms = self._runs[job.id], round((job.finished_s or 0) * 1000)
        self._asked(self._client.log_batch, run_id, tags=told)
        self._asked(self._client.set_terminated, run_id, status=_STATUS[job.phase], end_time=end_ms)
        del self._runs[job.id]

    def _begin(self, job: Job) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        runs = self._client.search_runs([experiment], f"tags.`{_JOB}` = '{job.id}'", max_results=1)
        if runs:
            run_id = runs[0].info.run_id
        else:
            tags = {_JOB: job.id, "appliance.model": job.output_model}
            run_id = self._client.create_run(experiment, run_name=job.name, tags=tags).info.run_id
        params = [Param(name, text[:PARAM_CHARACTERS]) for name, text in sorted(job.params.items())]
        for first in range(0, len(params), PARAMS):
            self._client.log_batch(run_id, params=params[first : first + PARAMS])
        self._runs[job.id] = run_id
        return f"{self._uri.rstrip('/')}/#/experiments/{experiment}/runs/{run_id}"

    def _asked(self, ask: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return ask(*arguments, **named)
        except (MlflowException, RequestException) as error:
            raise TrackerFailed(f"{self._uri}: {first_words(error)[:300]}") from error
