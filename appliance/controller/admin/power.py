"""/admin/v1/power: the power limit in force, and who has drawn how much energy."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query

from appliance.controller.context.context import ControllerContext
from appliance.controller.devices import energy_views
from appliance.controller.http.reading import Readings


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the route to the admin router."""
    db = context.db

    @router.get("/power")
    def power(
        readings: Readings,
        since_s: Annotated[float, Query(ge=0, le=1e11, description="Unix time; its hour counts whole")] = 0.0,
    ) -> dict[str, Any]:
        """The power limit in force, and energy by who held the devices: a job (in all its time), a model, nobody.
        `meters`: how many devices count energy at all."""
        return {
            "object": "list",
            "limits": context.power.status(),
            "meters": sum(one.energy_j is not None for one in readings.values()),
            "since_s": since_s,
            "until_s": time.time(),
            "data": energy_views.since(db, since_s),
        }
