"""Builds the controller's ASGI app: routes, error shapes, and the background work that starts and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial

from fastapi import FastAPI
from starlette.middleware import Middleware

from appliance.controller import data_checks, retention
from appliance.controller.admin import box, devices, logs, mode, profile, queue
from appliance.controller.admin.models import canaries as canary_routes
from appliance.controller.admin.models import engine_settings, operations
from appliance.controller.admin.models import models as admin_models
from appliance.controller.admin.owners import forget, key_ends, keys, page_sessions
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
from appliance.controller.interfaces.principal import of_admin_routes
from appliance.controller.jobs import plan_route
from appliance.controller.jobs.validation import JobValidation
from appliance.controller.models.canaries import Canaries
from appliance.controller.oidc import routes as oidc_routes
from appliance.controller.oidc.provider import Provider
from appliance.controller.openai import (
    batch_routes,
    job_routes,
    model_routes,
    response_routes,
)
from appliance.controller.responses.background import BackgroundResponses
from appliance.controller.responses.stored import StoredResponses


def create_app(context: ControllerContext, *, oidc: Provider | None = None) -> FastAPI:
    """The app; everything it touches is in `context`. oidc: in place of the login provider of the settings, in tests.

    Its lifespan deletes leftovers of a crash, resumes tasks, publishes the keys and runs housekeeping; run it
    with uvicorn, or enter `app.router.lifespan_context(app)` in tests.
    """
    JobValidation(context)
    operations.Operations(context)
    checks = data_checks.DataWork(context)
    context.tasks.add(batch_work.kind(context))
    canaries, stored = Canaries(context), StoredResponses(context)
    background = BackgroundResponses(context, stored)
    grading = Grading(context.db, context.graders, context.asking)
    evaluations = EvalRunner(context, grading)
    gates = Gates(context)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        storage.sweep(context)
        context.tasks.resume()
        context.spending.publish_keys()
        keep_every = context.background.keep_every
        rounds = (
            keep_every("housekeeping", partial(_keep_house, context, stored), context.config.housekeeping_every_s),
            keep_every("keys that expire", partial(key_ends.end_expired, context), keys.EXPIRED_EVERY_S, at_once=True),
            keep_every("gates", gates.look, GATES_EVERY_S),
            keep_every("canaries", lambda: canaries.look(time.time()), context.config.canary_every_s),
        )
        try:
            yield
        finally:
            for task in rounds:
                task.cancel()
            await asyncio.gather(*rounds, return_exceptions=True)
            await canaries.tasks.stop()
            await context.tasks.stop()
            await context.graders.stop()

    app = FastAPI(
        title="appliance",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=[Middleware(RequestIds)],
    )
    app.state.context = context
    app.state.responses = stored
    error_handlers.install(app)

    admin = make_router("/admin/v1", check=of_admin_routes)
    for group in (box, mode, queue, logs, profile, devices, keys, page_sessions, plan_route):
        group.routes(context, admin)
    engine_settings.routes(context, admin)
    forget.routes(context, admin, evaluations)
    canary_routes.routes(context, admin, canaries)
    operations.routes(context, admin)
    admin_models.routes(context, admin, canaries)
    for router in (
        file_routes.routes(context),
        upload_routes.routes(context),
        data_checks.routes(context, checks),
        batch_routes.routes(context),
        response_routes.routes(context, stored, background),
        response_routes.internal_routes(stored),
        response_routes.completion_routes(context, stored),
        job_routes.reading_routes(context),
        job_routes.routes(context, context.graders),
        job_routes.method_routes(),
        grader_routes.routes(context, grading),
        *eval_routes.routes(context, evaluations),
        model_routes.routes(context),
        oidc_routes.routes(context, oidc),
        admin,
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
        page_sessions.keep_house(context, now_s)
