"""Makes another version of a model the active one: in the store, and then in every replica of it.

One change of a model's version at a time: a caller of `switch` holds the model's `lock` from before reading its row.
A job that publishes and an import activate without it: theirs is the newest version, and the replicas follow. So a
failed change takes back its own version only.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from weakref import WeakValueDictionary

from appliance.controller.context.context import ControllerContext, record
from appliance.controller.interfaces.errors import Conflict, SwapFailed
from appliance.controller.interfaces.principal import Principal
from appliance.store.errors import RowNotFound
from appliance.store.objects import models
from appliance.store.rows import ModelRow

_LOCKS: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # names come and go


def lock(model: str) -> asyncio.Lock:
    return _LOCKS.setdefault(model, asyncio.Lock())


async def change(
    context: ControllerContext, row: ModelRow, version: str, caller: Principal, action: str, why: str
) -> None:
    """`switch` at a person's request, whose failure is audited as `action`. Raises Conflict."""
    try:
        await switch(context, row, version, f"{row.id} {why}")
    except SwapFailed as error:
        record(context, caller, action, row.id, outcome="failed", to=version, error=str(error))
        raise Conflict(f"The change of {row.id} failed: {error}", param="version", code="swap_failed") from error


async def switch(context: ControllerContext, row: ModelRow, version: str, why: str) -> None:
    """Raises SwapFailed: the store has the version of `row` again, and its replicas keep it or
    go back to it; unless that version, or the model, was deleted meanwhile."""
    models.activate(context.db, row.id, version)
    context.scheduler.nudge(why)
    try:
        await context.scheduler.converge_model(row.id)
    except SwapFailed:
        with suppress(RowNotFound), context.db.transaction():  # the version before is gone too
            now = models.find(context.db, row.id)
            if now is not None and now.active_version == version and row.active_version is not None:
                models.activate(context.db, row.id, row.active_version)
                context.scheduler.nudge(f"{row.id} stays at {row.active_version}")
        raise
