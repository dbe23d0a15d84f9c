"""The controller process: the scheduler loop, the bus and the control routes on one asyncio loop, the store on threads.

    python -m appliance.controller.main --config FILE --ray-address HOST:PORT

It may be killed at any time: the gateways continue with their last table, engines and ranks live in Ray's actors, and
the next controller reads the store, observes the world, and continues. SIGTERM ends it in order: it suspends jobs and
writes to disk what only shared memory holds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import ray
import uvicorn
from starlette.types import ASGIApp

from appliance.boot.ray_head import NAMESPACE
from appliance.config import BoxConfig, load_resolved
from appliance.controller.access.spending import USAGE_EVERY_S
from appliance.controller.app import create_app
from appliance.controller.assembly import Parts, assemble
from appliance.controller.devices import copy_limit
from appliance.controller.devices.power import LOOK_EVERY_S as POWER_EVERY_S
from appliance.controller.http.peers import FromBox, FromGateways
from appliance.controller.interfaces.errors import OperationFailed
from appliance.controller.models import removal
from appliance.memory.host_memory import LOOK_EVERY_S
from appliance.paths import BoxPaths
from appliance.store.objects import jobs
from appliance.tiers.flow import TierFlow
from appliance.wiring.box_status import RSS_EVERY_S
from appliance.wiring.job_runs import TIDY_EVERY_S
from runtime.logs import adopt_libraries, configure_logging
from runtime.network.sockets import private_socket
from runtime.processes import garbage
from runtime.processes.kernel import die_with_parent
from runtime.processes.oom import DiesAs, dies_as
from scheduler.core.errors import EffectFailed
from scheduler.handover.effects import Observed
from scheduler.ray.effects import RayEffects

log = logging.getLogger(__name__)

SUSPEND_S = 60.0
THREADS = 64
LOOK_AGAIN_S = 1.0
DEGRADED_EVERY_S = 2.0
# Limit for open requests when the controller ends: a client that follows a background response would block the exit.
ANSWERS_S = 10


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.controller.main", description=__doc__)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--ray-address", required=True)
    options = parser.parse_args(argv)
    die_with_parent()
    dies_as(DiesAs.CONTROLLER)
    config = load_resolved(options.config)
    configure_logging("controller", config.box.log_level)
    asyncio.run(_run_and_exit(config, BoxPaths.of(Path(config.box.data_dir)), options.ray_address))
    raise AssertionError("the process has ended before this")


async def _run_and_exit(config: BoxConfig, paths: BoxPaths, ray_address: str) -> None:
    code = 1
    try:
        code = await _run(config, paths, ray_address)
    except Exception:  # noqa: BLE001 - logged, and the process ends with it
        log.exception("the controller ends with an error; the main process restarts it")
    finally:
        logging.shutdown()
        # Here, for `asyncio.run` would wait for its threads: one that makes a model has minutes to go, and the main
        # process would kill what has long saved everything. Nor are idle threads of anyio (under Starlette's file
        # responses) daemons.
        os._exit(code)


async def _run(config: BoxConfig, paths: BoxPaths, ray_address: str) -> int:
    ray.init(address=ray_address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    adopt_libraries()
    # After ray.init, which installs its own SIGTERM handler that would exit in the middle of a hand-over.
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # More than asyncio's own number, a few more than cores: reads of requests share them with copies that take minutes.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "controller"))

    parts = assemble(config, paths)
    # Before the first gateway connects: it would read a table without its keys as a revocation of all of them.
    parts.routing.refresh()
    parts.context.publish_keys()
    await parts.adapters.start()
    await parts.bus.start()
    await parts.nodes.connect()
    parts.health.began({device.node for device in parts.nodes.devices})
    parts.health.found(parts.nodes.devices)
    there = await _observed(parts.effects)
    parts.states.after_restart(adopted={group.job_id for group in there.groups if group.ended is None})
    await parts.loop.adopt()  # before a route answers, and before validations of jobs go on

    app = create_app(parts.context)
    parts.runs.answered_by(
        app.state.rollouts, parts.context.scheduler.unload_adapters, partial(removal.remove_bytes, parts.context)
    )
    listeners = (
        (_server(FromBox(app)), paths.controller_socket),
        (_server(FromGateways(app, paths.gateway_token.read_text())), paths.gateway_socket),
    )
    # The controller cannot run without these: an error in one ends it, and the main process restarts it. The app's
    # lifespan is entered here, once: two servers share it.
    garbage.settle()
    async with app.router.lifespan_context(app), asyncio.TaskGroup() as tasks:
        deciding = tasks.create_task(parts.loop.run(), name="scheduler loop")
        serving = [
            tasks.create_task(server.serve(sockets=[_listen(path)]), name=f"control routes on {path.name}")
            for server, path in listeners
        ]
        _keep(parts, config)
        await stop.wait()
        log.info("ending: suspending jobs and saving what only memory holds")
        for server, _ in listeners:
            server.should_exit = True
        parts.loop.stop()
        await asyncio.wait({deciding, *serving})
        await parts.background.stop()
    saved = await _save_everything(parts.effects, parts.flow)
    await parts.asking.close()
    await parts.sampling.close()
    await parts.adapters.stop()
    await parts.bus.stop()
    ray.shutdown()
    parts.db.close()
    return 0 if saved else 1


def _keep(parts: Parts, config: BoxConfig) -> None:
    """Start the tasks that run for the process's lifetime."""
    keep, keep_every = parts.background.keep, parts.background.keep_every
    keep("nodes that come and go", parts.effects.watch)
    keep_every("health of devices", parts.health.look, config.scheduler.device_check_s, at_once=True)
    keep_every("energy of devices", parts.energy.look, config.scheduler.device_check_s)
    keep_every("power profile", parts.power.look, POWER_EVERY_S, at_once=True)
    keep_every("resident memory of engines", parts.box_status.read_memory, RSS_EVERY_S, at_once=True)
    keep_every("host memory", parts.memory.look, LOOK_EVERY_S, at_once=True)
    keep_every("what is degraded", partial(_report_degraded, parts), DEGRADED_EVERY_S)
    keep_every("usage", parts.spending.flush, USAGE_EVERY_S)
    keep_every("snapshots of finished jobs", parts.runs.tidy, TIDY_EVERY_S, at_once=True)
    keep("tiers", parts.flow.run)
    if every_s := config.observability.profile_jobs_every_s:
        keep_every("profiles of jobs", partial(_profile_jobs, parts), every_s)
    if copy_limit.read(parts.db)["measured_s"] is None:
        keep("limits of the hardware", partial(copy_limit.measure, parts.db, {parts.devices[0].kind}))


