"""The context, built once at start, with everything a route needs: the scheduler as routes use it, the doctor, and
references to other parts; and the audit log that routes write."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
from anyio import CapacityLimiter

from appliance.backup import LastBackup
from appliance.controller.access.limits import Quotas, Spending
from appliance.controller.bus.asking import Asking
from appliance.controller.bus.bus import Bus
from appliance.controller.context.tasks import Tasks
from appliance.controller.devices.cordons import DeviceWatch
from appliance.controller.devices.mode import Mode, PowerKeeper
from appliance.controller.engines.routing_table import BusRouting
from appliance.controller.engines.versions import EngineSizes, LibraryOps, SettingsCheck
from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.interfaces.errors import OperationFailed, SwapFailed
from appliance.controller.interfaces.principal import Principal
from appliance.memory.box_memory import BoxMemory
from appliance.store import keys, models
from appliance.store.box import SqliteJournal
from appliance.store.database import Database
from appliance.store.rows import AUDIT, AuditRow
from appliance.tiers.tiers import Tiers
from runtime.background_tasks import BackgroundTasks
from runtime.processes.kernel import run_command
from scheduler.core.config import SchedulerConfig
from scheduler.core.errors import EffectFailed
from scheduler.core.workload import AWAKE
from scheduler.loop.loop import SchedulerLoop
from train.graders.sandbox import GraderHosts
from weights.memory.store import WeightStore

if TYPE_CHECKING:
    from scheduler.ray.effects import RayEffects
    from scheduler.ray.nodes import Nodes


# --- the scheduler as routes use it; its loop does the work

SchedulerStatus = dict[str, Any]
"""As `Scheduler.status` makes it.

devices: each with its `holder`, {"kind": "job" | "replica", "id"} or None. memory: "room_bytes" is what a reservation
in the weight store could get now. handover: the id of the one in progress. handovers_ended: `SqliteJournal.ended`.
queue: jobs in order, each {"id", "position", "phase", "devices", "reason" (a Slurm reason code or None), "message"}.
troubles: models whose engines fail, each {"model", "version", "reason", "message", "not_before_s" (of the next try),
"tries", "lasting"}. notes: why something waits or was abandoned, for users.
"""


@dataclass(frozen=True)
class Scheduler:
    """The scheduler as routes use it. serving_floor: number of devices that serving keeps if a mode sets no number."""

    loop: SchedulerLoop
    effects: RayEffects
    journal: SqliteJournal
    routing: BusRouting
    db: Database
    bus: Bus
    weights: WeightStore
    memory: BoxMemory
    serving_floor: int
    config: SchedulerConfig

    def status(self) -> SchedulerStatus:
        """Return the current state from memory, without waiting."""
        now, usage, host = self.loop.status(), self.weights.usage(), self.memory.status()
        resident = self.effects.resident_bytes()
        return {
            "devices": now["devices"],
            "replicas": [
                {**row, "inflight": self.bus.inflight(row["id"]), "rss_bytes": resident.get(row["id"], 0)}
                for row in now["replicas"]
            ],
            "memory": {
                "budget_bytes": self.weights.budget_bytes,
                "used_bytes": usage.used_bytes,
                "room_bytes": self.weights.room_bytes(),
                "host_bytes": psutil.virtual_memory().total,
                "reserve_bytes": host["reserve_bytes"],
                "host": host,
                "nodes": self.memory.nodes(),
                "asleep_per_device": self.config.max_asleep_per_device,
            },
            "handover": str(now["handovers"][-1]) if now["handovers"] else None,
            "handovers_ended": self.journal.ended,
            "serving_floor": self.serving_floor,
            "queue": now["jobs"],
            "troubles": now["troubles"],
            "notes": [
                *self.memory.notes(),
                *(f"{trouble['model']}: {trouble['message']}" for trouble in now["troubles"]),
                *(f"{model}: {text}" for model, text in now["notes"].items()),
                *(f"{name}: {row.note}" for name, row in models.settings_in_force(self.db).items() if row.note),
                *now["waits"],
            ],
            "plan_s": now["plan_s"],
        }

    def nudge(self, reason: str, by: str = "") -> None:
        """Plan soon, because the store changed (a job, a model, the mode). Never blocks, never raises.

        by: the requesting person's name, for the resulting hand-overs.
        """
        self.routing.refresh()  # because models may have been added or deleted
        self.loop.nudge(by, reason if by else "")

    async def set_mode(self, mode: Mode, *, wait: bool = False) -> str | None:
        """Implement the mode just written to the store. Returns the id of its hand-over once that has begun, or None if
        no device has to move. wait: return only once the mode is fully implemented."""
        generation = self.loop.nudge(mode.by, f"mode {mode.policy}")
        handover_id = await self.loop.next_handover(generation)
        if wait:
            await self.loop.wait_settled(generation)
        return None if handover_id is None else str(handover_id)

    async def converge_model(self, model: str) -> None:
        """Swap the model's replicas to the active version in the store. Raises SwapFailed, with the reason from the
        model's hand-overs, if a replica serves another version."""
        last, served = self.journal.last_id(), bool(self._awake(model))
        self.loop.reset_failures(model)
        await self.loop.wait_settled(self.loop.nudge())
        await self.routing.wait_applied()  # an adapter needs no swap of replicas
        row = models.find(self.db, model)
        if row is None:
            raise SwapFailed(model, None, "the model was deleted in the meantime")
        version, replicas = row.active_version, self._awake(model)
        if served and not replicas and (trouble := self.loop.trouble(model, version)) is not None:
            raise SwapFailed(model, version, f"no engine starts with it: {trouble.reason}")
        if stale := [r["id"] for r in replicas if r["version"] != version]:
            steps = [step.detail for step in self.journal.steps_since(last) if step.detail.get("model") == model]
            errors = [str(detail["error"]) for detail in steps if detail.get("error")]
            raise SwapFailed(model, version, "; ".join(errors) or f"{', '.join(stale)} serve another version")

    def _awake(self, model: str) -> list[dict[str, Any]]:
        return [r for r in self.loop.status()["replicas"] if r["model"] == model and r["state"] != "asleep"]

    async def withdraw(self, model: str) -> None:
        """Wait until the scheduler has removed all replicas of a model whose rows were deleted from the store."""
        # Replicas run under the model's name or `MODEL@VERSION`.
        while any(r["model"].partition("@")[0] == model for r in self.loop.status()["replicas"]):
            await self.loop.wait_settled(self.loop.nudge())

    async def unload_adapters(self, names: list[str]) -> None:
        """Unload adapters ("NAME@VERSION") whose rows were deleted; return when no engine has them loaded. Raises
        OperationFailed if their requests run for too long."""
        await self.routing.wait_applied()
        for name in names:
            try:
                await self.effects.unload_adapter(name)
            except EffectFailed as error:
                raise OperationFailed(str(error), code="adapter_in_use") from error


