"""Scheduler calls for the admin and OpenAI routes: modes, hand-overs, swaps and withdrawals, done by the loop."""

from __future__ import annotations

import asyncio
from typing import Any

from appliance.controller.interfaces.errors import OperationFailed, SwapFailed
from appliance.controller.interfaces.ports import Mode, SchedulerStatus
from appliance.store.database import Database
from appliance.store.objects import models
from appliance.wiring.box_status import BoxStatus
from appliance.wiring.handover_trigger import HandoverTrigger
from appliance.wiring.journal import measured_swap, steps_of
from appliance.wiring.routing_table import BusRouting
from runtime.profile_shares import LIMIT_S
from scheduler.core.errors import EffectFailed
from scheduler.core.workload import Policy
from scheduler.handover.journal import Journal
from scheduler.loop.loop import SchedulerLoop
from scheduler.ray.effects import RayEffects


class LoopPort:
    """Implements `appliance.controller.interfaces.ports.SchedulerPort`."""

    def __init__(
        self,
        loop: SchedulerLoop,
        effects: RayEffects,
        journal: Journal,
        routing: BusRouting,
        db: Database,
        trigger: HandoverTrigger,
        box_status: BoxStatus,
    ):
        self._loop, self._effects, self._journal, self._routing = loop, effects, journal, routing
        self._db, self._trigger, self._box_status = db, trigger, box_status
        self._settling: dict[str, int] = {}

    def nudge(self, reason: str, by: str = "") -> None:
        self._routing.refresh()  # models may have come or gone
        generation = self._loop.nudge()
        if by:
            self._trigger.note(generation, by, reason)

    def reset_failures(self, model: str) -> None:
        self._loop.reset_failures(model)

    def explain(self, policy: Policy | None) -> dict[str, Any]:
        return self._loop.explain(policy)

    def status(self) -> SchedulerStatus:
        return self._box_status.read()

    async def set_mode(self, mode: Mode) -> str | None:
        last = self._journal.last_id()
        generation = self._loop.nudge()
        self._trigger.note(generation, mode.by, f"mode {mode.policy}")
        settled = asyncio.create_task(self._loop.wait_settled(generation))
        while not settled.done() and self._journal.last_id() == last:
            await asyncio.wait([settled], timeout=0.005)
        if settled.done():
            settled.result()
            newest = self._journal.last_id()
            return str(newest) if newest > last else None
        settled.cancel()
        handover_id = str(self._journal.last_id())
        self._settling = {known: of for known, of in self._settling.items() if not self._loop.has_settled(of)}
        self._settling[handover_id] = generation
        return handover_id

    async def wait_handover(self, handover_id: str) -> None:
        await self._loop.wait_settled(self._settling.get(handover_id, 0))

    async def converge_model(self, model: str) -> dict[str, Any]:
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
        swaps = steps_of(self._journal.since(last), model)
        if stale:
            errors = [str(step.detail["error"]) for step in swaps if step.detail.get("error")]
            raise SwapFailed(model, wanted, "; ".join(errors) or f"{', '.join(stale)} serve another version")
        return {"replicas": len(replicas), **measured_swap(swaps)}

    def _awake(self, model: str) -> list[dict[str, Any]]:
        return [r for r in self._loop.status()["replicas"] if r["model"] == model and r["state"] != "asleep"]

    async def withdraw(self, model: str) -> None:
        while any(_serves(replica, model) for replica in self._loop.status()["replicas"]):
            await self._loop.wait_settled(self._loop.nudge())

    async def unload_adapters(self, names: list[str]) -> None:
        await self._routing.wait_applied()
        for name in names:
            try:
                await self._effects.unload_adapter(name)
            except EffectFailed as error:
                raise OperationFailed(str(error), code="adapter_in_use") from error

    async def profile_engine(self, model: str, steps: int) -> dict[str, Any]:
        awake = [
            one["id"] for one in self._loop.status()["replicas"] if _serves(one, model) and one["state"] != "asleep"
        ]
        if not awake:
            raise OperationFailed(f"no engine of {model} is awake; a request wakes one", code="not_running")
        try:
            return await self._effects.profile_replica(awake[0], steps, LIMIT_S)
        except EffectFailed as error:
            raise OperationFailed(error.reason, code="not_profiled") from error

    async def profile_job(self, job_id: str, steps: int) -> None:
        try:
            await self._effects.profile_group(job_id, steps)
        except EffectFailed as error:
            raise OperationFailed(error.reason, code="not_running") from error


def _serves(replica: dict[str, Any], model: str) -> bool:
    """Whether a replica serves this model, under its own name or that of one of its versions."""
    return replica["model"] == model or replica["model"].startswith(f"{model}@")
