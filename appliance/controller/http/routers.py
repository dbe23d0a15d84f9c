"""Creates all routers of the control plane: strict bodies, the error shapes, the required scopes, the audit's names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends

from appliance.controller.http.audited import Audit
from appliance.controller.http.error_handlers import RESPONSES
from appliance.controller.http.strict_json import StrictRoute
from appliance.controller.interfaces.principal import needs


def make_router(
    prefix: str,
    *scopes: str,
    noun: str = "",
    fields: tuple[str, ...] = (),
    check: Callable[..., Awaitable[Any]] | None = None,
) -> APIRouter:
    """A router whose routes require one of `scopes`, or admin; without scopes each route decides, or `check`, a
    dependency, does. noun, fields: of the audit rows of its changes (`Audit`)."""

    class Route(StrictRoute):
        audit = Audit(noun, prefix, fields)

    check = needs(*scopes) if scopes else check
    dependencies = [Depends(check)] if check is not None else []
    return APIRouter(prefix=prefix, route_class=Route, responses=RESPONSES, dependencies=dependencies)
