"""A route is built when something of it is first asked for; here all are, so that one that FastAPI refuses is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.exceptions import FastAPIError
from fastapi.routing import APIRoute

from appliance.controller.app import create_app
from appliance.controller.http.routers import make_router
from appliance.controller.http.strict_json import StrictRoute
from appliance.store.database import Database
from tests.simulator.control_plane import simulated_context
from tests.unit.controller.conftest import Control

ROUTING_ASKS = {"path", "endpoint", "name", "path_regex", "path_format", "param_convertors", "methods"}


def test_every_route_can_be_built_and_none_is_before_it_is_asked_for(tmp_path: Path, db: Database):
    routes = [route for route in create_app(simulated_context(tmp_path, db)).routes if isinstance(route, StrictRoute)]
    assert len(routes) > 100
    for route in routes:
        assert vars(route).keys() == ROUTING_ASKS | {"_options"}, route.path
        at_once = {name: vars(route)[name] for name in ROUTING_ASKS}
        assert route.dependant.call is route.endpoint
        # What routing had at once is what FastAPI would have given it.
        assert {name: vars(route)[name] for name in ROUTING_ASKS} == at_once
        assert vars(route).keys() >= {"app", "body_field", "response_field", "unique_id"}


async def test_a_request_builds_the_one_route_that_it_asks(control: Control):
    (wanted,) = [route for route in control.app.routes if getattr(route, "path", "") == "/v1/fine_tuning/jobs/{job_id}"]
    assert (await control.http.put("/v1/fine_tuning/jobs/none")).status_code == 405
    assert "dependant" not in vars(wanted)
    assert (await control.http.get("/v1/fine_tuning/jobs/none")).status_code == 404
    built = [route.path for route in control.app.routes if isinstance(route, APIRoute) and "dependant" in vars(route)]
    assert built == ["/v1/fine_tuning/jobs/{job_id}"]


def test_a_route_that_fastapi_refuses_is_refused_each_time(tmp_path: Path):
    router = make_router("/admin/v1")

    @router.get("/strange")
    async def strange(value: Path | FastAPI) -> None: ...

    (route,) = router.routes
    for _ in range(2):
        with pytest.raises(FastAPIError, match="Invalid args for response field"):
            route.dependant  # type: ignore[attr-defined]  # noqa: B018


def test_what_no_route_has_is_missing():
    router = make_router("/admin/v1")

    @router.get("/plain")
    async def plain() -> None: ...

    (route,) = router.routes
    for _ in range(2):
        assert not hasattr(route, "colour")
