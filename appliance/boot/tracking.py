"""Runs the exporter of experiment trackers (`appliance.tracking`) in the interpreter that has their libraries."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import appliance
from appliance.boot import ray_head
from appliance.config import TrackingSettings
from appliance.paths import BoxPaths
from runtime.processes.ended import how_it_ended
from runtime.processes.kernel import tail

_OURS = ("MLFLOW_", "WANDB_")
# The part of the box's code that the exporter imports; the packages beside it are the other interpreter's own.
_CODE = ("appliance", "runtime")
# A server that is away costs seconds, not MLflow's minutes: whoever waits for it is told later anyway.
_QUIET = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "DO_NOT_TRACK": "true",
}


class ProcessFailed(RuntimeError):
    """The process said why."""


class TrackingProcess:
    """The exporter of one box. environment: of its processes; what it says of MLflow and W&B does not count, since the
    configuration alone decides what leaves the box."""

    def __init__(self, settings: TrackingSettings, paths: BoxPaths, environment: Mapping[str, str]):
        self._settings, self._paths = settings, paths
        self._environment = {name: text for name, text in environment.items() if not name.startswith(_OURS)}

    @property
    def status_file(self) -> Path:
        """What it has trouble with, in the form of `appliance.boot.box_state.read_troubles`."""
        return self._paths.tracking / "status.json"

    async def run(self) -> None:
        """Raises ProcessFailed or OSError when it has ended; whoever calls again starts it again."""
        self._paths.tracking.mkdir(mode=0o700, exist_ok=True)
        self.status_file.unlink(missing_ok=True)
        process = await self._start()
        try:
            if await process.wait() != 0:
                lines = tail(self._paths.logs / "tracking.log").splitlines()
                raise ProcessFailed(lines[-1] if lines else f"its process {how_it_ended(process.returncode or 0)}")
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        raise ProcessFailed("the exporter ended by itself")

    async def _start(self) -> asyncio.subprocess.Process:
        settings = {
            "database": str(self._paths.database),
            "folder": str(self._paths.tracking),
            "controller_socket": str(self._paths.controller_socket),
            **self._settings.model_dump(include={"mlflow_uri", "mlflow_experiment", "wandb_mode", "wandb_url"}),
            "wandb_dir": str(Path(self._settings.wandb_dir or self._paths.tracking).expanduser()),
        }
        secrets = read_credentials(self._settings.credentials_file)
        environment = {**self._environment, **_QUIET, **secrets, "PYTHONPATH": str(self._code())}
        arguments = ("-P", "-m", "appliance.tracking.main", "--settings", json.dumps(settings))
        python = str(Path(self._settings.python or sys.executable).expanduser())
        with open(self._paths.logs / "tracking.log", "ab") as output:
            return await ray_head.start_process(arguments, output, environment, python)

    def _code(self) -> Path:
        """A folder with our packages alone: among the box's own, another interpreter would find libraries that are not
        made for it."""
        folder, root = self._paths.run / "code", Path(appliance.__file__).parents[1]
        folder.mkdir(mode=0o700, exist_ok=True)
        for name in _CODE:
            link = folder / name
            link.unlink(missing_ok=True)
            link.symlink_to(root / name)
        return folder


def read_credentials(path: str | None) -> dict[str, str]:
    """The variables of MLflow and W&B in a file of lines NAME=VALUE. Raises ProcessFailed."""
    if path is None:
        return {}
    file = Path(path).expanduser()
    try:
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise ProcessFailed(f"[tracking] credentials_file {file} is open to other users: chmod 600 it")
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ProcessFailed(f"[tracking] credentials_file {file} cannot be read: {error}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        name, is_there, text = (part.strip() for part in line.partition("="))
        if not name or name.startswith("#"):
            continue
        if not is_there or not name.startswith(_OURS):
            raise ProcessFailed(
                f"[tracking] credentials_file {file}, line {number}: expected WANDB_API_KEY=..., "
                "MLFLOW_TRACKING_TOKEN=... or another variable of theirs"
            )
        found[name] = text.strip("'\"")
    return found
