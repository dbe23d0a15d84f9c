"""The controller process: the scheduler loop, the bus and the control routes on one asyncio loop, the store on threads.

    python -m appliance.controller.main --config FILE --ray-address HOST:PORT

It may be killed at any time: the gateways continue with their last table, engines and ranks live in Ray's actors, and
the next controller reads the store, observes the box, and continues. SIGTERM ends it in order: it suspends jobs and
writes data to disk that only shared memory holds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import ray
import uvicorn
from starlette.types import ASGIApp

from appliance import invitation
from appliance.backup import read_last
from appliance.cli.locate import BoxFile
from appliance.config import BoxConfig, load_resolved
from appliance.controller import alerts
from appliance.controller.access.limits import USAGE_EVERY_S, Disk, Quotas, Spending
from appliance.controller.app import create_app
from appliance.controller.bus.asking import Asking
from appliance.controller.bus.bus import Bus, first_generation
from appliance.controller.context.context import ControllerContext, Doctor, Scheduler
from appliance.controller.context.tasks import Tasks
from appliance.controller.devices.cordons import DeviceWatch
from appliance.controller.devices.mode import POWER_EVERY_S, EnergyMeter, PowerKeeper
from appliance.controller.engines.routing_table import BusRouting
from appliance.controller.engines.versions import AdapterSource, EngineSizes, LibraryOps, SettingsCheck, VersionProvider
from appliance.controller.grading.judging import Grading
from appliance.controller.grading.rollouts import Rollouts
from appliance.controller.interfaces.principal import Listener
from appliance.controller.jobs.events import JobEvents
from appliance.controller.models import lifecycle
from appliance.controller.scheduling.job_runs import TIDY_EVERY_S, JobRuns
from appliance.controller.scheduling.state_store import DemandLearning, QueuedDemand, SqliteStateStore, job_host_bytes
from appliance.memory.box_memory import LOOK_EVERY_S, BoxMemory, Means
from appliance.models.hub import HubSettings
from appliance.models.library import ModelLibrary
from appliance.node_config import node_config_of, weight_budget_bytes
from appliance.paths import BoxPaths
from appliance.store.box import SqliteJournal
from appliance.store.database import Database
from appliance.tiers.tiers import TierFlow, Tiers
from runtime.background_tasks import BackgroundTasks
from runtime.devices.kinds import kind_of
from runtime.logs import adopt_libraries, configure_logging
from runtime.network import private_socket
from runtime.processes.kernel import DiesAs, die_with_parent, dies_as, settle_garbage
from scheduler.core.errors import EffectFailed
from scheduler.core.workload import Device
from scheduler.devices.discovery import discover_devices
from scheduler.handover.effects import Box
from scheduler.loop.cluster_state import Inbox
from scheduler.loop.loop import SchedulerLoop
from scheduler.ray.effects import RayEffects
from scheduler.ray.nodes import NAMESPACE, Nodes
from train.graders.sandbox import GraderHosts
from weights.memory.store import WeightStore

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
        # `asyncio.run` would wait for threads that may work for minutes, although everything is saved.
        os._exit(code)


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts that the process runs and stops, except the parts in the routes' context."""

    context: ControllerContext
    states: SqliteStateStore
    runs: JobRuns
    flow: TierFlow
    adapters: AdapterSource
    energy: EnergyMeter


