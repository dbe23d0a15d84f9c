"""Counts each route and each round of a controller whose store is filled."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from fastapi import FastAPI

from appliance.controller import retention
from appliance.controller.access.spending import Spending, key_table
from appliance.controller.admin.owners import forget
from appliance.controller.app import create_app
from appliance.controller.batches.background_responses import BackgroundResponses
from appliance.controller.batches.runner import BatchRunner
from appliance.controller.bus.load import Load
from appliance.controller.context.context import ControllerContext
from appliance.controller.data_checks.data_work import DataWork
from appliance.controller.evals.runner import EvalRunner
from appliance.controller.http.peers import FromBox
from appliance.controller.interfaces.config import OwnerBounds
from appliance.controller.jobs.events import JobEvents
from appliance.controller.jobs.validation import JobValidation
from appliance.store import chunks, database
from appliance.store.database import Database
from appliance.store.objects import jobs
from appliance.store.records import usage
from appliance.wiring.routing_table import BusRouting
from appliance.wiring.state_store import BoxSize, Live, SqliteStateStore
from runtime.background_tasks import BackgroundTasks
from scheduler.core.workload import Demand
from tests.simulator.control_plane import simulated_context
from tests.unit.controller.conftest import insert_model
from tests.unit.loop_cost import asked
from tests.unit.loop_cost.fill import FILE, OTHER, OWNER, Size, fill
from tests.unit.loop_cost.meter import Meter, Told

PAGE_ROWS, CHUNK_ROWS = 25, 20
HEADERS = {
    name: {"x-appliance-key-id": f"key_{name}", "x-appliance-scopes": scopes}
    for name, scopes in ((OWNER, "inference,fine_tuning"), (OTHER, "inference,fine_tuning"), ("admin", "admin"))
}
HEADERS["box"] = {}
GATEWAY = {"x-appliance-key-id": "gateway", "x-appliance-scopes": "gateway"}


@dataclass
class Counted:
    """By the name of a request or a round. statuses: of requests."""

    told: dict[str, Told] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    by: dict[str, dict[str, int]] = field(default_factory=dict)


@contextmanager
def scaled() -> Iterator[None]:
    """Bounds of what is done at once, as small as the store."""
    with (
        mock.patch.object(database, "PAGE_ROWS", PAGE_ROWS),
        mock.patch.object(chunks, "CHUNK_ROWS", CHUNK_ROWS),
        mock.patch.object(chunks, "CHUNK_BYTES", CHUNK_ROWS * 1000),
        mock.patch.object(retention, "CHUNK", CHUNK_ROWS),
        mock.patch.object(forget, "ENDS_WITHIN_S", 0.1),
        mock.patch.object(usage, "_ROWS_AT_ONCE", CHUNK_ROWS),
        mock.patch.object(usage, "_MOST_HOURS", CHUNK_ROWS),
        mock.patch.object(re, "_MAXCACHE", 1 << 20),  # once it is full, any expression may be compiled anew
    ):
        yield


def count(folder: Path, size: Size, *, only: str = "", sources: bool = False) -> Counted:
    meter = Meter(sources)
    with meter.installed(), scaled():
        return asyncio.run(_count(folder, size, meter, only))


async def _count(folder: Path, size: Size, meter: Meter, only: str) -> Counted:
    found = Counted()

    async def one(name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        if only and only not in name:
            return None
        came, told = await meter.of(work())
        found.told[name] = told
        found.by[name] = dict(meter.by)
        return came

    folder.mkdir()
    with Database(folder / "appliance.db") as db:
        insert_model(db, "starter", info={})
        fill(db, size)
        context = _context(folder, db, size)
        rounds: dict[str, Callable[[], Awaitable[None]]] = {}
        with _nothing_by_itself(rounds):
            app = create_app(context)
            app.openapi()  # builds all routes, or the first request of each would
            async with app.router.lifespan_context(app):
                transport = httpx.ASGITransport(FromBox(app), raise_app_exceptions=False)
                async with httpx.AsyncClient(transport=transport, base_url="http://box") as http:
                    for name, work in {**rounds, **_others(context, app)}.items():
                        if name != "housekeeping":
                            await one(f"round: {name}", work)
                    requests = [*asked.reads(app, size.kept - 1, size.kept)]
                    requests += asked.changes(app, size.kept - 1, size.kept)
                    for request in requests:
                        if request.route == "/admin/v1/forget" and request.method == "POST":
                            _end_all(db)
                        answer = await one(request.name, lambda request=request: _send(http, request))
                        if answer is not None:
                            found.statuses[request.name] = answer.status_code
                            found.texts[request.name] = answer.text[:300]
                    await one("round: housekeeping", rounds["housekeeping"])
    shutil.rmtree(folder)
    return found


async def _send(http: httpx.AsyncClient, request: asked.Request) -> httpx.Response:
    headers = GATEWAY if request.route == "/internal/responses" else HEADERS[request.by]
    if request.route.endswith("/touch"):
        headers = {**headers, "x-appliance-session": request.path.split("/")[-2]}
    if request.data is not None:
        part = {"data" if request.route.endswith("/parts") else "file": ("a.jsonl", request.data)}
        return await http.request(request.method, request.path, files=part, data=request.body, headers=headers)
    return await http.request(request.method, request.path, json=request.body, headers=headers)


def _context(folder: Path, db: Database, size: Size) -> ControllerContext:
    bounds = OwnerBounds(models=10**6, uploads=10**6, batches=10**6, jobs=10**6, background=10**6, eval_runs=10**6)
    context = simulated_context(folder, db, bounds=bounds, disk_floor_bytes=0)
    for owner in (OWNER, OTHER):
        for place in range(size.all if owner == OWNER else 12):
            (context.jobs_dir / f"job-{owner}-{place}").mkdir()
            (context.files_dir / f"file-{owner}-{place}").write_bytes(FILE)
        (context.uploads_dir / f"upload-{owner}-0").mkdir()
        for place in range(size.kept if owner == OWNER else 12):
            (context.uploads_dir / f"upload-{owner}-0" / f"part-{owner}-{place}").write_bytes(b"x")
    return context


@contextmanager
def _nothing_by_itself(rounds: dict[str, Callable[[], Awaitable[None]]]) -> Iterator[None]:
    """Rounds are begun here, and nothing goes on because a controller has started."""

    def keep_every(_: BackgroundTasks, name: str, once: Any, every_s: float, **__: Any) -> asyncio.Task[None]:
        rounds[name] = once
        return asyncio.create_task(asyncio.sleep(3600))

    async def process(_: DataWork, request: Any) -> dict[str, Any]:
        if "prepare" not in request:
            return {"checks": {}, "examples": 12}
        for target in request["targets"]:
            Path(target).write_bytes(FILE)
        return {"from": {}, "asked": {}, "dropped": {}, "made": [{"sha256": "0" * 64} for _ in request["targets"]]}

    with (
        mock.patch.object(BackgroundTasks, "keep_every", keep_every),
        mock.patch.object(BatchRunner, "start", lambda _: None),
        mock.patch.object(BackgroundResponses, "start", lambda _: None),
        mock.patch.object(EvalRunner, "start", lambda _: None),
        mock.patch.object(JobValidation, "start_waiting", lambda _: None),
        mock.patch.object(DataWork, "_process", process),
    ):
        yield


def _end_all(db: Database) -> None:
    """Whoever is forgotten is waited for."""
    for table, column, ended in (
        ("jobs", "phase", "cancelled"),
        ("batches", "status", "cancelled"),
        ("responses", "status", "cancelled"),
        ("eval_runs", "status", "canceled"),
    ):
        db.execute(f"UPDATE {table} SET {column} = ?", [ended])


_USAGE = {
    "key": f"key_{OWNER}",
    "model": "starter",
    "version": "v1",
    **dict.fromkeys(("requests", "errors", "prompt_tokens", "completion_tokens"), 1),
}


class _Bus:
    """As much of it as the routing table needs."""

    models: dict[str, Any] = {}

    def set_models(self, models: dict[str, Any]) -> int:
        return len(models)

    def load(self) -> Load:
        return Load()


def _others(context: ControllerContext, app: FastAPI) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Rounds of the main process that are not the app's."""
    db = context.db
    events = JobEvents(db, context.files_dir, "local")
    states = SqliteStateStore(db, events, BoxSize(1, 8, 2), Live(lambda: lambda _: Demand()), lambda: None)
    routing = BusRouting(_Bus(), db, 10.0)  # type: ignore[arg-type]

    def of(work: Callable[[], Any]) -> Callable[[], Awaitable[Any]]:
        async def called() -> Any:
            return work()

        return called

    return {
        "the scheduler reads the store": of(states.load),
        "the table of models for gateways": of(routing.refresh),
        "the table of keys for gateways": of(lambda: key_table(db, time.time())),
        "gateways report what was spent": of(lambda: Spending(db, lambda: None).take([_USAGE])),
        "rows of the store are told to who follows": of(lambda: jobs.update(db, f"job-{OWNER}-0", step=5)),
    }