class ModelStates:
    """The state of each model as a word, and why its engines fail, from one reading of the scheduler's status."""

    def __init__(self, db: Database, status: SchedulerStatus):
        self._hosts = {row.name: row.host for row in models.callable_adapters(db)}
        self._replicas: dict[str, set[str]] = {}
        for replica in status["replicas"]:
            self._replicas.setdefault(replica["model"], set()).add(replica["state"])
        self._troubles = {trouble["model"]: trouble["message"] for trouble in status["troubles"]}

    def word(self, name: str) -> str:
        """serving (an engine is awake), failed (its engines do not start and are retried: `message` says why and when),
        asleep (a process waits with its memory released) or cold (no process)."""
        states = self._replicas.get(self.host(name), set())
        if "open" in states:
            return "serving"
        if self.message(name):
            return "failed"
        if not states.isdisjoint(AWAKE):
            return "serving"
        return "asleep" if "asleep" in states else "cold"

    def message(self, name: str) -> str | None:
        """Return why a model's engines fail and when the next try is; None if they do not fail."""
        return self._troubles.get(self.host(name))

    def host(self, name: str) -> str:
        """Return the model whose engines serve this model."""
        return self._hosts.get(name, name)


# --- the doctor

LIMIT_S = KEPT_S = 30.0


class Doctor:
    """Runs the doctor's checks of a running box in a separate process, one run at a time; a result is reused for
    `KEPT_S`."""

    def __init__(self, *command: str) -> None:
        self._command, self._one_at_a_time = command, asyncio.Lock()
        self._result: dict[str, Any] = {"at_s": 0.0}

    async def look(self) -> dict[str, Any]:
        """Return {"exit_code", "data": findings in the form of `appliance.boot.doctor.Finding`, "at_s"}. Raises
        OperationFailed."""
        async with self._one_at_a_time:
            if not 0 <= time.time() - self._result["at_s"] < KEPT_S:
                try:
                    status, out, err = await run_command(*self._command, within_s=LIMIT_S)
                except TimeoutError:
                    why = f"The checks did not end within {LIMIT_S:.0f} s."
                    raise OperationFailed(why, code="doctor_failed") from None
                if status != 0:
                    why = (err.decode(errors="replace").strip() or "they said nothing").splitlines()[-1]
                    raise OperationFailed(f"The checks ended with an error: {why}", code="doctor_failed")
                self._result = json.loads(out) | {"at_s": time.time()}
            return self._result


# --- the context

FILE_THREADS = 4


@dataclass(frozen=True)
class ControllerContext:
    """files_dir: the bytes of files, named by id. jobs_dir: one folder per job. batches_dir: answers of unfinished
    batches. uploads_dir: one folder of parts per upload. box: {"id", "version", "url", "data_dir"} as
    `/admin/v1/status` shows it.
    background: tasks of this process. main_troubles: troubles of the processes that the main process supervises, in the
    form of `BackgroundTasks.degraded`. file_threads: threads for work on large files, which may take minutes, so that
    the threads of requests stay free. wandb_mode: from [tracking]."""

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
    """Return the name of the caller's key; "box" for a command on the box itself, which needs no key."""
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
    """Write an audit row. action: "noun.verb", as in "key.create". detail: the request's parameters, never a secret."""
    caller.recorded.append(action)
    AUDIT.insert(context.db, AuditRow(action, target, outcome, detail, caller.key_id, caller.request_id))
