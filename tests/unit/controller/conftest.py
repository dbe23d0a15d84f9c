"""Fixtures: the control app in the test's event loop, called by an HTTP client and by the OpenAI SDK on that client."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from appliance.controller import gates
from appliance.controller.app import create_app
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.routers import StrictRoute
from appliance.controller.interfaces.principal import Listener
from appliance.controller.jobs import settings
from appliance.controller.jobs.events import JobEvents
from appliance.store import keys, models
from appliance.store.database import Database
from appliance.store.rows import ModelRow, VersionRow
from tests.simulator.control_plane import SimulatedEngines, SimulatedModelOps, SimulatedScheduler, simulated_context
from tests.simulator.routes import routes_are_analysed_once  # noqa: F401

SCOPES = {"x-appliance-key-id": "key_test", "x-appliance-scopes": "inference,fine_tuning"}
ADMIN = {"x-appliance-key-id": "key_admin", "x-appliance-scopes": "admin"}
CHECK: Any = {"type": "string_check", "name": "same", "operation": "eq"}
CHECK |= {"input": "{{sample.output_text}}", "reference": "{{item.answer}}"}


def disk_full() -> sqlite3.OperationalError:
    """Return the error that SQLite raises if the disk is full."""
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


def chat_lines(count: int = 12, first: int = 0) -> bytes:
    rows = [
        {"messages": [{"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": str(n + 1)}]}
        for n in range(first, first + count)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@dataclass
class Control:
    """The control app with its clients and its simulated scheduler, engines and model library."""

    app: FastAPI
    context: ControllerContext
    http: httpx.AsyncClient
    sdk: openai.AsyncOpenAI

    @property
    def db(self) -> Database:
        return self.context.db

    @property
    def scheduler(self) -> SimulatedScheduler:
        return self.context.scheduler  # type: ignore[return-value]

    @property
    def engines(self) -> SimulatedEngines:
        return self.context.asking  # type: ignore[return-value]

    @property
    def ops(self) -> SimulatedModelOps:
        return self.context.model_ops  # type: ignore[return-value]

    def as_key(self, name: str, **fields: Any) -> str:
        """Create a key (default scopes: inference, fine_tuning), use it for all later requests, and return its id."""
        row, _ = keys.create(self.db, name, fields.pop("scopes", ["inference", "fine_tuning"]), **fields)
        self.http.headers.update({"x-appliance-key-id": row.id, "x-appliance-scopes": ",".join(row.scopes)})
        return row.id

    @property
    def gateway_keys(self) -> dict[str, Any]:
        return self.context.bus.table["keys"]

    async def settle(self) -> None:
        """Wait until all validations have ended."""
        await self.context.tasks.idle("validations")

    async def upload(self, data: bytes | None = None, name: str = "train.jsonl", purpose: str = "fine-tune") -> str:
        made = await self.sdk.files.create(file=(name, chat_lines() if data is None else data), purpose=purpose)  # type: ignore[arg-type]
        return made.id

    async def job(self, **fields: Any) -> str:
        """Create a job, wait until it is validated, and return its id."""
        if "training_file" not in fields:
            fields["training_file"] = await self.upload()
        made = await self.sdk.fine_tuning.jobs.create(model="starter", **fields)
        await self.settle()
        return made.id

    def creating(self) -> dict[str, str]:
        """Map each kind of object (by noun) to the path of the POST that creates it."""
        posts = [one for one in self.app.routes if isinstance(one, StrictRoute) and one.verb == "POST"]
        return {one.noun: one.path for one in posts if one.path[:4] == "/v1/" and one.action == f"{one.noun}.create"}

    async def bodies(self, path: str) -> tuple[Any, Any]:
        """Return two different bodies for this POST: for the path /v1/notes, `bodies(control)` of test_notes.py."""
        return await import_module(f"tests.unit.controller.test_{path.rpartition('/')[2]}").bodies(self)

    async def made(self, path: str) -> str:
        """Create an object by a POST with the first of `bodies`; return the object's id."""
        answer = await self.http.post(path, json=(await self.bodies(path))[0])
        return answer.raise_for_status().json()["id"]

    async def messages(self, job_id: str) -> list[str]:
        """Return the texts of a job's events, oldest first."""
        events = await self.sdk.fine_tuning.jobs.list_events(job_id, limit=100)
        return [event.message for event in events.data][::-1]


@pytest.fixture(autouse=True)
def rounds_come_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable periodic looks at gates, so that only the tests call `look`."""
    monkeypatch.setattr(gates, "LOOK_EVERY_S", 3600.0)


@pytest.fixture(autouse=True)
def logical_devices_have_a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake 64 CPU cores, so that tests do not depend on the cores of this machine."""
    monkeypatch.setattr(settings, "host_cores", lambda: 64)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    with Database(tmp_path / "appliance.db") as opened:
        insert_model(opened, "starter")
        yield opened


@pytest.fixture
def events(control: Control) -> JobEvents:
    return JobEvents(control.db, control.context.files_dir, "local")


@pytest.fixture
async def control(tmp_path: Path, db: Database) -> AsyncIterator[Control]:
    context = simulated_context(
        tmp_path, db, upload_bytes=64 * 1024, upload_part_bytes=64 * 1024, json_body_bytes=16 * 1024
    )
    context.box["public_url"] = "https://box.example.org"
    app = create_app(context)
    transport = httpx.ASGITransport(Listener(app), raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://box", headers=SCOPES) as http,
        openai.AsyncOpenAI(
            base_url="http://box/v1",
            api_key="ignored here",
            http_client=http,
            max_retries=0,
            _strict_response_validation=True,
        ) as sdk,
    ):
        yield Control(app, context, http, sdk)


def insert_model(
    db: Database,
    name: str,
    *,
    kind: str = "base",
    base: str | None = None,
    task: str = "generate",
    versions: tuple[str, ...] = ("v1",),
    owner: str | None = None,
    info: dict[str, Any] | None = None,
) -> None:
    """Insert a model with versions. owner: default for tuned models: the key of SCOPES; for others: no owner."""
    if owner is None:
        owner = SCOPES["x-appliance-key-id"] if kind == "fine-tuned" else ""
    row: Any = {"base": base, "task": task, "max_model_len": 2048, "info": info or {}, "active_version": versions[-1]}
    row |= {"kind": kind, "arch": "llama", "params": 5_000_000, "bytes": 10, "owned_by": "org-local", "source": "test"}
    models.insert(db, ModelRow(name, created_s=time.time(), owner=owner, **row))
    for version in versions:
        models.insert_version(db, VersionRow(name, version, "test", 10, time.time(), disk_path=f"/models/{version}"))
