"""Weights & Biases: a run for each `integrations` of a job that asks for one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, Literal

import wandb

from appliance.tracking.follower import TrackerFailed, TrackerRefused
from appliance.tracking.jobs import Job, Point
from runtime.background_tasks import first_words

INIT_S = 30.0
# W&B has one error for everything, and says what its server answered: these of an entity or project that is not there,
# or that the box's key may not write to. (401 is a key that is none, which concerns all jobs.)
_REFUSED = re.compile(r"\berror:? 40[34]\b", re.IGNORECASE)
_STEP = {"train": "train/global_step", "validation": "validation/global_step"}


class WandbTracker:
    """The number of an event is W&B's own step: a run at a server is resumed at its step, and a run on disk, whose file
    no process can resume, is written again.

    folder: where W&B keeps its files. url: of the server, None: W&B's own. W&B's own looks at this machine are off: no
    code, packages, host name, user or load are sent.
    """

    name = "W&B"

    def __init__(self, mode: Literal["offline", "online"], folder: Path, url: str | None):
        self._mode, self._folder, self._url = mode, folder, url
        self._runs: dict[str, list[Any]] = {}

    def wants(self, job: Job) -> bool:
        return any(one["type"] == "wandb" for one in job.integrations)

    def begin(self, job: Job) -> str:
        if job.id in self._runs:
            return self._where(self._runs[job.id])
        runs: list[Any] = []
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            for number, one in enumerate(one["wandb"] for one in job.integrations if one["type"] == "wandb"):
                runs.append(self._init(job, f"{job.id}-{number}", one))
        except wandb.Error as error:
            for run in runs:
                run.finish(exit_code=1)
            raise _failed(error) from error
        self._runs[job.id] = runs
        return self._where(runs)

    def log(self, job: Job, points: list[Point]) -> None:
        for run in self._runs[job.id]:
            for point in points:
                if point.seq >= next_step(run):
                    row = {_STEP[point.kind]: point.step, **point.values, "_timestamp": point.at_s}
                    self._asked(job, run.log, row, step=point.seq)

    def end(self, job: Job) -> None:
        outcome = {"state": job.phase, "error": job.error, "model": job.output_model, "version": job.version}
        for run in self._runs[job.id]:
            self._asked(job, run.summary.update, {f"appliance.{name}": text for name, text in outcome.items() if text})
            self._asked(job, run.finish, exit_code=0 if job.phase == "succeeded" else 1)
        del self._runs[job.id]

    def _where(self, runs: list[Any]) -> str:
        if self._mode == "online":
            return ", ".join(str(run.url) for run in runs)
        names = ", ".join(f"wandb/{Path(run.dir).parent.name}" for run in runs)
        return f"{names} below the box's wandb_dir, offline; `wandb sync` sends it"

    def _init(self, job: Job, run_id: str, wanted: dict[str, Any]) -> Any:
        online = self._mode == "online"
        if not online:
            for left in (self._folder / "wandb").glob(f"offline-run-*-{run_id}"):
                shutil.rmtree(left)
        settings = wandb.Settings(
            init_timeout=INIT_S,
            console="off",
            silent=True,
            host="appliance",
            program="appliance",  # else the path of the exporter, which may have a name of a person in it
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            **({} if self._url is None else {"base_url": self._url}),
        )
        run = wandb.init(
            project=wanted["project"],
            entity=wanted.get("entity"),
            name=wanted.get("name") or job.name,
            tags=[*filter(None, wanted.get("tags") or ()), job.id],
            config=job.params,
            id=run_id,
            resume="allow" if online else None,
            mode=self._mode,
            dir=str(self._folder),
            reinit="create_new",  # the runs of other jobs go on
            settings=settings,
        )
        for kind, step in _STEP.items():
            run.define_metric(step, hidden=True)
            run.define_metric(f"{kind}/*", step_metric=step)
        return run

    def _asked(self, job: Job, ask: Any, *arguments: Any, **named: Any) -> None:
        try:
            ask(*arguments, **named)
        except wandb.Error as error:
            del self._runs[job.id]  # what W&B has of them in this process is of no more use: `begin` makes them again
            raise _failed(error) from error


def next_step(run: Any) -> int:
    """The least of its own steps that W&B still takes. `step` of a run that goes on is 0 until it is told something."""
    return max(run.step, run.starting_step)


def _failed(error: Exception) -> TrackerFailed:
    kind = TrackerRefused if _REFUSED.search(str(error)) else TrackerFailed
    return kind(first_words(error)[:300])
