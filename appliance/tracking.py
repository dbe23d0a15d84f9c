"""Send metrics of jobs to MLflow or W&B: a script that the box's main process starts for each tracker.

    python -P appliance/tracking.py SETTINGS        JSON, see `run_exporter` in `appliance.boot.main`

It runs in the interpreter with the tracker's library, which may not be the box's own, so it imports nothing of the box.
It reads the database, and no job waits for it. A file lists the ended jobs whose metrics were sent. If no job can be
sent, the script exits with the reason and is restarted: the new process sends all points of unended jobs again, and the
tracker ignores duplicates.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

Settings = dict[str, Any]
POLL_EVERY_S = 2.0
GIVE_UP_S = 7 * 24 * 3600.0  # a job is no longer sent this long after its end
EVENTS_AT_ONCE = 40  # MLflow's server accepts 1000 values per request; an event has fewer than 25
PARAMS, PARAM_CHARACTERS, TAG_CHARACTERS = 100, 6000, 5000  # most that MLflow's server accepts
STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
STEP = {"train": "train/global_step", "validation": "validation/global_step"}


class Job(NamedTuple):
    """A job. phase: succeeded, failed or cancelled once `finished_s` is set. wandb: W&B's settings in its
    `integrations`. params: hyperparameters, model, method, seed, files with their SHA-256."""

    id: str
    name: str
    output_model: str
    phase: str
    finished_s: float | None
    error: str
    version: str | None
    wandb: list[dict[str, Any]]
    params: dict[str, str]


class Point(NamedTuple):
    """Metrics of a step. seq: number of the event with them. values: finite values by name, such as `train/loss`."""

    seq: int
    step: int
    kind: Literal["train", "validation"]
    at_s: float
    values: dict[str, float]


@dataclass
class Sent:
    """Progress of sending a job. seq: number of the last sent event. last: last sent step of each kind, so that steps
    that a job repeats after a crash are sent once. run: the tracker's run."""

    run: Any
    seq: int = 0
    last: dict[str, int] = field(default_factory=dict)


