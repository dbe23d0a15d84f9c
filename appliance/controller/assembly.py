"""Builds the controller's parts in order of dependency: each takes only parts built before it.

Later events that concern several parts go through the event hub (`Signals`); `_connect` at the end lists the
subscriptions. The scheduler's loop calls many parts and many call it, so it is built first and connected last.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import httpx

from appliance import last_backup
from appliance.boot.box_state import read_troubles
from appliance.config import BoxConfig
from appliance.controller.access.spending import Spending
from appliance.controller.bus.asking import Asking
from appliance.controller.bus.bus import Bus, first_generation
from appliance.controller.bus.demand_learning import DemandLearning
from appliance.controller.context.context import ControllerContext
from appliance.controller.devices.cordons import DRAINS
from appliance.controller.devices.device_watch import DeviceWatch
from appliance.controller.devices.energy import EnergyMeter
from appliance.controller.devices.power import PowerKeeper
from appliance.controller.grading.sampling_engines import SocketEngines
from appliance.controller.interfaces.signals import Signals
from appliance.controller.jobs.events import JobEvents
from appliance.controller.models.capacity import BoxFacts
from appliance.controller.models.engine_sizes import EngineSizes
from appliance.controller.models.settings_check import ForkedSettingsCheck
from appliance.memory.box_memory import BoxMemory
from appliance.memory.host_memory import HostMemory, Means, stored_here
from appliance.memory.job_memory import JobMemory
from appliance.models.checkpoint_trial import WarmParent
from appliance.models.hub import HubSettings
from appliance.models.library import ModelLibrary
from appliance.models.opening import Opening
from appliance.paths import BoxPaths
from appliance.store.database import Database
from appliance.store.records import box, model_settings
from appliance.store.rows import JobRow
from appliance.tiers.flow import TierFlow
from appliance.tiers.tiers import Tiers
from appliance.wiring.adapter_source import AdapterSource
from appliance.wiring.box_status import BoxStatus
from appliance.wiring.doctor_process import DoctorProcess
from appliance.wiring.handover_trigger import HandoverTrigger
from appliance.wiring.job_runs import JobRuns
from appliance.wiring.journal import SqliteJournal
from appliance.wiring.model_work import LibraryOps
from appliance.wiring.node_config import node_config_of, weight_budget_bytes
from appliance.wiring.routing_table import BusRouting
from appliance.wiring.scheduler_port import LoopPort
from appliance.wiring.state_store import BoxSize, Live, SqliteStateStore
from appliance.wiring.version_provider import VersionProvider
from appliance.wiring.wishes import Wishes, circumstances
from runtime.background_tasks import BackgroundTasks
from runtime.devices.kinds import kind_of
from runtime.network.tunnel import NodeCertificate
from scheduler.core.config import SchedulerConfig
from scheduler.core.inventory import Device
from scheduler.core.workload import Demand
from scheduler.devices.discovery import discover_devices
from scheduler.handover.ports import SystemClock
from scheduler.loop.loop import SchedulerLoop
from scheduler.ray.effects import RayEffects
from scheduler.ray.nodes import Nodes
from weights.memory.store import WeightStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the controller's process starts, runs and stops."""

    db: Database
    devices: tuple[Device, ...]
    background: BackgroundTasks
    signals: Signals
    loop: SchedulerLoop
    bus: Bus
    spending: Spending
    routing: BusRouting
    asking: Asking
    sampling: SocketEngines
    flow: TierFlow
    adapters: AdapterSource
    runs: JobRuns
    nodes: Nodes
    effects: RayEffects
    memory: BoxMemory
    health: DeviceWatch
    states: SqliteStateStore
    box_status: BoxStatus
    power: PowerKeeper
    energy: EnergyMeter
    context: ControllerContext


