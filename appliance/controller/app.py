"""Builds the controller's ASGI app: routes, error shapes, and the background work that starts and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import pkgutil
import time
from collections.abc import AsyncIterator
from functools import partial

from fastapi import FastAPI

from appliance.controller import admin, data_checks, retention
from appliance.controller.admin import owners
from appliance.controller.admin.models import canaries as canary_routes
from appliance.controller.admin.models import engine_settings, operations
from appliance.controller.admin.models import models as admin_models
from appliance.controller.admin.owners import key_ends, keys, logins
from appliance.controller.batches import work as batch_work
from appliance.controller.context.context import ControllerContext
from appliance.controller.evals import eval_routes
from appliance.controller.evals.runner import EvalRunner
from appliance.controller.files import file_routes, storage, upload_routes
from appliance.controller.gates import LOOK_EVERY_S as GATES_EVERY_S
from appliance.controller.gates import Gates
from appliance.controller.grading import grader_routes
from appliance.controller.grading.grading import Grading
from appliance.controller.http import error_handlers
from appliance.controller.http.peers import RequestIds
from appliance.controller.http.routers import make_router
from appliance.controller.interfaces.principal import ADMIN, READ
from appliance.controller.jobs import plan_route
from appliance.controller.jobs.validation import JobValidation
from appliance.controller.models.canaries import Canaries
from appliance.controller.openai import (
    batch_routes,
    job_routes,
    model_routes,
    response_routes,
)
from appliance.controller.responses.stored import StoredResponses

ADMIN_FILES = [
    importlib.import_module(found.name)
    for package in (admin, owners)
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
]
"""Those with `routes(context, admin_router)`, which may return a router of its own, need no line here. Imported before
a database is opened, which has the tables that they declare."""


def create_app(context: ControllerContext) -> FastAPI:
    """The app; everything it touches is in `context`.

    Its lifespan deletes leftovers of a crash, resumes tasks, publishes the keys and runs housekeeping, and ends all
    background work; run it with uvicorn, or enter `app.router.lifespan_context(app)` in tests.
    """
    JobValidation(context)
    context.tasks.add(operations.kind(context))
    checks = data_checks.DataWork(context)
    context.tasks.add(batch_work.kind(context))
    canaries, stored = Canaries(context), StoredResponses(context)
    grading = Grading(context.db, context.graders, context.asking)
    evaluations = EvalRunner(context, grading)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        storage.sweep(context)
        context.tasks.resume()
        context.spending.publish_keys()
        keep_every = context.background.keep_every
        keep_every("housekeeping", partial(_keep_house, context, stored), context.config.housekeeping_every_s)
        keep_every("keys that expire", partial(key_ends.end_expired, context), keys.EXPIRED_EVERY_S, at_once=True)
        keep_every("gates", Gates(context).look, GATES_EVERY_S)
        keep_every("canaries", lambda: canaries.look(time.time()), context.config.canary_every_s)
        try:
            yield
        finally:
            await context.background.stop()
            await canaries.tasks.stop()
            await context.tasks.stop()
            await context.graders.stop()

    app = FastAPI(title="appliance", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(RequestIds)
    app.state.context = context
    app.state.responses = stored
    error_handlers.install(app)

    admin_router = make_router("/admin/v1", ADMIN, reads=(READ,))
    own = [module.routes(context, admin_router) for module in ADMIN_FILES if hasattr(module, "routes")]
    plan_route.routes(context, admin_router)
    engine_settings.routes(context, admin_router)
    canary_routes.routes(context, admin_router, canaries)
    operations.routes(context, admin_router)
    admin_models.routes(context, admin_router, canaries)
    for router in (
        *(router for router in own if router is not None),
        file_routes.routes(context),
        upload_routes.routes(context),
        data_checks.routes(context, checks),
        batch_routes.routes(context),
        *response_routes.routes(context, stored),
        job_routes.routes(context),
        job_routes.method_routes(),
        grader_routes.routes(context, grading),
        *eval_routes.routes(context, evaluations),
        model_routes.routes(context),
        admin_router,
    ):
        app.router.routes.extend(router.routes)
    return app


async def _keep_house(context: ControllerContext, stored: StoredResponses) -> None:
    """One round of housekeeping. A failing part does not stop the others."""
    now_s = time.time()
    for what, work in (
        ("files", partial(retention.keep_house, context)),
        ("uploads", partial(upload_routes.keep_house, context)),
        ("responses", stored.keep_house),
    ):
        with context.background.guard(f"housekeeping of {what}"):
            await asyncio.to_thread(work, now_s)
    with context.background.guard("housekeeping of logins"):
        logins.keep_house(context, now_s)
