"""The controller as one ASGI app: routes, error shapes, and the background work that begins and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial

from fastapi import FastAPI
from starlette.middleware import Middleware

from appliance.controller import (
    admin_box,
    admin_canaries,
    admin_deployments,
    admin_devices,
    admin_forget,
    admin_keys,
    admin_mode,
    admin_models,
    admin_plan,
    admin_queue,
    admin_session_keys,
    admin_usage,
    batch_files,
    batches,
    error_handlers,
    files,
    jobs,
    models,
    permissions,
    responses,
    retention,
    upload_parts,
)
from appliance.controller.background_responses import BackgroundResponses
from appliance.controller.batch_runner import BatchRunner
from appliance.controller.canaries import Canaries
from appliance.controller.context import ControllerContext
from appliance.controller.job_validation import JobValidation
from appliance.controller.middleware import BodyLimits, RequestIds
from appliance.controller.operations import Operations
from appliance.controller.principal import of_admin_routes
from appliance.controller.routers import make_router
from appliance.controller.stored_responses import StoredResponses
from appliance.store import files as file_rows
from appliance.store import idempotency


def create_app(context: ControllerContext) -> FastAPI:
    """The app; everything it touches is in `context`.

    Its lifespan sweeps what a crash left, resumes validations, publishes the keys and keeps house; run it with
    uvicorn, or enter `app.router.lifespan_context(app)` in tests.
    """
    validation, running, runner = JobValidation(context), Operations(context), BatchRunner(context)
    compared, stored = Canaries(context), StoredResponses(context)
    background = BackgroundResponses(context, stored)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        files.sweep(context)
        upload_parts.sweep(context)
        running.fail_interrupted()
        batch_files.sweep(context)
        validation.start_waiting()
        runner.start()
        background.start()
        context.publish_keys()
        keepers = context.keepers
        kept = (
            keepers.keep_every("housekeeping", partial(_keep_house, context, stored, background),
                               context.config.housekeeping_every_s),
            keepers.keep_every("canaries", lambda: compared.look(time.time()), context.config.canary_every_s),
        )  # fmt: skip
        try:
            yield
        finally:
            for task in kept:
                task.cancel()
            await asyncio.gather(*kept, return_exceptions=True)
            await validation.stop()
            await running.stop()
            await runner.stop()
            await background.stop()

    app = FastAPI(
        title="appliance",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=[Middleware(RequestIds), Middleware(BodyLimits, config=context.config)],
    )
    app.state.context, app.state.validation, app.state.operations = context, validation, running
    app.state.batches, app.state.canaries = runner, compared
    app.state.responses, app.state.background = stored, background
    error_handlers.install(app)

    admin = make_router("/admin/v1", check=of_admin_routes)
    admin_box.routes(context, admin)
    admin_mode.routes(context, admin)
    admin_queue.routes(context, admin)
    admin_devices.routes(context, admin)
    admin_deployments.routes(context, admin)
    admin_forget.routes(context, admin, runner, background)
    admin_keys.routes(context, admin, runner, background)
    admin_session_keys.routes(context, admin)
    admin_canaries.routes(context, admin, compared)
    admin_models.routes(context, admin, running, compared)
    admin_plan.routes(context, admin)
    admin_usage.routes(context, admin)
    for router in (files.routes(context), upload_parts.routes(context), batches.routes(context, runner),
                   responses.routes(context, stored, background), responses.internal_routes(stored),
                   jobs.routes(context, validation),
                   permissions.routes(context), models.routes(context), admin):  # fmt: skip
        app.router.routes.extend(router.routes)
    return app


async def _keep_house(
    context: ControllerContext, stored: StoredResponses, background: BackgroundResponses
) -> None:
    """One round. What one part cannot do keeps none of the others from their work."""
    now_s = time.time()
    with context.keepers.guard("housekeeping of files and uploads"):
        keep_house(context, now_s)
    with context.keepers.guard("housekeeping of what was kept long enough"):
        await retention.keep_house(context, now_s)
    with context.keepers.guard("housekeeping of stored responses"):
        stored.keep_house(now_s)
    with context.keepers.guard("housekeeping of background responses"):
        background.keep_house(now_s)


def keep_house(context: ControllerContext, now_s: float) -> None:
    """Delete files and uploads whose time has passed, and forget requests that can no longer be repeated."""
    for row in file_rows.expired(context.db, now_s=now_s):
        files.remove(context, row)
    upload_parts.keep_house(context, now_s)
    admin_session_keys.keep_house(context, now_s)
    if context.db.reserve is not None:
        context.db.reserve.keep()
    idempotency.forget_before(context.db, now_s - context.config.idempotency_keep_s)