class Follower:
    """Sends new metrics to one tracker, `Mlflow` or `Wandb`. path: file with the time of the first start and the ended
    jobs whose metrics were sent."""

    def __init__(self, tracker: Any, database: Path, path: Path) -> None:
        self._tracker, self._database, self._path = tracker, database, path
        known = json.loads(path.read_text()) if path.exists() else {"since_s": time.time(), "done": []}
        self._since_s, self._done = known["since_s"], set(known["done"])
        self._sent: dict[str, Sent] = {}
        self._refused: dict[str, str] = {}

    def poll(self) -> None:
        """Send new metrics of every job. A job that the tracker refuses is sent again from its start in the next round.
        Raises the library's error if no job could be sent, and errors of the database."""
        sent, failed = 0, {}
        rows = self._rows(
            "SELECT * FROM jobs WHERE started_s IS NOT NULL AND (finished_s IS NULL OR finished_s > ?) ORDER BY seq",
            max(self._since_s, time.time() - GIVE_UP_S),
        )
        self._done &= {row["id"] for row in rows}
        for job in (self._job(row) for row in rows if row["id"] not in self._done):
            try:
                if self._tracker.wants(job):
                    self._send(job)
                    sent += 1
            except Exception as error:  # noqa: BLE001 - raised or written below
                failed[job.id] = str(error) or repr(error)
                self._sent.pop(job.id, None)
                if self._refused.get(job.id) != failed[job.id]:
                    print(f"{job.id}: {failed[job.id]}", file=sys.stderr, flush=True)
        self._refused = failed
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({"since_s": self._since_s, "done": sorted(self._done)}))
        os.replace(partial, self._path)
        if failed and not sent:
            raise RuntimeError(next(iter(failed.values())))

    def _send(self, job: Job) -> None:
        if job.id not in self._sent:
            self._sent[job.id] = Sent(self._tracker.begin(job))
        at = self._sent[job.id]
        query = "SELECT seq, data, created_s FROM job_events WHERE job_id = ? AND seq > ? AND type = 'metrics' "
        while rows := self._rows(query + "ORDER BY seq LIMIT ?", job.id, at.seq, EVENTS_AT_ONCE):
            points = [point(row["seq"], row["created_s"], json.loads(row["data"])) for row in rows]
            new = []
            for item in points:
                if item.step > at.last.get(item.kind, -1):
                    at.last[item.kind] = item.step
                    new += [item] if item.values else []
            self._tracker.log(at.run, new)
            at.seq = points[-1].seq
        if job.finished_s is not None:
            self._tracker.end(at.run, job)
            self._done.add(job.id)
            del self._sent[job.id]

    def _job(self, row: sqlite3.Row) -> Job:
        published = self._rows("SELECT version FROM versions WHERE job_id = ? ORDER BY seq DESC LIMIT 1", row["id"])
        params = flat(json.loads(row["resolved"] or "{}"))
        params |= {name: str(row[name]) for name in ("model", "method", "seed")}
        for name in ("training_file", "validation_file"):
            for file in self._rows("SELECT id, sha256 FROM files WHERE id = ?", row[name]):
                params |= {name: file["id"], f"{name}_sha256": file["sha256"]}
        return Job(
            id=row["id"],
            name=row["suffix"] or row["id"],
            output_model=row["output_model"],
            phase=row["phase"],
            finished_s=row["finished_s"],
            error=str(json.loads(row["error"] or "{}").get("message", "")),
            version=published[0]["version"] if published else None,
            wandb=[entry["wandb"] for entry in json.loads(row["integrations"] or "[]") if entry["type"] == "wandb"],
            params=params,
        )

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with closing(sqlite3.connect(f"{self._database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            return connection.execute(query, values).fetchall()


def point(seq: int, at_s: float, data: dict[str, Any]) -> Point:
    """Convert an event to a point with TensorBoard's names; omit metrics over the whole validation file."""
    kind: Literal["train", "validation"] = "train" if "train_loss" in data else "validation"
    prefix = "train_" if kind == "train" else "valid_"
    values = {
        f"{kind}/{name.removeprefix(prefix)}": float(value)
        for name, value in data.items()
        if name not in ("step", "total_steps") and not name.startswith("full_")
        if type(value) in (int, float) and math.isfinite(value)
    }
    return Point(seq, int(data["step"]), kind, at_s, values)


def flat(table: dict[str, Any], before: str = "") -> dict[str, str]:
    """Flatten nested settings: {"options": {"beta": 0.1}} becomes {"options.beta": "0.1"}."""
    result: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            result |= flat(value, f"{before}{name}.")
        elif value is not None:
            result[f"{before}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return result


class Mlflow:
    """Every job is a run of one experiment, found by a tag with the job's id. MLflow ignores a duplicate point (same
    time, step and value)."""

    def __init__(self, settings: Settings) -> None:
        from mlflow import MlflowClient

        self._experiment = settings["mlflow_experiment"]
        self._client = MlflowClient(tracking_uri=settings["mlflow_uri"])

    def wants(self, job: Job) -> bool:
        return True

    def begin(self, job: Job) -> str:
        from mlflow.entities import Param

        existing = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if existing is None else existing.experiment_id
        runs = self._client.search_runs([experiment], f"tags.`appliance.job` = '{job.id}'", max_results=1)
        if not runs:
            tags = {"appliance.job": job.id, "appliance.model": job.output_model}
            runs = [self._client.create_run(experiment, run_name=job.name, tags=tags)]
        run: str = runs[0].info.run_id
        params = [Param(name, text[:PARAM_CHARACTERS]) for name, text in sorted(job.params.items())]
        self._client.log_batch(run, params=params[:PARAMS])
        return run

    def log(self, run: str, points: list[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, round(item.at_s * 1000), item.step)
            for item in points
            for name, value in item.values.items()
        ]
        self._client.log_batch(run, metrics=metrics)

    def end(self, run: str, job: Job) -> None:
        from mlflow.entities import RunTag

        tags = {"appliance.state": job.phase, "appliance.error": job.error, "appliance.version": job.version}
        rows = [RunTag(name, text[:TAG_CHARACTERS]) for name, text in tags.items() if text]
        self._client.log_batch(run, tags=rows)
        self._client.set_terminated(run, status=STATUS[job.phase], end_time=round((job.finished_s or 0) * 1000))


class Wandb:
    """A run for each entry in a job's `integrations`. The number of an event is W&B's step: a run on a server resumes
    at its step, and an offline run, whose file cannot be resumed, is written again. W&B's collection of code, packages,
    host name, user and load is off."""

    def __init__(self, settings: Settings) -> None:
        import wandb

        self._wandb, self._mode, self._url = wandb, settings["wandb_mode"], settings["wandb_url"]
        self._folder = Path(settings["wandb_dir"])

    def wants(self, job: Job) -> bool:
        return bool(job.wandb)

    def begin(self, job: Job) -> list[Any]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return [self._init(job, f"{job.id}-{number}", entry) for number, entry in enumerate(job.wandb)]

    def log(self, runs: list[Any], points: list[Point]) -> None:
        for run in runs:
            for item in points:
                # The smallest step that W&B accepts; `step` of a resumed run is 0 until something is logged.
                if item.seq >= max(run.step, run.starting_step):
                    row = {STEP[item.kind]: item.step, **item.values, "_timestamp": item.at_s}
                    run.log(row, step=item.seq)

    def end(self, runs: list[Any], job: Job) -> None:
        outcome = {"state": job.phase, "error": job.error, "model": job.output_model, "version": job.version}
        for run in runs:
            run.summary.update({f"appliance.{name}": text for name, text in outcome.items() if text})
            run.finish(exit_code=0 if job.phase == "succeeded" else 1)

    def _init(self, job: Job, run_id: str, entry: dict[str, Any]) -> Any:
        if self._mode == "offline":
            for left in (self._folder / "wandb").glob(f"offline-run-*-{run_id}"):
                shutil.rmtree(left)
        settings = self._wandb.Settings(
            init_timeout=30.0,
            console="off",
            silent=True,
            host="appliance",
            program="appliance",  # instead of this script's path, which may contain a person's name
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            **({} if self._url is None else {"base_url": self._url}),
        )
        run = self._wandb.init(
            project=entry["project"],
            entity=entry.get("entity"),
            name=entry.get("name") or job.name,
            tags=[*filter(None, entry.get("tags") or ()), job.id],
            config=job.params,
            id=run_id,
            resume="allow" if self._mode == "online" else None,
            mode=self._mode,
            dir=str(self._folder),
            reinit="create_new",  # so that runs of other jobs stay open
            settings=settings,
        )
        for kind, step in STEP.items():
            run.define_metric(step, hidden=True)
            run.define_metric(f"{kind}/*", step_metric=step)
        return run


def read_credentials(path: Path) -> dict[str, str]:
    """Read variables of MLflow and W&B from a file of lines NAME=VALUE. Exits if other users can read the file."""
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise SystemExit(f"[tracking] credentials_file {path} is open to other users: run chmod 600 on it")
    lines = [line for line in map(str.strip, path.read_text().splitlines()) if line and not line.startswith("#")]
    variables = {name.strip(): text.strip().strip("'\"") for name, _, text in (line.partition("=") for line in lines)}
    if wrong := [name for name in variables if not name.startswith(("MLFLOW_", "WANDB_"))]:
        raise SystemExit(f"[tracking] credentials_file {path} has {wrong[0]}; expected MLFLOW_* and WANDB_* variables")
    return variables


def follow(settings: Settings) -> None:
    """Poll the database for one tracker, forever. Raises the library's errors."""
    name = settings["tracker"]
    if settings["credentials_file"]:
        os.environ.update(read_credentials(Path(settings["credentials_file"]).expanduser()))
    try:
        tracker = {"mlflow": Mlflow, "wandb": Wandb}[name](settings)
    except ModuleNotFoundError as error:
        how = "install it (docs/tracking.md) and set [tracking] python"
        raise SystemExit(f"{error} for {sys.executable}; {how}") from error
    follower = Follower(tracker, Path(settings["database"]), Path(settings["folder"]) / f"{name}.since")
    while True:
        follower.poll()
        time.sleep(POLL_EVERY_S)


def main(argv: Sequence[str]) -> None:
    try:
        follow(json.loads(argv[1]))
    except Exception as error:  # noqa: BLE001 - the last line that it writes is the reason
        print(str(error) or repr(error), file=sys.stderr, flush=True)
        os._exit(1)  # exit at once: a normal exit would wait for W&B's server


if __name__ == "__main__":
    main(sys.argv)
