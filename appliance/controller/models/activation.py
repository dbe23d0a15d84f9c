"""Makes another version of a model the active one, in the store and then in every replica of it: at once, or as a
canary first, which gets a share of the model's requests, is compared with the active version, and is promoted or rolled
back, by hand or automatically.

A caller of `switch` holds the model's `lock` from before reading its row. Jobs and imports activate without it, so a
failed change takes back its own version only. The gateways keep the request counts, since they outlive this process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

from appliance.controller.access.model_access import caller_of, stored_model, stored_version
from appliance.controller.bus.bus import VersionLoad
from appliance.controller.context.context import ControllerContext, record
from appliance.controller.interfaces.errors import Conflict, InvalidValue, NotFound, SwapFailed, shown
from appliance.controller.interfaces.principal import Principal
from appliance.gateway.core.table import BUCKETS_PER_DOUBLING, SHORTEST_S
from appliance.store import models
from appliance.store.database import RowNotFound
from appliance.store.rows import CANARIES, DEPLOYMENTS, CanaryRow, ModelRow, VersionRow, columns

_LOCKS: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # weak: names come and go


def lock(model: str) -> asyncio.Lock:
    return _LOCKS.setdefault(model, asyncio.Lock())


async def change(
    context: ControllerContext, row: ModelRow, version: str, caller: Principal, action: str, why: str
) -> None:
    """Run `switch` at a person's request; audit a failure as `action`. Raises Conflict."""
    try:
        await switch(context, row, version, f"{row.id} {why}")
    except SwapFailed as error:
        record(context, caller, action, row.id, outcome="failed", to=version, error=str(error))
        raise Conflict(f"The change of {row.id} failed: {error}", param="version", code="swap_failed") from error


async def switch(context: ControllerContext, row: ModelRow, version: str, why: str) -> None:
    """Activate a version and swap the replicas. Raises SwapFailed after restoring the version of `row` in the store and
    in replicas, unless that version, or the model, was deleted meanwhile."""
    models.activate(context.db, row.id, version)
    context.scheduler.nudge(why)
    try:
        await context.scheduler.converge_model(row.id)
    except SwapFailed:
        with suppress(RowNotFound), context.db.transaction():  # the previous version was deleted too
            now = models.find(context.db, row.id)
            if now is not None and now.active_version == version and row.active_version is not None:
                models.activate(context.db, row.id, row.active_version)
                context.scheduler.nudge(f"{row.id} stays at {row.active_version}")
        raise


log = logging.getLogger("appliance.controller")

ERROR_CHANCE = 0.001
"""Roll back when chance would produce as many canary errors less often than this: far below 5 %, because counts are
checked often."""
SLOWER_FACTOR = 1.5
SLOWER_SLACK_S = 0.005
"""How much higher the 95th percentile may be than the other version's: a factor, and seconds of tolerance."""


