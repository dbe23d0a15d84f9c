"""Builds the controller's ASGI app: routes, error shapes, and the background work that starts and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial

from fastapi import FastAPI

from appliance.controller import batches, data_checks, gates, retention
from appliance.controller.admin import box, keys, logins, mode, queue
from appliance.controller.admin import models as admin_models
from appliance.controller.context.context import ControllerContext
from appliance.controller.evals import evals
from appliance.controller.evals.evals import EvalRunner
from appliance.controller.files import file_routes, storage
from appliance.controller.grading import checks
from appliance.controller.grading.judging import Grading
from appliance.controller.http import error_handlers
from appliance.controller.http.routers import make_router
from appliance.controller.interfaces.principal import ADMIN, READ
from appliance.controller.jobs.phases import JobValidation
from appliance.controller.models.activation import Canaries
from appliance.controller.openai import job_routes, model_routes
from appliance.controller.responses import stored as responses
from appliance.controller.responses.stored import StoredResponses

HOUSEKEEPING_EVERY_S, CANARIES_EVERY_S = 30.0, 2.0


def create_app(context: ControllerContext) -> FastAPI:
    """The app; everything it touches is in `context`.

    Its lifespan deletes leftovers of a crash, resumes tasks, publishes the keys and runs housekeeping, and ends all
    background work; run it with uvicorn, or enter `app.router.lifespan_context(app)` in tests.
    """
    JobValidation(context)
    context.tasks.add(admin_models.import_kind(context))
    context.tasks.add(batches.kind(context))
    canaries, stored = Canaries(context), StoredResponses(context)
    grading = Grading(context.db, context.graders, context.asking)
    evaluations = EvalRunner(context, grading)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        storage.sweep(context)
        context.tasks.resume()
        context.spending.publish_keys()
        keep_every = context.background.keep_every
        keep_every("housekeeping", partial(_keep_house, context, stored), HOUSEKEEPING_EVERY_S)
        keep_every("keys that expire", partial(keys.end_expired, context), keys.EXPIRED_EVERY_S, at_once=True)
        keep_every("gates", gates.Gates(context).look, gates.LOOK_EVERY_S)
        keep_every("canaries", lambda: canaries.look(time.time()), CANARIES_EVERY_S)
        try:
            yield
        finally:
            await context.background.stop()
            await context.tasks.stop()
            await context.graders.stop()

    app = FastAPI(title="appliance", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.context = context
    app.state.responses = stored
    error_handlers.install(app)

    admin = make_router("/admin/v1", ADMIN, reads=(READ,))
    for module in (box, keys, mode, queue):
        module.routes(context, admin)
    job_routes.plan_routes(context, admin)
    admin_models.routes(context, admin, canaries)
    for router in (
        logins.routes(context, admin),
        file_routes.file_routes(context),
        file_routes.upload_routes(context),
        data_checks.routes(context),
        batches.routes(context),
        *responses.routes(context, stored),
        job_routes.routes(context),
        job_routes.method_routes(),
        checks.routes(context, grading),
        *evals.routes(context, evaluations),
        model_routes.routes(context),
        admin,
    ):
        app.router.routes.extend(router.routes)
    return app


async def _keep_house(context: ControllerContext, stored: StoredResponses) -> None:
    """One round of housekeeping. A failing part does not stop the others."""
    now_s = time.time()
    for what, work in (
        ("files", partial(retention.keep_house, context)),
        ("uploads", partial(file_routes.end_uploads, context)),
        ("responses", stored.keep_house),
    ):
        with context.background.guard(f"housekeeping of {what}"):
            await asyncio.to_thread(work, now_s)
    with context.background.guard("housekeeping of logins"):
        logins.keep_house(context, now_s)
