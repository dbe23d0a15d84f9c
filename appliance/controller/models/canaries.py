"""Canaries: started, checked, and ended by promotion or roll back, manually or automatically.

The row in the store is authoritative: the canary's engine and its share of the requests exist only while it does. The
gateways keep the request counts, since they outlive this process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any, Literal

from appliance.controller.access.model_access import caller_of, no_version, stored_model
from appliance.controller.bus.load import VersionLoad
from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import Conflict, InvalidValue, NotFound, SwapFailed, shown
from appliance.controller.interfaces.principal import Principal
from appliance.controller.models.activation import Activations
from appliance.controller.models.canary_decision import Decision, decide, p95_s
from appliance.store.objects import models
from appliance.store.records import canaries, deployments
from appliance.store.rows import CanaryRow, ModelRow, VersionRow, columns
from runtime.background_tasks import RunningTasks

log = logging.getLogger("appliance.controller")


class Canaries:
    """All canaries of a box. Promotion and roll back hold their model's lock of `Activations`: a swap may take minutes,
    in which another model's bad canary has to be rolled back."""

    def __init__(self, context: ControllerContext, activations: Activations):
        self._context, self._activations = context, activations
        self._busy: set[str] = set()  # models whose canary a task looks at
        self.tasks = RunningTasks()
        self._leaving: set[str] = set()  # ended canaries whose engines may still exist

    async def look(self, now_s: float) -> None:
        """A task for each canary, which ends it where it ends automatically; called every `canary_every_s`."""
        for row in canaries.list_running(self._context.db):
            if row.model not in self._busy:
                self._busy.add(row.model)
                self.tasks.add(asyncio.create_task(self._end_of(row, now_s), name=f"canary {row.name}"))
        served = {replica["model"] for replica in self._context.scheduler.status()["replicas"]}
        for name in self._leaving - served:
            self._context.model_ops.let_go(name)
            self._leaving.discard(name)

    async def _end_of(self, row: CanaryRow, now_s: float) -> None:
        try:
            with self._context.background.guard(f"canary: {row.name}"):
                try:
                    await self._look_at(row.model, now_s)
                except (Conflict, NotFound) as error:  # a user was faster: it ended, or its model is gone
                    log.info("canary: %s", error.message, extra={"model": row.model, "version": row.version})
        finally:
            self._busy.discard(row.model)

    async def _look_at(self, model: str, now_s: float) -> None:
        row, active = self._running(model), stored_model(self._context.db, model).active_version
        decision, caller = await self.decision(row, now_s), caller_of(self._context.db, None)
        if active == row.version:
            # Published by another caller, or the process ended between the swap and this. A promotion in progress ends
            # it itself, or reverts the version.
            async with self._activations.lock(model):
                if stored_model(self._context.db, model).active_version == self._running(model).version:
                    reason = f"{active} answers all requests"
                    self._end(row, "promoted", reason, self.compared(row))
                    record(
                        self._context, caller, "model.promote", model, before=row.before, to=row.version, reason=reason
                    )
        elif active != row.before or (row.auto and decision.verdict == "roll back"):
            await self.roll_back(model, caller, decision.reason, judged=row)
        elif row.auto and decision.verdict == "promote":
            try:
                await self.promote(model, caller, decision.reason, judged=row)
            except Conflict as error:
                await self.roll_back(model, caller, error.message, judged=row)

    def begin(self, row: CanaryRow, caller: Principal) -> None:
        """Raises NotFound, Conflict, BadRequest."""
        db = self._context.db
        model = stored_model(self._context.db, row.model)
        version = models.find_version(db, row.model, row.version)
        if version is None:
            raise no_version(db, row.model, row.version)
        running = canaries.find_running(db, row.model)
        if running is not None and running.version != row.version:
            raise Conflict(
                f"{running.version} is the canary of {row.model}; promote it or roll it back first.",
                param="version",
                code="canary_running",
            )
        if row.version == row.before:
            raise InvalidValue(
                f"{row.version} is already the active version of {row.model}; name another one.", "version"
            )
        self._check_room(model, version)
        if running is not None:  # with other settings: the counts are kept
            row = replace(row, created_s=running.created_s)
        canaries.put(db, row)
        self._leaving.discard(row.name)
        self._context.scheduler.reset_failures(row.name)
        self._context.scheduler.nudge(f"{row.name} takes {row.share:.0%} of the requests of {row.model}")
        settings = columns(row, "version share watch_s min_requests") | {"auto": bool(row.auto)}
        record(self._context, caller, "model.canary", row.model, **settings)

    async def promote(
        self, model: str, caller: Principal, reason: str = "asked for", *, judged: CanaryRow | None = None
    ) -> dict[str, Any]:
        """Make the canary the active version. A request that comes again is told what the first has changed. judged:
        the canary that is meant, if only that: another may have begun by the time that this has its turn. Raises
        Conflict if there is none, or if the swap failed; it then stays a canary."""
        async with self._activations.lock(model):
            found, last = stored_model(self._context.db, model), canaries.find(self._context.db, model)
            if last is not None and last.state == "promoted" and last.version == found.active_version:
                return {"model": model, "from": last.before, "to": last.version, "swap": {}}
            row = self._running(model, judged)
            compared = self.compared(row)
            try:
                measured = await self._activations.switch(found, row.version, f"{row.name} is promoted: {reason}")
            except SwapFailed as error:
                record(
                    self._context, caller, "model.promote", model, outcome="failed", to=row.version, error=str(error)
                )
                raise Conflict(f"The promotion failed: {error}", param="version", code="swap_failed") from error
            self._end(row, "promoted", reason, compared)
            record(self._context, caller, "model.promote", model, before=row.before, to=row.version, reason=reason)
            return {"model": model, "from": row.before, "to": row.version, "swap": measured}

    async def roll_back(
        self, model: str, caller: Principal, reason: str = "asked for", *, judged: CanaryRow | None = None
    ) -> dict[str, Any]:
        """Send all requests to the previous version again. judged: as `promote` has it. Raises Conflict: there is no
        canary."""
        async with self._activations.lock(model):
            row, to = self._running(model, judged), stored_model(self._context.db, model).active_version
            self._end(row, "rolled_back", reason, self.compared(row))
            record(self._context, caller, "model.rollback", model, before=row.version, to=to, reason=reason)
            return {"model": model, "from": row.version, "to": to, "swap": {}}

    async def view(self, row: CanaryRow, now_s: float) -> dict[str, Any]:
        """`message`: what the canary does now, or why it ended, as a sentence."""
        running = row.state == "running"
        decision = await self.decision(row, now_s) if running else None
        return {
            **columns(row, "model name version before share"),
            "auto": bool(row.auto),
            **columns(row, "watch_s min_requests state created_s ended_s"),
            "reason": row.reason or None,
            "decision": None if decision is None else decision._asdict(),
            "message": self._message(row) if running else row.reason,
            "versions": self.compared(row) if running else row.compared,
        }

    async def decision(self, row: CanaryRow, now_s: float) -> Decision:
        active = stored_model(self._context.db, row.model).active_version
        if active == row.version:
            return Decision("promote", f"{active} becomes the active version")
        if active != row.before:
            return Decision(
                "roll back",
                f"{active} became the active version while {row.version} was compared with {row.before}",
            )
        for trouble in self._context.scheduler.status()["troubles"]:
            if trouble["model"] == row.name and trouble["lasting"]:
                return Decision("roll back", f"the engine of {row.version} does not start: {trouble['reason']}")
        loads = self._loads(row)
        return await asyncio.to_thread(decide, row, loads[row.version], loads[row.before], now_s)

    def compared(self, row: CanaryRow) -> dict[str, Any]:
        """For each version {"requests", "errors", "first_byte_p95_s", "duration_p95_s"}."""
        return {
            version: {
                "requests": load.requests,
                "errors": load.errors,
                "first_byte_p95_s": p95_s(load.first_byte),
                "duration_p95_s": p95_s(load.duration),
            }
            for version, load in self._loads(row).items()
        }

    def _loads(self, row: CanaryRow) -> dict[str, VersionLoad]:
        """Counts of gateways for the canary and for the version before it."""
        counted = self._context.bus.load().canaries.get((row.model, row.created_s), {})
        return {version: counted.get(version, VersionLoad()) for version in (row.version, row.before)}

    def _message(self, row: CanaryRow) -> str:
        status = self._context.scheduler.status()
        version = models.find_version(self._context.db, row.model, row.version)
        takes = f"{row.version} takes {row.share:.0%} of the requests"
        if version is not None and version.meta.get("adapter"):
            return f"{takes}, on the engines of its base"
        states = {replica["state"] for replica in status["replicas"] if replica["model"] == row.name}
        if "open" in states:
            return takes
        notes = [note for note in status["notes"] if row.name in note]
        return ". ".join([f"All requests go to {row.before}: no engine of {row.version} is open yet", *notes])

    def _check_room(self, model: ModelRow, version: VersionRow) -> None:
        deployment = deployments.find(self._context.db, model.id)
        if deployment is None:
            raise Conflict(
                f"{model.id} is not served, so a canary would get no requests; `appliance model deploy "
                f"{model.id}` changes that.",
                param="model",
                code="not_deployed",
            )
        active = models.find_version(self._context.db, model.id, model.active_version or "")
        is_adapter = bool(version.meta.get("adapter"))
        if active is not None and is_adapter is not bool(active.meta.get("adapter")):
            raise Conflict(
                f"{version.version} and {model.active_version} of {model.id} are an adapter and whole "
                "weights, which are not served side by side under one name.",
                param="version",
                code="versions_differ_in_kind",
            )
        have, needed = len(self._context.scheduler.status()["devices"]), 2 * deployment.tensor_parallel
        if not is_adapter and have < needed:
            raise Conflict(
                f"A canary needs an engine in addition to that of {model.active_version}: {needed} devices, and this "
                f"box has {have}. Publish {version.version} with `appliance model rollback {model.id} --version "
                f"{version.version}`, and roll back the same way.",
                param="version",
                code="no_room_for_canary",
            )

    def _end(
        self, row: CanaryRow, state: Literal["promoted", "rolled_back"], reason: str, compared: dict[str, Any]
    ) -> None:
        canaries.end(self._context.db, row.model, state, reason, now_s=time.time(), compared=compared)
        self._leaving.add(row.name)
        self._context.scheduler.nudge(f"{row.name} is no longer a canary")
        log.info("canary %s: %s", state.replace("_", " "), reason, extra={"model": row.model, "version": row.version})

    def _running(self, model: str, judged: CanaryRow | None = None) -> CanaryRow:
        row = canaries.find_running(self._context.db, model)
        if row is None or (judged is not None and (row.name, row.created_s) != (judged.name, judged.created_s)):
            raise Conflict(
                f"{shown(model)} has no canary; `appliance model canary` begins one.", param="model", code="no_canary"
            )
        return row
