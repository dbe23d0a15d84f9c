"""The context, which is everything a route needs, built once at start; and the audit log that routes write."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anyio import CapacityLimiter

from appliance.backup import LastBackup
from appliance.controller.access.limits import Quotas, Spending
from appliance.controller.bus.asking import Asking
from appliance.controller.bus.bus import Bus
from appliance.controller.context.model_files import LibraryOps
from appliance.controller.context.scheduler import Scheduler
from appliance.controller.context.tasks import Tasks
from appliance.controller.devices.cordons import DeviceWatch
from appliance.controller.devices.mode import PowerKeeper
from appliance.controller.engines.engine_sizes import EngineSizes, SettingsCheck
from appliance.controller.engines.routing_table import BusRouting
from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.interfaces.errors import OperationFailed
from appliance.controller.interfaces.principal import Principal
from appliance.store.database import Database
from appliance.store.records import audit, keys
from appliance.store.rows import AuditRow
from appliance.tiers.tiers import Tiers
from runtime.background_tasks import BackgroundTasks
from runtime.processes.kernel import run_command
from train.graders.hosts import GraderHosts

if TYPE_CHECKING:
    from scheduler.ray.nodes import Nodes


LIMIT_S = KEPT_S = 30.0


class Doctor:
    """Runs the doctor's checks beside a running box, in a process of its own, once at a time; its result is kept for
    `KEPT_S`."""

    def __init__(self, command: Sequence[str], clock: Callable[[], float] = time.time) -> None:
        self._command, self._clock = command, clock
        self._looking = asyncio.Lock()
        self._result: dict[str, Any] = {"at_s": float("-inf")}

    async def look(self) -> dict[str, Any]:
        """{"exit_code", "data": findings as `appliance.boot.doctor.Finding` has them, "at_s"}. Raises
        OperationFailed."""
        async with self._looking:
            if not 0 <= self._clock() - self._result["at_s"] < KEPT_S:
                try:
                    status, out, err = await run_command(*self._command, within_s=LIMIT_S)
                except TimeoutError:
                    why = f"The checks did not end within {LIMIT_S:.0f} s."
                    raise OperationFailed(why, code="doctor_failed") from None
                if status != 0:
                    why = (err.decode(errors="replace").strip() or "they said nothing").splitlines()[-1]
                    raise OperationFailed(f"The checks ended with an error: {why}", code="doctor_failed")
                self._result = json.loads(out) | {"at_s": self._clock()}
            return self._result


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


def name_of(context: ControllerContext, caller: Principal) -> str:
    """The name of the caller's key; "box" for a command on the box itself, which needs none."""
    row = keys.find(context.db, caller.key_id) if caller.key_id else None
    return row.name if row else caller.key_id or "box"


def record(
    context: ControllerContext,
    caller: Principal,
    action: str,
    target: str,
    *,
    outcome: Literal["done", "refused", "failed"] = "done",
    **detail: Any,
) -> None:
    """action: "noun.verb", for example "key.create". detail: the request's parameters; never a secret."""
    caller.recorded.append(action)
    audit.insert(context.db, AuditRow(action, target, outcome, detail, caller.key_id, caller.request_id))
