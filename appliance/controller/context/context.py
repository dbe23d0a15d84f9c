"""The context: everything a route needs, built once at start."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anyio import CapacityLimiter

from appliance.backup import LastBackup
from appliance.controller.access.quotas import Quotas
from appliance.controller.access.spending import Spending
from appliance.controller.bus.asking import Asking
from appliance.controller.bus.bus import Bus
from appliance.controller.context.doctor import Doctor
from appliance.controller.context.model_files import LibraryOps
from appliance.controller.context.scheduler import Scheduler
from appliance.controller.context.tasks import Tasks
from appliance.controller.devices.device_watch import DeviceWatch
from appliance.controller.devices.power import PowerKeeper
from appliance.controller.engines.engine_sizes import EngineSizes
from appliance.controller.engines.routing_table import BusRouting
from appliance.controller.engines.settings_check import SettingsCheck
from appliance.controller.interfaces.config import ControllerConfig
from appliance.store.database import Database
from appliance.tiers.tiers import Tiers
from runtime.background_tasks import BackgroundTasks
from train.graders.hosts import GraderHosts

if TYPE_CHECKING:
    from scheduler.ray.nodes import Nodes

FILE_THREADS = 4


@dataclass(frozen=True)
class ControllerContext:
    """files_dir: bytes of files by id. jobs_dir: one folder per job. batches_dir: answers of unfinished batches.
    uploads_dir: parts by upload. box: {"id", "version", "url", "data_dir"} as `/admin/v1/status` shows it.
    background: tasks of this process. main_troubles: troubles of the processes that the main process supervises, in the
    form of `BackgroundTasks.degraded`. file_threads: for work on whole files, which may take minutes, so that the
    threads of requests stay free. wandb_mode: as [tracking] has it."""

    db: Database
    config: ControllerConfig
    files_dir: Path
    jobs_dir: Path
    batches_dir: Path
    uploads_dir: Path
    box: dict[str, str]
    background: BackgroundTasks
    tasks: Tasks
    bus: Bus
    spending: Spending
    quotas: Quotas
    scheduler: Scheduler
    routing: BusRouting
    sizes: EngineSizes
    settings_check: SettingsCheck
    asking: Asking
    graders: GraderHosts
    model_ops: LibraryOps
    tiers: Tiers
    nodes: Nodes
    health: DeviceWatch
    power: PowerKeeper
    doctor: Doctor
    main_troubles: Callable[[], list[dict[str, Any]]]
    last_backup: Callable[[], LastBackup | None]
    wandb_mode: Literal["offline", "online"] | None = None
    started_s: float = field(default_factory=time.time)
    file_threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(FILE_THREADS))