class Canaries:
    """All canaries of a box. Code that ends a canary holds the model's `lock`."""

    def __init__(self, context: ControllerContext):
        self._context, self._db = context, context.db

    async def look(self, now_s: float) -> None:
        """Start a task for each canary whose model is not being changed; the task ends the canary if that is due.
        Separate tasks, because a swap may take minutes, during which another model's canary may have to be rolled
        back."""
        for row in models.running_canaries(self._db):
            if not lock(row.model).locked():
                self._context.background.once(f"canary: {row.model}", partial(self._look_at, row.model, now_s))
        served = {replica["model"] for replica in self._context.scheduler.status()["replicas"]}
        for name in {row.name for row in CANARIES.list_all(self._db, "state != 'running'")} - served:
            self._context.model_ops.let_go(name)  # runs after the canary's engine has gone

    async def _look_at(self, name: str, now_s: float) -> None:
        # NotFound: the model may be deleted meanwhile.
        with suppress(NotFound):
            async with lock(name):
                row = models.find_canary(self._db, name)
                if row is None:
                    return
                model, caller = stored_model(self._db, name), caller_of(self._db, None)
                verdict, reason = self._decision(row, model, now_s)
                if model.active_version == row.before:
                    if not row.auto:
                        return
                    if verdict == "promote":
                        try:
                            await self.promote(model, caller, reason)
                            return
                        except Conflict as error:
                            verdict, reason = "roll back", error.message
                if verdict != "wait":
                    self._end(row, caller, reason, promoted=verdict == "promote")

    def begin(self, name: str, caller: Principal, *, version: str, **settings: Any) -> CanaryRow:
        """Begin a canary. settings: share, auto, watch_s and min_requests of its row. Raises NotFound, Conflict,
        BadRequest."""
        db, model = self._db, stored_model(self._db, name)
        stored = stored_version(db, name, version)
        if version == model.active_version:
            raise InvalidValue(f"{version} is already the active version of {name}; name another one.", "version")
        running = models.find_canary(db, name)
        if running is not None and running.version != version:
            text = f"{running.version} is the canary of {name}; promote it or roll it back first."
            raise Conflict(text, "version", "canary_running")
        self._check_room(model, stored)
        created_s = time.time() if running is None else running.created_s  # a running canary keeps its counts
        row = CanaryRow(name, version, model.active_version or "", created_s=created_s, **settings)
        CANARIES.put(db, row)
        self._context.scheduler.loop.reset_failures(row.name)
        self._context.scheduler.nudge(f"{row.name} takes {row.share:.0%} of the requests of {name}")
        record(self._context, caller, "model.canary", name, version=version, **settings)
        return row

    async def promote(self, model: ModelRow, caller: Principal, reason: str) -> dict[str, Any]:
        """Make the canary the active version. Raises Conflict if there is no canary, or if the swap failed, after which
        it stays a canary."""
        row = self._running(model.id)
        compared = self._compared(row)  # before the swap, after which both names mean one version
        why = f"promotes {row.version}: {reason}"
        await change(self._context, model, row.version, caller, "model.promote", why)
        self._end(row, caller, reason, promoted=True, compared=compared)
        return {"model": model.id, "from": row.before, "to": row.version}

    def roll_back(self, name: str, caller: Principal) -> dict[str, Any]:
        """Send all requests to the previous version again. Raises Conflict if there is no canary."""
        row, to = self._running(name), stored_model(self._db, name).active_version
        self._end(row, caller, "asked for", promoted=False)
        return {"model": name, "from": row.version, "to": to}

    def view(self, row: CanaryRow) -> dict[str, Any]:
        running = row.state == "running"
        decision = self._decision(row, stored_model(self._db, row.model), time.time()) if running else None
        return {
            **columns(row, "model name version before share watch_s min_requests state created_s ended_s"),
            "auto": bool(row.auto),
            "reason": row.reason or None,
            "decision": None if decision is None else decision._asdict(),
            "versions": self._compared(row) if running else row.compared,
        }

    def _decision(self, row: CanaryRow, model: ModelRow, now_s: float) -> Decision:
        active = model.active_version
        if active == row.version:  # activated by another caller, or the process ended after the swap
            return Decision("promote", f"{active} answers all requests")
        if active != row.before:
            reason = f"{active} became the active version while {row.version} was compared with {row.before}"
            return Decision("roll back", reason)
        for trouble in self._context.scheduler.status()["troubles"]:
            if trouble["model"] == row.name and trouble["lasting"]:
                return Decision("roll back", f"the engine of {row.version} does not start: {trouble['reason']}")
        loads = self._loads(row)
        return decide(row, loads[row.version], loads[row.before], now_s)

    def _compared(self, row: CanaryRow) -> dict[str, Any]:
        """Return {version: {"requests", "errors", "first_byte_p95_s", "duration_p95_s"}}."""
        return {
            version: {
                **columns(load, "requests errors"),
                "first_byte_p95_s": p95_s(load.first_byte),
                "duration_p95_s": p95_s(load.duration),
            }
            for version, load in self._loads(row).items()
        }

    def _loads(self, row: CanaryRow) -> dict[str, VersionLoad]:
        """Return the gateways' counts of requests to the canary and to the version before it."""
        load = self._context.bus.load().canaries.get(row.model)
        counted = load.versions if load is not None and load.since_s == row.created_s else {}
        return {version: counted.get(version, VersionLoad()) for version in (row.version, row.before)}

    def _check_room(self, model: ModelRow, version: VersionRow) -> None:
        """Check that the devices suffice for the canary's engine. Raises Conflict."""
        deployment, active = DEPLOYMENTS.find(self._db, model.id), models.active(self._db, model)
        if deployment is None:
            remedy = f"`appliance model deploy {model.id}` changes that."
            why = f"{model.id} is not served, so a canary would get no requests; {remedy}"
            raise Conflict(why, "model", "not_deployed")
        is_adapter = bool(version.meta.get("adapter"))
        if active is not None and is_adapter is not bool(active.meta.get("adapter")):
            both = f"{version.version} and {active.version} of {model.id}"
            why = f"{both} are an adapter and whole weights, which are not served side by side under one name."
            raise Conflict(why, "version", "versions_differ_in_kind")
        count, needed = len(self._context.scheduler.status()["devices"]), 2 * deployment.tensor_parallel
        if not is_adapter and count < needed:
            why = f"A canary needs an engine in addition to that of {model.active_version}"
            raise Conflict(f"{why}: {needed} devices, and this box has {count}.", "model", "no_room_for_canary")

    def _end(
        self, row: CanaryRow, caller: Principal, reason: str, *, promoted: bool, compared: dict[str, Any] | None = None
    ) -> None:
        active, compared = stored_model(self._db, row.model).active_version, compared or self._compared(row)
        state = "promoted" if promoted else "rolled_back"
        CANARIES.update(self._db, row.model, state=state, reason=reason, ended_s=time.time(), compared=compared)
        action, before = ("promote", row.before) if promoted else ("rollback", row.version)
        record(self._context, caller, f"model.{action}", row.model, before=before, to=active, reason=reason)
        self._context.scheduler.nudge(f"{row.name} is no longer a canary")
        log.info("canary %s: %s", state.replace("_", " "), reason, extra={"model": row.model, "version": row.version})

    def _running(self, name: str) -> CanaryRow:
        if (row := models.find_canary(self._db, name)) is None:
            text = f"{shown(name)} has no canary; `appliance model canary` begins one."
            raise Conflict(text, "model", "no_canary")
        return row