def assemble(config: BoxConfig, paths: BoxPaths) -> Parts:
    """Ray must be initialised. Nothing runs or listens yet."""
    floor = config.box.serving_floor

    # Foundations: the database, shared memory, the devices, and the event hub.
    db = Database(paths.database)
    store = _open_store(config, paths)
    devices = discover_devices(config.box.devices, untried=config.box.untried_devices)
    background, signals = BackgroundTasks(), Signals()
    loop = SchedulerLoop(SystemClock(), config.scheduler)

    # Gateways: the bus to them, request costs, which engine answers which name.
    bus = Bus(
        paths.bus_socket,
        config.controller,
        first_generation=first_generation(db),
        on_load=signals.load_reported,
        on_table=signals.table_changed,
        on_usage=signals.usage_reported,
        background=background,
    )
    spending = Spending(db, signals.keys_changed)
    sizes = EngineSizes(db, config.serve, partial(_of_engines, devices, loop), config.scheduler.max_asleep_per_device)
    routing = BusRouting(bus, db, config.gateway.holds.hold_s, sizes.published, loop.trouble)
    transport = httpx.AsyncHTTPTransport(uds=str(paths.asking_socket), limits=httpx.Limits(max_connections=None))
    asking = Asking(transport, lambda: bus.models, routing.host, loop.nudge)
    sampling = SocketEngines(bus, config.gateway.limits, loop.nudge)
    now = partial(circumstances, db, floor, loop.status)
    wishes = Wishes(bus, routing.host, lambda: asking.models, lambda: sampling.wanted, now)

    # Weights: shared memory, the tiers below it, and their users (engines and jobs).
    tiers = Tiers(db, store, config.weights, paths)
    opening = Opening(db)
    provider = VersionProvider(db, store, tiers, opening, config, devices[0], sizes)
    flow = TierFlow(db, tiers, owner=paths.box_id, is_held=provider.holds, background=background)
    adapters = AdapterSource(paths.adapter_socket, db, store, tiers)
    hub = HubSettings(allowed=not config.box.hub_offline, endpoint=config.box.hub_endpoint)
    node_config = node_config_of(config, paths, devices)
    warm = WarmParent(node_config.warm_socket("train"), node_config.log_dir / "imports.log")
    library = ModelLibrary(paths.models, hub_settings=hub, warm=warm)
    removed = NodeCertificate.below(paths.certificates).removed
    nodes = Nodes(node_config, signals.node_changed, removed.out)
    model_ops = LibraryOps(library, store, tiers, flow, opening, provider.let_go, nodes.forget)
    events = JobEvents(db, paths.files, config.controller.organization)
    runs = JobRuns(db, store, paths.jobs, paths.shm_root, events, tiers, opening, signals.published)

    # The scheduler: its effects (Ray), what it reads in every round, and its journal.
    effects = RayEffects(nodes, routing, provider, runs, config.serve)
    health = DeviceWatch(db, nodes.readings, config.scheduler, loop.nudge)
    job_memory = JobMemory(db, store, _facts(devices, store, config.scheduler))
    means = Means(
        engine_bytes=provider.host_bytes,
        job_bytes=job_memory.host_bytes,
        devices=nodes.device_count,
        loop_status=loop.status,
        parked=effects,
        nudge=loop.nudge,
        on_enough=partial(loop.retry, "memory"),
        save=tiers.nudge,
    )
    reserve = config.box.memory_reserve_bytes
    memory = BoxMemory(db, HostMemory(db, stored_here(store), reserve, means), nodes, reserve, means)
    learning = DemandLearning(routing.traffic, config.scheduler, len(devices), db=db)

    def demands() -> Callable[[str], Demand]:
        with_wishes = wishes.demands()
        return lambda model: with_wishes(model, routing.demand(model))

    def job_lacks(row: JobRow) -> str:
        return memory.waits_for(row) or job_memory.waits_for(row)

    states = SqliteStateStore(
        db,
        events,
        BoxSize(floor, len(devices), config.serve.max_replicas),
        Live(
            demands, job_lacks, learning.learned, memory.job_nodes, memory.job_sizes, memory.max_asleep, job_memory.keep
        ),
        signals.models_changed,
    )
    trigger = HandoverTrigger(loop.status)
    journal = SqliteJournal(db, trigger.now)
    loop.connect(effects, states, journal, memory.book_engine, memory.too_large)

    # What the routes need of all this.
    bounds, asleep = config.scheduler.bounds(), config.scheduler.max_asleep_per_device
    notes = partial(model_settings.notes, db)
    box_status = BoxStatus(loop, effects, bus, store, memory, floor, bounds, asleep, nodes.certificates_end, notes)
    port = LoopPort(loop, effects, journal, routing, db, trigger, box_status)
    power = PowerKeeper(
        config.power.limits_w,
        db,
        floor,
        partial(_undrained, db, devices),
        kind_of(devices[0].kind).power_control(),
    )
    context = ControllerContext(
        db=db,
        files_dir=paths.files,
        jobs_dir=paths.jobs,
        uploads_dir=paths.uploads,
        batches_dir=paths.batches,
        scheduler=port,
        model_ops=model_ops,
        opening=opening,
        key_sink=bus,
        tiers=tiers,
        asking=asking,
        sampling_engines=sampling,
        sizes=sizes,
        settings_check=ForkedSettingsCheck(sizes, node_config, devices[0]),
        nodes=nodes,
        adapter_rank_limit=provider.adapter_rank_limit,
        load=bus.load,
        models_shared=signals.models_changed,
        config=config.controller,
        background=background,
        main_troubles=partial(read_troubles, paths.state_file),
        last_backup=partial(last_backup.read, paths.last_backup),
        wandb_mode=config.tracking.wandb_mode,
        power_status=power.status,
        device_readings=health.newest,
        open_engines=routing.open_engines,
        doctor=DoctorProcess(
            [sys.executable, "-P", "-m", "appliance.doctor.main", "--runs", "--config", str(paths.config_file)]
        ).look,
        box={
            "id": paths.box_id,
            "version": importlib.metadata.version("appliance"),
            "url": f"{config.scheme}://{config.box.host}:{config.box.port}/v1",
            "public_url": config.box.public_url or f"{config.scheme}://{config.box.host}:{config.box.port}",
            "data_dir": str(paths.data_dir),
        },
    )
    parts = Parts(
        db=db,
        devices=devices,
        background=background,
        signals=signals,
        loop=loop,
        bus=bus,
        spending=spending,
        routing=routing,
        asking=asking,
        sampling=sampling,
        flow=flow,
        adapters=adapters,
        runs=runs,
        nodes=nodes,
        effects=effects,
        memory=memory,
        health=health,
        states=states,
        box_status=box_status,
        power=power,
        energy=EnergyMeter(db, health.newest, port.status),
        context=context,
    )
    _connect(parts)
    return parts


