"""The box's main process: boot, watch, end in order.

    python -m appliance.boot.main up --config FILE

Every process below has asked the kernel to die with this one, so `kill -9` of it leaves nothing behind except the
versions and snapshots in shared memory, which the next `up` finds again.
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
"""One more start does not help a process that failed so often in a row: the box ends, and systemd starts all again."""
GATEWAY_GRACE_S, CONTROLLER_END_S, RAY_END_S = 5.0, 120.0, 20.0
_QUIET = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "DO_NOT_TRACK": "true",
}


class BoxError(RuntimeError):
    """The box could not start; the message says why and what to do."""


class BoxState:
    """`box.json`: the state of this process, for the commands.

    Fields: pid, url, controller_socket, state (starting|ready|stopping|stopped|failed|killed), message,
    started_s (Unix time), first_key_file (of a box that had no key), troubles (of the supervised processes, in the form
    of `BackgroundTasks.degraded`)."""

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
            if is_first:  # no command would find this box
                raise BoxError(f"{self._path} cannot be written: {error}") from error
            # The disk is full. The caller keeps the box's processes alive and must not end because of that.
            log.warning("%s could not be written: %s", self._path, error)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.boot.main", description=__doc__)
    parser.add_argument("command", choices=["up"])
    parser.add_argument("--config", required=True, type=Path, help="the resolved configuration, JSON")
    parser.add_argument("--show", choices=["table", "json"], help="print in this form where the ready box answers")
    options = parser.parse_args(argv)
    config = load_resolved(options.config)
    paths = BoxPaths.of(Path(config.box.data_dir))
    os.umask(0o077)  # whatever is made here is the owner's alone; some libraries make files open to all
    configure_logging("main")
    state = BoxState(paths.state_file)
    try:
        paths.create()
        with locked(paths):
            return asyncio.run(_run(config, paths, state, options.show))
    except BlockingIOError:
        log.error("a box already runs on %s; `appliance down` stops it", paths.data_dir)
        return 5
    except (UnsafeFolder, BoxError, ray_head.RayStartError, InvitationError) as error:
        log.error("the box did not start: %s", error)
        with suppress(BoxError):  # the folder may be what is wrong
            state.update(state="failed", message=str(error))
        return 1


async def _run(config: BoxConfig, paths: BoxPaths, state: BoxState, show: str | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask_to_stop() -> None:
        if stop.is_set():
            # Somebody asked twice and does not want to wait. The kernel ends everything below with this process.
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
    """The endpoint as this machine reaches it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.box.host, config.box.host)
    return f"{config.scheme}://{host}:{config.box.port}"


def port_taken(host: str, port: int) -> str:
    """Why this box cannot listen there and what to do; "" if it can."""
    try:
        check_free(host, port)
    except OSError as error:
        return (
            f"port {port} of {host!r} cannot be listened on: {error.strerror} (`ss -ltnp` names the process); choose "
            "another with --port or --host ([box] port, host)"
        )
    return ""


def make_first_key(paths: BoxPaths) -> bool:
    """Make the first key of a box that has none and write it into its file; True if it did. Raises OSError,
    StoreError, sqlite3.Error.

    The key goes nowhere else: what this process prints may end in a journal.
    """
    with Database(paths.database) as db, db.transaction():
        if keys.list_all(db):
            return False
        row, key = keys.create(db, "first", ["inference", "fine_tuning", "admin"])
        AUDIT.insert(db, AuditRow("key.create", row.id, created_s=row.created_s))
        replace_file(paths.first_key, f"{key}\n".encode(), durable=True)
        return True


class Box:
    """Ray, the controller and the gateway of one box, each a supervised process. When one of them cannot be kept
    running it calls `stop`, and `hopeless` says why."""

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
            # The actors died with Ray; the controller starts again from the database, as after any crash.
            self._say(message)
            self._controller.restart()

        self._ray = Supervised("ray", self._start_ray, background, on_ray_change)
        self._controller = Supervised("controller", self._start_controller, background, self._say, answers)
        self._gateway = Supervised("gateway", self._start_gateway, background, self._say, health)

    async def start(self) -> None:
        """Start all processes; return when the endpoint answers. Raises BoxError or RayStartError."""
        if leftovers := clear_leftovers(self._paths):
            self._say(f"ended {len(leftovers)} processes that an earlier run left behind")
        # Check before anything starts: without its port the box is useless, and its holder might answer for us.
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
            raise BoxError(f"the first key cannot be made: {error}") from error
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
        """Stop everything in order and give shared memory back. Returns what went wrong, "" if nothing did."""
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
            return "" if well else "something had to be forced; see the logs"
        shutil.rmtree(self._paths.run, ignore_errors=True)
        if not self._controller_answered:  # what an earlier run left in shared memory is as it was
            return ""
        fault = (
            f"not all that only shared memory holds was saved ({self._paths.logs / 'controller.log'} says why): "
            f"{self._paths.shm_root} is kept for the next `appliance up`, and would be lost in a reboot"
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
        # Each Ray has its own address: with the address of the one before the controller waits for half a minute.
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
                self.hopeless = f"the box ended: {process.name} failed {HOPELESS} times without a steady run"
                self._stop()

    async def _wait_for(self, process: Supervised) -> None:
        """Return when it answers with 200. Raises BoxError."""
        assert process.probe is not None
        timeout_s, began_s = self._config.box.start_timeout_s, time.monotonic()
        while True:
            with suppress(httpx.HTTPError):  # it does not listen yet
                if (await process.probe.ask()).status_code == 200:
                    return
            why = ""
            if process.failures >= 3:
                why = "ended three times while it started"
            elif time.monotonic() - began_s > timeout_s:
                why = f"did not come up within {timeout_s:.0f} s ([box] start_timeout_s; a slow machine needs more)"
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
    Raises ProcessEnded or OSError when it has ended; whoever calls again starts it again.

    What the environment says of MLflow and W&B does not count: the configuration alone decides what leaves the box.
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