class Decision(NamedTuple):
    verdict: Literal["wait", "promote", "roll back"]
    reason: str


def decide(row: CanaryRow, new: VersionLoad, old: VersionLoad, now_s: float) -> Decision:
    """Decide on a canary by the first matching rule. new, old: counts of the canary and of the version before it."""
    sides = ((row.version, new), (row.before, old))
    counts = ", ".join(f"{name} failed {load.errors} of {load.requests} requests" for name, load in sides)
    if chance_of_errors(new, old) < ERROR_CHANCE:
        return Decision("roll back", counts)
    for name, load in sides:
        if load.requests < row.min_requests:
            return Decision("wait", f"{name} answered {load.requests} of {row.min_requests} requests")
    # Times are compared only at the end of the watch, so that an engine's slow first requests do not decide.
    if (left_s := row.created_s + row.watch_s - now_s) > 0:
        return Decision("wait", f"watched for {math.ceil(left_s)} s more")
    for measure, canary_s, active_s in (
        ("time to first byte", p95_s(new.first_byte), p95_s(old.first_byte)),
        ("duration", p95_s(new.duration), p95_s(old.duration)),
    ):
        if canary_s is not None and active_s is not None and canary_s > SLOWER_FACTOR * active_s + SLOWER_SLACK_S:
            both = f"{canary_s:.3g} s with {row.version}, {active_s:.3g} s with {row.before}"
            return Decision("roll back", f"the 95th percentile of the {measure} is {both}")
    return Decision("promote", f"{row.version} is as good as {row.before}: {counts}")


def p95_s(counts: Mapping[int, int]) -> float | None:
    """Return the 95th percentile (seconds) of times counted in buckets, as its bucket's upper end; None without
    times."""
    total, seen = sum(counts.values()), 0
    for index in sorted(counts):
        seen += counts[index]
        if seen and seen >= 0.95 * total:
            return SHORTEST_S * 2 ** (index / BUCKETS_PER_DOUBLING)
    return None


def chance_of_errors(new: VersionLoad, old: VersionLoad) -> float:
    """Return the p-value of Fisher's exact test: the chance of at least as many errors of `new` if both fail equally
    often; 1 if `new` fails no more often than `old`."""
    requests, errors = new.requests + old.requests, new.errors + old.errors
    if not old.requests or new.errors * requests <= errors * new.requests:
        return 1.0
    from scipy.stats import hypergeom  # importing scipy takes a second; only boxes with canaries need it

    return float(hypergeom.sf(new.errors - 1, requests, errors, new.requests))
