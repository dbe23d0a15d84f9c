"""The controller process: the store, the scheduler loop, the bus and the control routes, on one asyncio loop.

    python -m appliance.controller.main --config-json JSON --ray-address HOST:PORT

It can be killed at any time: the gateways go on with their last table, engines and ranks live in Ray's actors, and the
next controller reads the store, observes what is, and goes on. SIGTERM is the other way to end: jobs are suspended,
and what only shared memory holds is written to disk.
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
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import ray
import uvicorn
from starlette.types import ASGIApp

from appliance.boot.box_state import read_troubles
from appliance.boot.ray_head import NAMESPACE
from appliance.config import BoxConfig, load_resolved
from appliance.controller.access.spending import USAGE_EVERY_S, Spending
from appliance.controller.app import create_app
from appliance.controller.bus.bus import Bus, first_generation
from appliance.controller.context.context import ControllerContext
from appliance.controller.devices import copy_limit
from appliance.controller.http.peers import FromBox, FromGateways
from appliance.controller.jobs.events import JobEvents
from appliance.controller.models.capacity import BoxFacts
from appliance.models.hub import HubSettings
from appliance.models.library import ModelLibrary
from appliance.paths import BoxPaths
from appliance.store.database import Database
from appliance.tiers.flow import TierFlow
from appliance.tiers.levels import make_levels
from appliance.tiers.restore import TierReturn
from appliance.tiers.tiers import Tiers
from appliance.wiring.adapter_source import AdapterSource
from appliance.wiring.batch_engines import SocketEngines, circumstances
from appliance.wiring.demand_learning import DemandLearning
from appliance.wiring.device_watch import DeviceWatch
from appliance.wiring.handover_trigger import HandoverTrigger
from appliance.wiring.host_memory import LOOK_EVERY_S, HostMemory, Means, both
from appliance.wiring.job_admission import JobAdmission
from appliance.wiring.job_runs import TIDY_EVERY_S, JobRuns
from appliance.wiring.journal import SqliteJournal
from appliance.wiring.model_work import LibraryOps
from appliance.wiring.node_config import node_config_of, weight_budget_bytes
from appliance.wiring.routing_table import BusRouting
from appliance.wiring.scheduler_port import RSS_EVERY_S, LoopPort
from appliance.wiring.state_store import SqliteStateStore
from appliance.wiring.version_provider import VersionProvider
from runtime.background_tasks import BackgroundTasks
from runtime.logs import adopt_libraries, configure_logging
from runtime.processes.kernel import die_with_parent
from runtime.processes.oom import DiesAs, dies_as
from runtime.sockets import owner_only
from scheduler.core.errors import EffectFailed
from scheduler.core.inventory import Device
from scheduler.devices.discovery import discover_devices
from scheduler.handover.effects import Observed
from scheduler.handover.ports import SystemClock
from scheduler.loop.loop import SchedulerLoop
from scheduler.ray.effects import RayEffects
from scheduler.ray.nodes import Nodes
from weights.memory.store import WeightStore

log = logging.getLogger(__name__)

SUSPEND_S = 60.0
LOOK_AGAIN_S = 1.0
DEGRADED_EVERY_S = 2.0
# What is still being answered when the controller ends: who follows a response in background would keep it.
ANSWERS_S = 10


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.controller.main", description=__doc__)
    parser.add_argument("--config-json", required=True)
    parser.add_argument("--ray-address", required=True)
    options = parser.parse_args(argv)
    die_with_parent()
    dies_as(DiesAs.CONTROLLER)
    config = load_resolved(options.config_json)
    configure_logging("controller", config.box.log_level)
    code = 1
    try:
        code = asyncio.run(_run(config, BoxPaths.of(Path(config.box.data_dir)), options.ray_address))
    except Exception:  # noqa: BLE001 - logged, and the process ends with it
        log.exception("the controller ends with an error; the main process starts it again")
    finally:
        logging.shutdown()
        # Idle worker threads of anyio (under Starlette's file responses) are no daemons, and would keep us here.
        os._exit(code)


async def _run(config: BoxConfig, paths: BoxPaths, ray_address: str) -> int:
    ray.init(address=ray_address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    adopt_libraries()
    # After ray.init, which puts a SIGTERM handler of its own that would leave in the middle of a hand-over.
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    db = Database(paths.database)
    db.keep_reserve(config.controller.database_reserve_bytes)
    store = _open_store(config, paths)
    devices = discover_devices(config.box.devices)
    background = BackgroundTasks()
    spending = Spending(db, lambda: context.publish_keys())
    bus = Bus(
        paths.bus_socket,
        config.controller,
        first_generation=first_generation(db),
        on_load=lambda _: load_changed(),
        on_table=lambda: lines.load_changed(),
        on_usage=spending.take,
        background=background,
    )

    def load_changed() -> None:
        loop.nudge()
        lines.load_changed()

    routing = BusRouting(
        bus,
        db,
        config.gateway.holds.hold_s,
        config.serve.max_model_len,
        lambda model, version: loop.trouble(model, version),
    )
    lines = SocketEngines(
        bus,
        config.controller,
        config.gateway.limits,
        routing.host,
        lambda: circumstances(db, config.box.serving_floor, loop.status()["devices"]),
        lambda: loop.nudge(),
    )
    tiers = Tiers(db, store, make_levels(config.weights, paths), jobs_dir=paths.jobs)
    flow = TierFlow(db, tiers, owner=paths.box_id, is_held=lambda name: provider.holds(name), background=background)
    back = TierReturn(tiers)
    provider = VersionProvider(db, store, back, config, devices[0])
    library = ModelLibrary(
        paths.models, hub_settings=HubSettings(allowed=not config.box.hub_offline, endpoint=config.box.hub_endpoint)
    )
    events = JobEvents(db, paths.files, config.controller.organization)
    runs = JobRuns(db, store, paths.jobs, paths.shm_root, events, tiers, back, lambda: port.nudge("published"))
    nodes = Nodes(node_config_of(config, paths, devices))
    effects = RayEffects(nodes, routing, provider, runs, config.serve)

    def models_changed() -> None:
        routing.refresh()
        context.publish_keys()  # a key may call what its jobs made

    memory = HostMemory(db, store, config.box.memory_reserve_bytes)
    admission = JobAdmission(db, store, _facts(devices, store))
    demand_learning = DemandLearning(routing.traffic, config.scheduler, len(devices))
    states = SqliteStateStore(
        db,
        events,
        lambda model: lines.demand(model, routing.demand(model)),
        config.box.serving_floor,
        len(devices),
        config.serve,
        models_changed,
        both(memory.waits_for, admission.waits_for),
        lambda deployments: memory.bounded(demand_learning.learned(deployments)),
        nodes.alike,
        lambda: memory.sleepers,
    )
    trigger = HandoverTrigger(lambda: loop.status())
    journal = SqliteJournal(db, trigger.now)
    loop = SchedulerLoop(effects, states, journal, SystemClock(), config.scheduler, memory.admits)
    memory.means = Means(
        engine_bytes=provider.host_bytes,
        job_bytes=admission.host_bytes,
        loop_status=loop.status,
        parked=effects,
        nudge=loop.nudge,
        on_enough=lambda: loop.retry("memory"),
        save=tiers.nudge,
    )
    port = LoopPort(
        loop, effects, journal, bus, routing, store, db, config.scheduler, config.box.serving_floor, trigger, memory
    )
    context = ControllerContext(
        db=db,
        files_dir=paths.files,
        jobs_dir=paths.jobs,
        uploads_dir=paths.uploads,
        batches_dir=paths.batches,
        scheduler=port,
        model_ops=LibraryOps(library, store, tiers, flow, provider.let_go),
        key_sink=bus,
        tiers=tiers,
        batch_engines=lines,
        adapter_rank_limit=provider.adapter_rank_limit,
        load=bus.load,
        models_shared=lambda: models_changed(),
        config=config.controller,
        background=background,
        main_troubles=lambda: read_troubles(paths.state_file),
        box={
            "id": paths.box_id,
            "version": importlib.metadata.version("appliance"),
            "url": f"http://{config.box.host}:{config.box.port}/v1",
            "data_dir": str(paths.data_dir),
        },
    )
    health = DeviceWatch(db, nodes.readings, config.scheduler, loop.nudge)
    nodes.on_change = health.node_changed
    effects.on_death(partial(_tell_of_death, background, health))
    # Before the first gateway connects: to it, a table without its keys means that all of them were revoked.
    routing.refresh()
    context.publish_keys()
    source = AdapterSource(paths.adapter_socket, db, store, back)
    await source.start()
    await bus.start()
    await nodes.connect()
    health.began({device.node for device in nodes.devices})
    there = await _observed(effects)
    states.after_restart(adopted={group.job_id for group in there.groups if group.ended is None})

    app = create_app(context)
    listeners = (
        (_server(FromBox(app)), paths.controller_socket),
        (_server(FromGateways(app, paths.gateway_token.read_text())), paths.gateway_socket),
    )
    # Without these there is no controller: what they raise ends it, and the main process starts it again. The app's
    # lifespan is entered here and once: two servers share it.
    async with app.router.lifespan_context(app), asyncio.TaskGroup() as tasks:
        deciding = tasks.create_task(loop.run(), name="scheduler loop")
        serving = [
            tasks.create_task(server.serve(sockets=[_listen(path)]), name=f"control routes on {path.name}")
            for server, path in listeners
        ]
        background.keep("nodes that come and go", effects.watch)
        background.keep_every("health of devices", health.look, config.scheduler.device_check_s, at_once=True)
        background.keep_every("resident memory of engines", port.read_memory, RSS_EVERY_S, at_once=True)
        background.keep_every("host memory", memory.look, LOOK_EVERY_S, at_once=True)
        background.keep_every("what is degraded", partial(_tell_degraded, bus, context), DEGRADED_EVERY_S)
        background.keep_every("usage", spending.flush, USAGE_EVERY_S)
        background.keep_every("snapshots of finished jobs", runs.tidy, TIDY_EVERY_S, at_once=True)
        background.keep("tiers", flow.run)
        if copy_limit.read(db)["measured_s"] is None:
            background.keep("limits of the hardware", partial(_measure, db, devices[0].kind))
        await stop.wait()
        log.info("ending: suspending jobs and saving what only memory holds")
        for server, _ in listeners:
            server.should_exit = True
        loop.stop()
        await asyncio.wait({deciding, *serving})
        await background.stop()
    saved = await _save_everything(effects, flow)
    await lines.close()
    await source.stop()
    await bus.stop()
    ray.shutdown()
    db.close()
    return 0 if saved else 1


async def _tell_degraded(bus: Bus, context: ControllerContext) -> None:
    others = {trouble["name"].partition(":")[0] for trouble in context.main_troubles()}
    bus.set_degraded(sorted({*context.background.names(), *others}))


async def _measure(db: Database, kind: str) -> None:
    await copy_limit.measure(db, {kind})


def _tell_of_death(
    background: BackgroundTasks, health: DeviceWatch, device_ids: tuple[str, ...], holder: str, reason: str
) -> None:
    """Who noticed the death has more to do about it than to count it against a device."""
    with background.guard("health of devices"):
        health.died(device_ids, holder, reason)


def _server(app: ASGIApp) -> uvicorn.Server:
    # No proxy stands before it, and nothing speaks WebSocket to it.
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
    """Leaves signals to us: uvicorn would end itself first and raise the signal again when it is done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _open_store(config: BoxConfig, paths: BoxPaths) -> WeightStore:
    budget_bytes = weight_budget_bytes(config, paths)
    store = WeightStore(paths.shm_root, budget_bytes=budget_bytes, pool_bytes=config.weights.pool_bytes)
    swept = store.sweep()
    for error in swept.damaged:
        log.error("shared memory holds a damaged version: %s", error)
    return store


async def _observed(effects: RayEffects) -> Observed:
    """The truth, as soon as it can be read: a supervisor that hangs is killed within a minute."""
    while True:
        try:
            return await effects.observe()
        except EffectFailed as error:
            log.warning("the box cannot be observed yet: %s", error)
            await asyncio.sleep(LOOK_AGAIN_S)


async def _save_everything(effects: RayEffects, flow: TierFlow) -> bool:
    """False if something is in shared memory only: then that is kept for the next start."""
    for group in (await _observed(effects)).groups:
        # A job that cannot be suspended any more goes on from its last snapshot.
        with contextlib.suppress(TimeoutError, EffectFailed):
            async with asyncio.timeout(SUSPEND_S):
                await effects.suspend_group(group.job_id)
    saved = await flow.finish()
    await effects.stop_everything()
    return saved


def _facts(devices: tuple[Device, ...], store: WeightStore) -> BoxFacts:
    memory_bytes = min(device.memory_bytes for device in devices)
    return BoxFacts(len(devices), devices[0].kind, memory_bytes, store.budget_bytes, store.room_bytes())


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    with owner_only():
        listener.bind(str(path))
    listener.listen(512)
    return listener


if __name__ == "__main__":
    sys.exit(main())