async def _profile_jobs(parts: Parts) -> None:
    """A step of each running job."""
    for row in jobs.list_in_phase(parts.db, "running"):
        try:
            await parts.context.scheduler.profile_job(row.id, 1)
        except OperationFailed as error:
            log.info("no profile: %s", error, extra={"job_id": row.id})  # it ends, or moves


async def _report_degraded(parts: Parts) -> None:
    others = {trouble["name"].partition(":")[0] for trouble in parts.context.main_troubles()}
    table = {"table of models"} if parts.bus.is_table_too_long else set()
    parts.bus.set_degraded(sorted({*parts.background.names(), *others, *table}))


def _server(app: ASGIApp) -> uvicorn.Server:
    # There is no proxy in front of it, and no WebSocket client.
    return _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            http="httptools",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            timeout_graceful_shutdown=ANSWERS_S,
        )
    )


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would stop first and re-raise the signal when it is done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _observed(effects: RayEffects) -> Observed:
    """The observed state, as soon as it can be read: a hanging supervisor is killed within a minute."""
    while True:
        try:
            return await effects.observe()
        except EffectFailed as error:
            log.warning("the box cannot be observed yet: %s", error)
            await asyncio.sleep(LOOK_AGAIN_S)


async def _save_everything(effects: RayEffects, flow: TierFlow) -> bool:
    """False if something is in shared memory only, which is then kept for the next start."""
    for group in (await _observed(effects)).groups:
        # A job that can no longer be suspended resumes from its last snapshot.
        with contextlib.suppress(TimeoutError, EffectFailed):
            async with asyncio.timeout(SUSPEND_S):
                await effects.suspend_group(group.job_id)
    saved = await flow.finish()
    await effects.stop_everything()
    return saved


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = private_socket(path)
    listener.listen(512)
    return listener


if __name__ == "__main__":
    sys.exit(main())
