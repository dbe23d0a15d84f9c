"""Creates all routers of the control plane: strict bodies, the error shapes, and the required scopes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends

from appliance.controller.http.error_handlers import RESPONSES
from appliance.controller.http.strict_json import StrictRoute
from appliance.controller.interfaces.principal import needs


def make_router(prefix: str, *scopes: str, check: Callable[..., Awaitable[Any]] | None = None) -> APIRouter:
    """A router whose routes require one of `scopes`, or admin; without scopes each route decides, or `check`, a
    dependency, does.

    Everything its routes share is set here, so that `create_app` can use them as they are: `FastAPI.include_router`
    builds every route, with its pydantic models, a second time.
    """
    check = needs(*scopes) if scopes else check
    dependencies = [Depends(check)] if check is not None else []
    return APIRouter(prefix=prefix, route_class=StrictRoute, responses=RESPONSES, dependencies=dependencies)