def _connect(parts: Parts) -> None:
    """The subscriptions, in the order in which they are called."""
    signals = parts.signals
    signals.load_reported.connect(parts.loop.nudge, parts.sampling.load_changed)
    signals.table_changed.connect(parts.sampling.load_changed, parts.asking.table_changed)
    signals.usage_reported.connect(parts.spending.take)
    signals.keys_changed.connect(parts.context.publish_keys)
    # A key may call what its jobs made.
    signals.models_changed.connect(parts.routing.refresh, parts.context.publish_keys)
    signals.published.connect(parts.routing.refresh, parts.loop.nudge)
    signals.node_changed.connect(parts.health.node_changed)
    parts.effects.on_death(partial(_report_death, parts.background, parts.health))


def _report_death(
    background: BackgroundTasks, health: DeviceWatch, device_ids: tuple[str, ...], holder: str, reason: str
) -> None:
    """Never raises: whoever noticed the death has more to do than to count it against a device."""
    with background.guard("health of devices"):
        health.died(device_ids, holder, reason)


def _open_store(config: BoxConfig, paths: BoxPaths) -> WeightStore:
    budget_bytes = weight_budget_bytes(config, paths)
    store = WeightStore(paths.shm_root, budget_bytes=budget_bytes, pool_bytes=config.weights.pool_bytes)
    for error in store.sweep().damaged:
        log.error("shared memory holds a damaged version: %s", error)
    return store


def _of_engines(home: tuple[Device, ...], loop: SchedulerLoop) -> list[Device]:
    """Home's devices and other nodes' of its kind, which run what home prepared."""
    there = tuple(loop.box.devices.values())  # in one go, for threads ask too
    return [*home, *(device for device in there if device.kind == home[0].kind)]


def _undrained(db: Database, home: tuple[Device, ...]) -> dict[str, str]:
    """Ids by UUID; not of what a person drained, which is theirs."""
    drained = box.get(db, DRAINS, {})
    return {device.uuid: device.id for device in home if device.uuid and device.id not in drained}


def _facts(devices: tuple[Device, ...], store: WeightStore, config: SchedulerConfig) -> BoxFacts:
    memory_bytes = min(device.memory_bytes for device in devices)
    return BoxFacts(
        len(devices),
        devices[0].kind,
        memory_bytes,
        store.budget_bytes,
        store.room_bytes(),
        asleep_per_device=config.max_asleep_per_device,
    )
