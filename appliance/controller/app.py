"""Builds the controller's ASGI app: routes, error shapes, and the background work that starts and ends with it; and
keeps house: everything that grows with use has a number of days in `[controller.retention]`."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from functools import partial
from importlib import import_module
from pkgutil import iter_modules

from fastapi import FastAPI

from appliance.controller import gates, openai
from appliance.controller.admin import box, keys, logins
from appliance.controller.admin import models as admin_models
from appliance.controller.context.context import ControllerContext
from appliance.controller.files import storage
from appliance.controller.grading import evals as eval_routes
from appliance.controller.grading import judging
from appliance.controller.http.resource import IDEMPOTENCY_KEEP_S
from appliance.controller.http.routers import make_router
from appliance.controller.interfaces import errors
from appliance.controller.interfaces.principal import ADMIN, READ
from appliance.controller.jobs.settings import JobValidation, remove_copies
from appliance.controller.models.activation import Canaries
from appliance.controller.openai import batches, job_routes
from appliance.controller.responses import stored as responses
from appliance.store import evals
from appliance.store.rows import EVAL_RUNS, FILES, JOBS, UNFINISHED

HOUSEKEEPING_EVERY_S, CANARIES_EVERY_S = 30.0, 2.0
# With `routes(context)`, each is an object of the API. Imported here: a table is declared before the database opens.
_OBJECTS = [import_module(f"{openai.__name__}.{module.name}") for module in iter_modules(openai.__path__)]


def create_app(context: ControllerContext) -> FastAPI:
    """The app; everything it touches is in `context`.

    Its lifespan deletes leftovers of a crash, resumes tasks, publishes the keys and runs housekeeping, and ends all
    background work; run it with uvicorn, or enter `app.router.lifespan_context(app)` in tests.
    """
    JobValidation(context)
    context.tasks.add(admin_models.import_kind(context))
    context.tasks.add(batches.kind(context))
    canaries, stored = Canaries(context), responses.StoredResponses(context)
    grading = judging.Grading(context.db, context.graders, context.asking)
    evaluations = eval_routes.EvalRunner(context, grading)

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
    errors.install(app)

    admin = make_router("/admin/v1", ADMIN, reads=(READ,))
    for add_routes in (box.routes, keys.routes, job_routes.plan_routes, job_routes.queue_routes):
        add_routes(context, admin)
    admin_models.routes(context, admin, canaries)
    for router in (
        logins.routes(context, admin),
        storage.file_routes(context),
        storage.upload_routes(context),
        job_routes.check_routes(context),
        *responses.routes(context, stored),
        job_routes.method_routes(),
        judging.routes(context, grading),
        *eval_routes.routes(context, evaluations),
        *(module.routes(context) for module in _OBJECTS if hasattr(module, "routes")),
        admin,
    ):
        app.router.routes.extend(router.routes)
    return app


# --- housekeeping: on a thread, in short transactions


async def _keep_house(context: ControllerContext, stored: responses.StoredResponses) -> None:
    """Run one round of housekeeping. A failing part does not stop the others."""
    now_s = time.time()
    for part, work in (
        ("files", partial(keep_house, context)),
        ("uploads", partial(storage.end_uploads, context)),
        ("responses", stored.keep_house),
    ):
        with context.background.guard(f"housekeeping of {part}"):
            await asyncio.to_thread(work, now_s)
    with context.background.guard("housekeeping of logins"):
        logins.keep_house(context, now_s)


DAY_S = 86400.0
# Keeps jobs with an unreleased snapshot or an existing model; if jobs share the model's name, only jobs that made it
# or one of its versions. Device time of deleted jobs stays.
_JOB_GOES = (
    f"NOT {UNFINISHED['jobs']} AND snapshot IS NULL"
    " AND NOT EXISTS (SELECT 1 FROM models WHERE models.id = jobs.output_model AND (NOT jobs.stable_name"
    "  OR models.job_id = jobs.id OR EXISTS (SELECT 1 FROM versions WHERE job_id = jobs.id)))"
)
_FILE_NEEDED = (
    f"(id IN (SELECT input_file_id FROM batches WHERE {UNFINISHED['batches']})"
    f" OR id IN (SELECT training_file FROM jobs WHERE {UNFINISHED['jobs']})"
    f" OR id IN (SELECT validation_file FROM jobs WHERE {UNFINISHED['jobs']}))"
)


def keep_house(context: ControllerContext, now_s: float) -> None:
    """Delete expired files, old idempotency keys, and rows and folders past their retention."""
    db, kept = context.db, context.config.retention
    files_s, data_s, records_s, usage_s, audit_s = (
        float("-inf") if days is None else now_s - days * DAY_S
        for days in (kept.files_days, kept.job_data_days, kept.records_days, kept.usage_days, kept.audit_days)
    )
    over = f"(expires_s <= ? OR created_s < ?) AND NOT coalesce({_FILE_NEEDED}, 0)"
    while (file := FILES.first(db, over, now_s, files_s)) is not None:  # anew each time: a job may begin meanwhile
        storage.remove(context, file)
    for table, where, before_s in (
        ("idempotency", "created_s < ?", now_s - IDEMPOTENCY_KEEP_S),
        ("audit", "created_s < ?", audit_s),
        ("usage", "hour_s < ? - 3600", usage_s),
        ("device_time", "to_s < ?", usage_s),
        # The newest hand-over stays, because its number determines the next number.
        ("handovers", "ended_s < ? AND seq < (SELECT max(seq) FROM handovers)", records_s),
        ("operations", "ended_s < ? AND state != 'running'", records_s),
        ("batches", f"created_s < ? AND NOT {UNFINISHED['batches']}", records_s),
    ):
        db.delete(table, where, [before_s])
    for run in EVAL_RUNS.list_all(db, f"ended_s < ? AND NOT {UNFINISHED['eval_runs']}", records_s):
        evals.delete(db, run.id)
    for job_id in db.column(f"SELECT id FROM jobs WHERE finished_s < ? AND {_JOB_GOES}", [records_s]):
        # Delete the folder first: after a crash in between, the row causes another deletion.
        shutil.rmtree(context.jobs_dir / job_id, ignore_errors=True)
        for table in ("job_events", "job_metrics"):  # up to 100,000 rows each
            db.delete(table, "job_id = ?", [job_id])
        JOBS.delete(db, job_id)
    ended = {row["id"]: row["finished_s"] for row in db.execute("SELECT id, finished_s FROM jobs WHERE finished_s > 0")}
    for folder in [folder for folder in context.jobs_dir.iterdir() if folder.name in ended]:
        remove_copies(context, folder.name)
        if ended[folder.name] < data_s:
            shutil.rmtree(folder, ignore_errors=True)