def build(config: BoxConfig, paths: BoxPaths) -> Parts:
    """Build everything in order of dependency. Ray must be initialised. Nothing runs or listens yet."""
    floor, asleep = config.box.serving_floor, config.scheduler.max_asleep_per_device
    db = Database(paths.database)
    weights = WeightStore(paths.shm_root, budget_bytes=weight_budget_bytes(config, paths))
    weights.sweep()
    home = discover_devices(config.box.devices)
    node_config = node_config_of(config, paths, home)
    background, inbox = BackgroundTasks(), Inbox()

    # Gateways and nodes.
    generation = first_generation(db)
    bus = Bus(paths.bus_socket, config.controller, first_generation=generation, background=background)
    bus.on_load = inbox.nudge
    spending = Spending(db, bus)
    health = DeviceWatch(db, config.scheduler, inbox.nudge)
    nodes = Nodes(node_config, health.node_changed, partial(invitation.removed, paths))

    # Engines: their sizes, their names, and their requests.
    def of_engines() -> list[Device]:
        """Return the home node's devices, and other nodes' devices of the same kind, which run what home prepared."""
        return [*home, *(device for device in nodes.devices if device.kind == home[0].kind)]

    sizes = EngineSizes(db, config.serve, of_engines, asleep)
    routing = BusRouting(bus, db, sizes, spending)
    transport = httpx.AsyncHTTPTransport(uds=str(paths.asking_socket), limits=httpx.Limits(max_connections=None))
    asking = Asking(db, transport, lambda: bus.table["models"], inbox.nudge)

    # Weights: shared memory, the tiers below it, and their users (engines and jobs).
    tiers = Tiers(weights, config.weights, paths)
    versions = VersionProvider(db, weights, tiers, config, home[0], sizes)
    flow = TierFlow(db, tiers, owner=paths.box_id, is_held=versions.holds)
    hub = HubSettings(allowed=not config.box.hub_offline, endpoint=config.box.hub_endpoint)
    library = ModelLibrary(paths.models, hub_settings=hub)

    # Jobs: their events, and samples for jobs that train on their model's own answers.
    events = JobEvents(db, paths.files, config.controller.organization)
    graders = GraderHosts()
    grading = Grading(db, graders, asking)
    rollouts = Rollouts(db, weights, paths.jobs, routing, asking, grading, inbox.nudge)
    runs = JobRuns(db, weights, paths.jobs, paths.shm_root, events, tiers, routing, inbox, rollouts)

    # The scheduler: its effects (Ray), what it reads in every round, and its journal.
    effects = RayEffects(nodes, routing, versions, runs, config.serve)
    means = Means(
        engine_bytes=versions.host_bytes,
        job_bytes=job_host_bytes,
        devices=nodes.device_count,
        nudge=inbox.nudge,
        on_enough=partial(inbox.retry, "memory"),
        save=tiers.nudge,
    )
    memory = BoxMemory(db, weights, nodes, config.box.memory_reserve_bytes, means)
    most, queued = config.serve.max_replicas, QueuedDemand(db, bus, routing, asking)
    learning = DemandLearning(routing.traffic, bus.take_arrivals, config.scheduler, len(home))
    states = SqliteStateStore(db, events, floor, most, routing, queued, learning, memory, weights, rollouts.starved)
    journal = SqliteJournal(db)
    loop = SchedulerLoop(
        effects,
        states,
        journal,
        inbox=inbox,
        config=config.scheduler,
        book_engine=memory.book_engine,
        too_large=memory.too_large,
    )

    # The routes' context, from the parts above.
    scheduler = Scheduler(loop, effects, journal, routing, db, bus, weights, memory, floor, config.scheduler)
    doctor = [sys.executable, "-P", "-m", "appliance.boot.doctor", "--runs", "--config", str(paths.config_file)]
    context = ControllerContext(
        db=db,
        tasks=Tasks(db),
        config=config.controller,
        files_dir=paths.files,
        jobs_dir=paths.jobs,
        batches_dir=paths.batches,
        uploads_dir=paths.uploads,
        box={
            "id": paths.box_id,
            "version": importlib.metadata.version("appliance"),
            "url": f"{config.url}/v1",
            "public_url": config.public_url,
            "data_dir": str(paths.data_dir),
        },
        background=background,
        bus=bus,
        spending=spending,
        quotas=Quotas(db, config.controller, Disk(paths.files, config.controller.disk_floor_bytes)),
        scheduler=scheduler,
        routing=routing,
        sizes=sizes,
        settings_check=SettingsCheck(sizes, node_config, home[0]),
        asking=asking,
        graders=graders,
        model_ops=LibraryOps(library, weights, flow, versions.let_go, nodes.forget),
        tiers=tiers,
        nodes=nodes,
        health=health,
        power=PowerKeeper(config.power.limits_w, db, home, kind_of(home[0].kind)),
        doctor=Doctor(*doctor),
        main_troubles=lambda: BoxFile.read(paths.data_dir).troubles,
        last_backup=partial(read_last, paths.last_backup),
        wandb_mode=config.tracking.wandb_mode,
    )
    adapters = AdapterSource(paths.adapter_socket, db, weights, tiers)
    energy = EnergyMeter(db, health.newest, scheduler.status)
    return Parts(context, states, runs, flow, adapters, energy)


