"""The box's main process: starts, supervises and stops the box's other processes.

    python -m appliance.boot.main up --config FILE

The kernel kills every child process when this one dies. So `kill -9` leaves nothing behind except the versions and
snapshots in shared memory, which the next `up` finds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx

import appliance
from appliance.boot import ray_head
from appliance.boot.supervised_process import LOOK_EVERY_S, Probe, ProcessEnded, Supervised, clear_leftovers, locked
from appliance.cli.command import Session
from appliance.cli.commands.box import show_ready
from appliance.cli.locate import BoxFile
from appliance.config import BoxConfig, TrackingSettings, load_resolved
from appliance.invitation import InvitationError, prepare
from appliance.paths import BoxPaths, UnsafeFolder
from appliance.store import keys
from appliance.store.database import Database, StoreError
from appliance.store.rows import AUDIT, AuditRow
from runtime.background_tasks import BackgroundTasks
from runtime.devices.kind import DevicesRefused
from runtime.logs import configure_logging, tail
from runtime.network import check_free
from runtime.processes.kernel import how_it_ended
from scheduler.core.workload import Device
from scheduler.devices.discovery import check_build, discover_devices, foreign_use
from weights.format.names import replace_file

log = logging.getLogger("appliance.boot.main")

TROUBLES_EVERY_S = 2.0
HOPELESS = 50
"""After so many failures of a process in a row the box ends, and systemd restarts all of it."""
GATEWAY_GRACE_S, CONTROLLER_END_S, RAY_END_S = 5.0, 120.0, 20.0
_QUIET = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "DO_NOT_TRACK": "true",
}


class BoxError(RuntimeError):
    """The box cannot start; the message has the reason and what to do."""


class BoxState:
    """The file `box.json`: the state of this process, which commands read.

    Fields: pid, url, controller_socket, state (starting|ready|stopping|stopped|failed|killed), message, started_s (Unix
    time), first_key_file (if this start made the first key), troubles (of supervised processes, in the form of
    `BackgroundTasks.degraded`)."""

    def __init__(self, path: Path):
        self._path = path
        self.fields: dict[str, Any] = {}

    def update(self, **fields: Any) -> None:
        """Write the changed fields. Raises BoxError if the first write fails."""
        if (changed := {**self.fields, **fields}) == self.fields:
            return
        is_first, self.fields = not self.fields, changed
        try:
            replace_file(self._path, json.dumps(self.fields).encode())
        except OSError as error:
            if is_first:  # without this file, commands cannot find the box
                raise BoxError(f"{self._path} cannot be written: {error}") from error
            # The disk may be full. This must not end the caller, which keeps the box's processes alive.
            log.warning("%s could not be written: %s", self._path, error)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.boot.main", description=__doc__)
    parser.add_argument("command", choices=["up"])
    parser.add_argument("--config", required=True, type=Path, help="JSON file with the resolved configuration")
    parser.add_argument("--show", choices=["table", "json"], help="print the endpoint once the box is ready")
    options = parser.parse_args(argv)
    config = load_resolved(options.config)
    paths = BoxPaths.of(Path(config.box.data_dir))
    os.umask(0o077)  # makes new files private; some libraries would create files that all users can read
    configure_logging("main")
    state = BoxState(paths.state_file)
    try:
        paths.create()
        with locked(paths):
            return asyncio.run(_run(config, paths, state, options.show))
    except BlockingIOError:
        log.error("a box is already running on %s; `appliance down` stops it", paths.data_dir)
        return 5
    except (UnsafeFolder, BoxError, ray_head.RayStartError, InvitationError) as error:
        log.error("the box did not start: %s", error)
        with suppress(BoxError):  # the state's folder itself may be the problem
            state.update(state="failed", message=str(error))
        return 1


async def _run(config: BoxConfig, paths: BoxPaths, state: BoxState, show: str | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask_to_stop() -> None:
        if stop.is_set():
            # At a second signal, exit without waiting. The kernel kills all child processes with this one.
            state.update(state="killed", message="killed by a second signal; `appliance up` continues from here")
            os.kill(os.getpid(), signal.SIGKILL)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, ask_to_stop)

    endpoint = {"pid": os.getpid(), "url": local_url(config), "controller_socket": str(paths.controller_socket)}
    state.update(state="starting", message="", started_s=time.time(), **endpoint)
    box = Box(config, paths, state, stop.set)
    fault = ""
    try:
        starting = asyncio.create_task(box.start())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            if show:
                show_ready(Session(None, show == "json"), BoxFile(paths.data_dir, state.fields), detached=False)
            await stopping
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    finally:
        fault = await box.end() or box.hopeless
        state.update(state="stopped", message=fault, pid=None)
    return 1 if fault else 130 if starting.cancelled() else 0


def local_url(config: BoxConfig) -> str:
    """Return the endpoint's URL for clients on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.box.host, config.box.host)
    return f"{config.scheme}://{host}:{config.box.port}"


