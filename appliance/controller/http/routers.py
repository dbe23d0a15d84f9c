"""Every router of the control plane is made here: strict bodies, the error shapes, and the scopes a caller needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends

from appliance.controller.http.error_handlers import RESPONSES
from appliance.controller.http.strict_json import StrictRoute
from appliance.controller.interfaces.principal import needs


def make_router(prefix: str, *scopes: str, check: Callable[..., Awaitable[Any]] | None = None) -> APIRouter:
    """A router whose routes a caller with one of `scopes`, or with admin, may use; without scopes each route says, or
    `check`, a dependency, does.

    All that its routes share is given here, so that `create_app` can take them as they are:
    `FastAPI.include_router` builds every route, with its pydantic models, a second time.
    """
    check = needs(*scopes) if scopes else check
    dependencies = [Depends(check)] if check is not None else []
    return APIRouter(prefix=prefix, route_class=StrictRoute, responses=RESPONSES, dependencies=dependencies)