async def _run(config: BoxConfig, paths: BoxPaths, ray_address: str) -> int:
    ray.init(address=ray_address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    adopt_libraries()
    # After ray.init, which installs its own SIGTERM handler that would exit in the middle of a hand-over.
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # More threads than asyncio's default: requests share them with copies that take minutes.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "controller"))

    parts = build(config, paths)
    context, loop, effects = parts.context, parts.context.scheduler.loop, parts.context.scheduler.effects
    # Before the first gateway connects, which would take an empty table of keys as their revocation.
    context.routing.models_changed()
    await parts.adapters.start()
    await context.bus.start()
    await context.nodes.connect()
    context.health.began({device.node for device in context.nodes.devices})
    context.health.check(context.nodes.devices)
    there = await _observed(effects)
    parts.states.after_restart(adopted={group.job_id for group in there.groups.values() if group.ended is None})
    await loop.adopt()  # before a route answers, and before validations resume

    app = create_app(context)
    listeners = (
        (_server(Listener(app)), paths.controller_socket),
        (_server(Listener(app, paths.gateway_token.read_text())), paths.gateway_socket),
    )
    # The controller cannot run without these: an error in one ends it, and the main process restarts it. The app's
    # lifespan is entered here, once: two servers share it.
    settle_garbage()
    async with app.router.lifespan_context(app), asyncio.TaskGroup() as tasks:
        deciding = tasks.create_task(loop.run(), name="scheduler loop")
        serving = [
            tasks.create_task(server.serve(sockets=[_listen(path)]), name=f"control routes on {path.name}")
            for server, path in listeners
        ]
        _keep(parts, config)
        await stop.wait()
        log.info("ending: suspending jobs and saving what only memory holds")
        for server, _ in listeners:
            server.should_exit = True
        loop.stop()
        await asyncio.wait({deciding, *serving})
    saved = await _save_everything(effects, parts.flow)
    await context.asking.close()
    await parts.adapters.stop()
    await context.bus.stop()
    ray.shutdown()
    context.db.close()
    return 0 if saved else 1


def _keep(parts: Parts, config: BoxConfig) -> None:
    """Start the tasks that run for the process's lifetime."""
    context, look_s = parts.context, config.scheduler.device_check_s
    scheduler = context.scheduler
    keep, keep_every = context.background.keep, context.background.keep_every
    keep("nodes that come and go", scheduler.effects.watch)
    keep_every("health of devices", partial(context.health.look, context.nodes.readings), look_s, at_once=True)
    keep_every("energy of devices", parts.energy.look, look_s)
    keep_every("power profile", context.power.look, POWER_EVERY_S, at_once=True)
    keep_every("host memory", lambda: scheduler.memory.look(scheduler.loop.status()), LOOK_EVERY_S, at_once=True)
    keep_every("what is degraded", partial(_report_degraded, context), DEGRADED_EVERY_S)
    keep_every("usage", context.spending.flush, USAGE_EVERY_S)
    tidy = partial(parts.runs.tidy, scheduler.unload_adapters, partial(lifecycle.remove_bytes, context))
    keep_every("snapshots of finished jobs", tidy, TIDY_EVERY_S, at_once=True)
    keep("tiers", parts.flow.run)
    if config.alerts.is_on:
        keep_every(alerts.TASK, partial(alerts.look, context, config.alerts), alerts.LOOK_EVERY_S, at_once=True)


async def _report_degraded(context: ControllerContext) -> None:
    others = {trouble["name"].partition(":")[0] for trouble in context.main_troubles()}
    context.bus.publish(degraded=sorted({*context.background.names(), *others}))


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
    """Leaves signals to the controller: uvicorn would stop first and then re-raise the signal."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


async def _observed(effects: RayEffects) -> Box:
    """Wait until the box can be observed: a hanging supervisor is killed within a minute."""
    while True:
        try:
            return await effects.observe()
        except EffectFailed as error:
            log.warning("the box cannot be observed yet: %s", error)
            await asyncio.sleep(LOOK_AGAIN_S)


async def _save_everything(effects: RayEffects, flow: TierFlow) -> bool:
    """Suspend jobs and write versions to disk. Returns False if versions remain only in shared memory, for the next
    start."""
    for group in (await _observed(effects)).groups.values():
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