def port_taken(host: str, port: int) -> str:
    """Return why this box cannot listen on host:port, and what to do; "" if it can."""
    try:
        check_free(host, port)
    except OSError as error:
        return (
            f"cannot listen on port {port} of {host!r}: {error.strerror} (`ss -ltnp` shows the process); choose "
            "another one with --port or --host ([box] port, host)"
        )
    return ""


def make_first_key(paths: BoxPaths) -> bool:
    """Create the first key of a box without keys and write the key to its file; True if a key was created. Raises
    OSError, StoreError, sqlite3.Error.

    The key is never printed, because a journal may record the output.
    """
    with Database(paths.database) as db, db.transaction():
        if keys.list_all(db):
            return False
        row, key = keys.create(db, "first", ["inference", "fine_tuning", "admin"])
        AUDIT.insert(db, AuditRow("key.create", row.id, created_s=row.created_s))
        replace_file(paths.first_key, f"{key}\n".encode(), durable=True)
        return True


class Box:
    """Runs Ray, the controller and the gateway of one box, each as a supervised process. When a process fails too
    often, the box calls `stop` and sets `hopeless` to the reason."""

    def __init__(self, config: BoxConfig, paths: BoxPaths, state: BoxState, stop: Callable[[], None] = lambda: None):
        self._config, self._paths, self._state, self._stop = config, paths, state, stop
        self.hopeless = ""
        self._controller_answered = False
        joinable = config.box.node_address is not None
        if joinable:
            prepare(paths, config.box.node_address, config.box.node_port)
        self._environment = ray_head.box_environment(paths, config.box.start_timeout_s, joinable=joinable)
        self._background = BackgroundTasks()
        self._ray_address = ""
        self._devices: tuple[Device, ...] = ()
        background, answers = self._background, Probe("http://box", "/admin/v1/mode", str(paths.controller_socket))
        health = Probe(local_url(config), "/health")

        def on_ray_change(message: str) -> None:
            # All actors died with Ray. The controller restarts from the database, as after any crash.
            self._say(message)
            self._controller.restart()

        self._ray = Supervised("ray", self._start_ray, background, on_ray_change)
        self._controller = Supervised("controller", self._start_controller, background, self._say, answers)
        self._gateway = Supervised("gateway", self._start_gateway, background, self._say, health)

    async def start(self) -> None:
        """Start all processes; return when the endpoint answers. Raises BoxError or RayStartError."""
        if leftovers := clear_leftovers(self._paths):
            self._say(f"killed {len(leftovers)} processes that an earlier run left behind")
        # Check first: without its port the box is useless, and another process on the port could answer in its place.
        if reason := port_taken(self._config.box.host, self._config.box.port):
            raise BoxError(reason)
        try:
            self._devices = discover_devices(self._config.box.devices)
            check_build(self._devices)
        except DevicesRefused as error:
            raise BoxError(str(error)) from error
        for message in foreign_use(self._devices):
            self._say(message)
        replace_file(self._paths.gateway_token, secrets.token_hex(32).encode())
        try:
            has_first_key = make_first_key(self._paths)
        except (OSError, StoreError, sqlite3.Error) as error:
            raise BoxError(f"cannot create the first key: {error}") from error
        self._say("starting Ray")
        await self._ray.begin()
        self._say("starting the controller")
        await self._controller.begin()
        await self._wait_for(self._controller)
        self._controller_answered = True
        self._say("starting the gateway")
        await self._gateway.begin()
        await self._wait_for(self._gateway)
        file = str(self._paths.first_key) if has_first_key else None
        self._state.update(state="ready", message="ready", first_key_file=file)
        for process in (self._controller, self._gateway):
            self._background.keep_every(f"pulse of the {process.name}", process.look, LOOK_EVERY_S)
        self._background.keep_every("box.json", self._report_troubles, TROUBLES_EVERY_S)
        for tracker in self._config.tracking.trackers:
            exporter = partial(run_exporter, tracker, self._config.tracking, self._paths, self._environment)
            self._background.keep(f"tracking: {tracker}", exporter)

    async def end(self) -> str:
        """Stop all processes in order and release shared memory. Returns the errors as text, "" if there are none."""
        await self._background.stop()
        self._state.update(state="stopping", message="finishing requests")
        well = await self._gateway.end(self._config.gateway.shutdown_s + GATEWAY_GRACE_S)
        self._state.update(state="stopping", message="suspending jobs and saving what only memory holds")
        saved = await self._controller.end(CONTROLLER_END_S)
        self._state.update(state="stopping", message="stopping Ray")
        await self._ray.end(RAY_END_S)
        clear_leftovers(self._paths)
        ray_head.remove_files(self._paths)
        if saved:
            shutil.rmtree(self._paths.shm_root, ignore_errors=True)
            return "" if well else "the gateway did not stop cleanly; see its log"
        shutil.rmtree(self._paths.run, ignore_errors=True)
        if not self._controller_answered:  # this run has not changed shared memory
            return ""
        fault = (
            f"some data in shared memory was not saved to disk (see {self._paths.logs / 'controller.log'}): "
            f"{self._paths.shm_root} is kept for the next `appliance up`, but a reboot would lose it"
        )
        log.error(fault)
        return fault

    async def _start_ray(self) -> asyncio.subprocess.Process:
        box = self._config.box
        process, self._ray_address = await ray_head.start(
            self._paths,
            ray_head.head(box.node_address, box.node_port),
            [device.id for device in self._devices],
            self._environment,
            box.start_timeout_s,
        )
        return process

    async def _start_controller(self) -> asyncio.subprocess.Process:
        # A restarted Ray has a new address; with the old address, the controller would wait for half a minute.
        await self._ray.runs.wait()
        options = ("--config", str(self._paths.config_file), "--ray-address", self._ray_address)
        return await self._python("controller", "-P", "-m", "appliance.controller.main", *options)

    async def _start_gateway(self) -> asyncio.subprocess.Process:
        gateway = self._config.gateway.model_dump() | {
            "host": self._config.box.host,
            "port": self._config.box.port,
            "controller_socket": str(self._paths.gateway_socket),
            "token_path": str(self._paths.gateway_token),
            "bus_socket": str(self._paths.bus_socket),
            "private_socket": str(self._paths.asking_socket),
            "log_path": str(self._paths.logs / "access.log"),
            "otlp_endpoint": self._config.observability.otlp_endpoint,
            "stores_responses": self._config.controller.responses_kept_days > 0,
        }
        file = self._paths.run / "gateway.json"
        replace_file(file, json.dumps(gateway).encode())
        return await self._python("gateway", "-P", "-m", "appliance.gateway.main", "--config", str(file))

    async def _python(self, name: str, *arguments: str) -> asyncio.subprocess.Process:
        with open(self._paths.logs / f"{name}.log", "ab") as output:
            return await ray_head.start_process(arguments, output, self._environment)

    async def _report_troubles(self) -> None:
        self._state.update(troubles=self._background.degraded())
        for process in (self._ray, self._controller, self._gateway):
            if process.failures >= HOPELESS:
                self.hopeless = f"the box ended: {process.name} failed {HOPELESS} times in a row"
                self._stop()

    async def _wait_for(self, process: Supervised) -> None:
        """Wait until the process answers with status 200. Raises BoxError."""
        assert process.probe is not None
        timeout_s, began_s = self._config.box.start_timeout_s, time.monotonic()
        while True:
            with suppress(httpx.HTTPError):  # the process does not listen yet
                if (await process.probe.ask()).status_code == 200:
                    return
            why = ""
            if process.failures >= 3:
                why = "failed three times during its start"
            elif time.monotonic() - began_s > timeout_s:
                why = f"did not start within {timeout_s:.0f} s (a slow machine needs a larger [box] start_timeout_s)"
            if why:
                log_path = self._paths.logs / f"{process.name}.log"
                raise BoxError(f"the {process.name} {why}; {log_path} ends with:\n{tail(log_path)}")
            await asyncio.sleep(0.05)

    def _say(self, message: str) -> None:
        self._state.update(message=message)
        log.info(message)


