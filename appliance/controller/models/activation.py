"""Makes another version of a model the active one: in the store, and then in every replica of it."""

from __future__ import annotations

from typing import Any

from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import SwapFailed
from appliance.store.objects import models
from appliance.store.rows import ModelRow


async def switch(context: ControllerContext, row: ModelRow, version: str, why: str) -> dict[str, Any]:
    """The swap's measurements. Raises SwapFailed: replicas and store then keep the previous version."""
    models.activate(context.db, row.id, version)
    context.scheduler.nudge(why)
    try:
        return await context.scheduler.converge_model(row.id)
    except SwapFailed:
        models.update(context.db, row.id, active_version=row.active_version)
        raise
