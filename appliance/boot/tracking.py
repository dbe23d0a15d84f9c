"""Runs an exporter to an experiment tracker (`appliance/tracking.py`) in the interpreter that has its library."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import appliance
from appliance.boot import ray_head
from appliance.config import TrackingSettings
from appliance.paths import BoxPaths
from runtime.logs import tail
from runtime.processes.ended import how_it_ended

Tracker = Literal["mlflow", "wandb"]
_QUIET = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "DO_NOT_TRACK": "true",
}


class ExporterEnded(RuntimeError):
    """It says why."""


async def run_exporter(
    tracker: Tracker, settings: TrackingSettings, paths: BoxPaths, environment: Mapping[str, str]
) -> None:
    """Raises ExporterEnded or OSError when it has ended; whoever calls again starts it again.

    What the environment says of MLflow and W&B does not count: the configuration alone decides what leaves the box.
    """
    paths.tracking.mkdir(mode=0o700, exist_ok=True)
    given = {
        **settings.model_dump(),
        "tracker": tracker,
        "database": str(paths.database),
        "folder": str(paths.tracking),
        "wandb_dir": str(Path(settings.wandb_dir or paths.tracking).expanduser()),
    }
    own = {name: text for name, text in environment.items() if not name.startswith(("MLFLOW_", "WANDB_", "PYTHONPATH"))}
    script, log = str(Path(appliance.__file__).with_name("tracking.py")), paths.logs / f"tracking-{tracker}.log"
    python = str(Path(settings.python or sys.executable).expanduser())
    with open(log, "ab") as output:
        process = await ray_head.start_process(("-P", script, json.dumps(given)), output, {**own, **_QUIET}, python)
    try:
        await process.wait()
        lines = tail(log).splitlines()
        raise ExporterEnded(lines[-1] if lines else f"its process {how_it_ended(process.returncode or 0)}")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