async def run_exporter(
    tracker: Literal["mlflow", "wandb"], settings: TrackingSettings, paths: BoxPaths, environment: Mapping[str, str]
) -> None:
    """Run an exporter to an experiment tracker (`appliance/tracking.py`) in the interpreter that has its library.
    Raises ProcessEnded or OSError when the exporter ends; the caller may restart it.

    Environment variables of MLflow and W&B are removed: only the configuration decides what leaves the box.
    """
    paths.tracking.mkdir(mode=0o700, exist_ok=True)
    arguments = {
        **settings.model_dump(),
        "tracker": tracker,
        "database": str(paths.database),
        "folder": str(paths.tracking),
        "wandb_dir": str(Path(settings.wandb_dir or paths.tracking).expanduser()),
    }
    foreign = ("MLFLOW_", "WANDB_", "PYTHONPATH")
    variables = {name: text for name, text in environment.items() if not name.startswith(foreign)} | _QUIET
    script, log = str(Path(appliance.__file__).with_name("tracking.py")), paths.logs / f"tracking-{tracker}.log"
    python = str(Path(settings.python or sys.executable).expanduser())
    with open(log, "ab") as output:
        process = await ray_head.start_process(("-P", script, json.dumps(arguments)), output, variables, python)
    try:
        await process.wait()
        lines = tail(log).splitlines()
        raise ProcessEnded(lines[-1] if lines else f"its process {how_it_ended(process.returncode or 0)}")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


if __name__ == "__main__":
    sys.exit(main())
