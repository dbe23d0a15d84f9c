"""The context: everything a route needs, built once at start."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from anyio import CapacityLimiter

from appliance.controller.access.disk import Disk
from appliance.controller.access.quotas import Quotas
from appliance.controller.access.spending import key_table
from appliance.controller.bus.asking import Asking
from appliance.controller.bus.load import Load
from appliance.controller.context.tasks import Tasks
from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.interfaces.ports import (
    EngineSizer,
    KeySink,
    ModelOps,
    NodePort,
    SamplingEngines,
    SchedulerPort,
    SettingsCheck,
    TierPort,
)
from appliance.last_backup import LastBackup
from appliance.models.opening import Opening
from appliance.store.database import Database
from appliance.store.rows import ModelRow
from runtime.background_tasks import BackgroundTasks
from runtime.devices.kind import Reading

FILE_THREADS = 4


@dataclass
class ControllerContext:
    """files_dir: bytes of files by id. jobs_dir: one folder per job. batches_dir: answers of unfinished batches.
    uploads_dir: parts by upload. box: {"id", "version", "url", "data_dir"} as `/admin/v1/status` shows it.
    opening: whether a model's files may be opened. adapter_rank_limit: the largest LoRA rank that engines of a model
    accept, 0: none. load: the gateways' reports.
    models_shared: call it when access to a model has changed, to inform the gateways. background: tasks of this
    process. main_troubles: troubles of the processes that the main process supervises, in the form of
    `BackgroundTasks.degraded`. doctor: the doctor's findings now
    (`appliance.wiring.doctor_process`). file_threads: for work on whole files, which may take minutes, so that the
    threads of requests stay free. device_readings: the newest of each device that reports any.
    open_engines: model and socket of each engine that answers requests, by replica.
    wandb_mode: as [tracking] has it.
    power_status: the power limit in force (`PowerKeeper.status`)."""

    db: Database
    files_dir: Path
    jobs_dir: Path
    batches_dir: Path
    uploads_dir: Path
    scheduler: SchedulerPort
    model_ops: ModelOps
    key_sink: KeySink
    tiers: TierPort
    asking: Asking
    sampling_engines: SamplingEngines
    sizes: EngineSizer
    settings_check: SettingsCheck
    nodes: NodePort
    opening: Opening
    doctor: Callable[[], Awaitable[dict[str, Any]]]
    adapter_rank_limit: Callable[[ModelRow], int] = lambda _: 0
    load: Callable[[], Load] = Load
    config: ControllerConfig = field(default_factory=ControllerConfig)
    models_shared: Callable[[], None] = lambda: None
    box: dict[str, str] = field(default_factory=dict)
    started_s: float = field(default_factory=time.time)
    background: BackgroundTasks = field(default_factory=BackgroundTasks)
    last_backup: Callable[[], LastBackup | None] = lambda: None
    main_troubles: Callable[[], list[dict[str, Any]]] = list
    file_threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(FILE_THREADS))
    device_readings: Callable[[], Mapping[str, Reading]] = dict
    open_engines: Callable[[], Mapping[str, tuple[str, str]]] = dict
    wandb_mode: Literal["offline", "online"] | None = None
    power_status: Callable[[], dict[str, Any]] = dict

    def __post_init__(self) -> None:
        self.tasks = Tasks(self.db)
        self.quotas = Quotas(
            self.db, self.config, Disk(self.files_dir, self.config.disk_floor_bytes), lambda: self.key_sink
        )

    def publish_keys(self) -> None:
        self.key_sink.keys_changed(key_table(self.db, time.time()))
