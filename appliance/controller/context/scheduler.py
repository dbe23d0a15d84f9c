"""The scheduler as routes use it: its status, modes, hand-overs, swaps and withdrawals, all done by its loop."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from appliance.controller.bus.bus import Bus
from appliance.controller.engines.routing_table import BusRouting
from appliance.controller.interfaces.errors import OperationFailed, SwapFailed
from appliance.controller.interfaces.records import Mode, SchedulerStatus
from appliance.memory.box_memory import BoxMemory
from appliance.store.database import Database
from appliance.store.objects import models
from appliance.store.records import model_settings
from appliance.store.records.journal import SqliteJournal
from runtime.devices.kinds import host_memory_bytes
from scheduler.core.config import SchedulerConfig
from scheduler.core.errors import EffectFailed
from scheduler.core.workload import Policy
from scheduler.handover.effects import StepRecord
from scheduler.loop.loop import SchedulerLoop
from weights.memory.store import WeightStore

if TYPE_CHECKING:
    from scheduler.ray.effects import RayEffects
    from scheduler.ray.nodes import Nodes


class Scheduler:
    """serving_floor: devices that serving keeps if a mode sets no number."""

    def __init__(
        self,
        loop: SchedulerLoop,
        effects: RayEffects,
        journal: SqliteJournal,
        routing: BusRouting,
        db: Database,
        bus: Bus,
        nodes: Nodes,
        weights: WeightStore,
        memory: BoxMemory,
        serving_floor: int,
        config: SchedulerConfig,
    ):
        self._loop, self._effects, self._journal, self._routing = loop, effects, journal, routing
        self._db, self._bus, self._nodes, self._weights, self._memory = db, bus, nodes, weights, memory
        self._serving_floor, self._config = serving_floor, config

    def status(self) -> SchedulerStatus:
        """The current state, from memory: no waiting."""
        now, usage, host = self._loop.status(), self._weights.usage(), self._memory.status()
        resident = self._effects.resident_bytes()
        return {
            "devices": now["devices"],
            "replicas": [
                {**one, "inflight": self._bus.inflight(one["id"]), "rss_bytes": resident.get(one["id"], 0)}
                for one in now["replicas"]
            ],
            "memory": {
                "budget_bytes": usage.budget_bytes,
                "used_bytes": usage.used_bytes,
                "room_bytes": self._weights.room_bytes(),
                "host_bytes": host_memory_bytes(),
                "reserve_bytes": host["reserve_bytes"],
                "host": host,
                "nodes": self._memory.nodes(),
                "asleep_per_device": self._config.max_asleep_per_device,
            },
            "handover": str(now["handovers"][-1]) if now["handovers"] else None,
            "handovers_ended": self._journal.ended,
            "serving_floor": self._serving_floor,
            "queue": now["jobs"],
            "troubles": now["troubles"],
            "notes": [
                *self._memory.notes(),
                *(f"{trouble['model']}: {trouble['message']}" for trouble in now["troubles"]),
                *(f"{model}: {text}" for model, text in now["notes"].items()),
                *(f"{model}: {text}" for model, text in model_settings.notes(self._db).items()),
                *now["waits"],
            ],
            "plan_s": now["plan_s"],
        }

    def nudge(self, reason: str, by: str = "") -> None:
        """The store changed (a job, a model, the mode): plan soon. Never blocks, never raises.

        by: the person who asked; the resulting hand-overs carry the name.
        """
        self._routing.refresh()  # models may have come or gone
        self._loop.nudge(by, reason if by else "")

    def reset_failures(self, model: str) -> None:
        """This model was changed: if its engines failed, retry at once."""
        self._loop.reset_failures(model)

    def explain(self, policy: Policy | None) -> dict[str, Any]:
        """What would be done under this policy (None: the current one), and why (`scheduler.loop.explain`). Changes
        nothing."""
        return self._loop.explain(policy)

    async def set_mode(self, mode: Mode, *, wait: bool = False) -> str | None:
        """The mode was just written to the store. Returns the id of the hand-over that implements it as soon as that
        has begun, or None when nothing has to move. wait: only once nothing is left to do for it."""
        generation = self._loop.nudge(mode.by, f"mode {mode.policy}")
        handover_id = await self._loop.next_handover(generation)
        if wait:
            await self._loop.wait_settled(generation)
        return None if handover_id is None else str(handover_id)

    async def converge_model(self, model: str) -> dict[str, Any]:
        """The model's active version changed in the store: swap its replicas to it, and return the measurements
        ({"replicas", "pause_s", "seconds", "bytes", "how"}).
        Raises SwapFailed if a replica serves another version; the reason is that of this model's hand-overs."""
        last, served = self._journal.last_id(), bool(self._awake(model))
        self._loop.reset_failures(model)
        await self._loop.wait_settled(self._loop.nudge())
        await self._routing.wait_applied()  # an adapter needs nothing more
        row = models.find(self._db, model)
        if row is None:
            raise SwapFailed(model, None, "the model was deleted in the meantime")
        wanted = row.active_version
        replicas = self._awake(model)
        if served and not replicas and (trouble := self._loop.trouble(model, wanted)) is not None:
            raise SwapFailed(model, wanted, f"no engine starts with it: {trouble.reason}")
        stale = [r["id"] for r in replicas if r["version"] != wanted]
        swaps = [step for step in self._journal.steps_since(last) if step.detail.get("model") == model]
        if stale:
            errors = [str(step.detail["error"]) for step in swaps if step.detail.get("error")]
            raise SwapFailed(model, wanted, "; ".join(errors) or f"{', '.join(stale)} serve another version")
        return {"replicas": len(replicas), **_measured_swap(swaps)}

    def _awake(self, model: str) -> list[dict[str, Any]]:
        return [r for r in self._loop.status()["replicas"] if r["model"] == model and r["state"] != "asleep"]

    async def withdraw(self, model: str) -> None:
        """The model's rows are gone from the store: returns when no replica of it is left."""
        # Under its own name or that of one of its versions.
        while any(r["model"].partition("@")[0] == model for r in self._loop.status()["replicas"]):
            await self._loop.wait_settled(self._loop.nudge())

    async def unload_adapters(self, names: list[str]) -> None:
        """The rows of these adapters ("NAME@VERSION") are gone: returns when no engine has them loaded. Raises
        OperationFailed if their requests run for too long."""
        await self._routing.wait_applied()
        for name in names:
            try:
                await self._effects.unload_adapter(name)
            except EffectFailed as error:
                raise OperationFailed(str(error), code="adapter_in_use") from error


def _measured_swap(steps: Iterable[StepRecord]) -> dict[str, Any]:
    """Measurements of the swaps among `steps`: medians of `pause_s` and `seconds`, total `bytes`, how the versions were
    loaded (`how`). None if no engine was swapped."""
    swaps = [step.detail for step in steps if step.verb == "swap_replica" and "pause_s" in step.detail]
    return {
        "pause_s": statistics.median(swap["pause_s"] for swap in swaps) if swaps else None,
        "seconds": statistics.median(swap["seconds"] for swap in swaps) if swaps else None,
        "bytes": sum(swap["bytes"] for swap in swaps) if swaps else None,
        "how": ", ".join(sorted({swap["how"] for swap in swaps})) or None,
    }
