"""What only reads is answered on a thread of the store's: the loop, and with it everybody's hand-overs and keys, waits
for no query, no decoding and no JSON of it."""

from __future__ import annotations

import sqlite3
import threading
from contextvars import ContextVar
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from appliance.controller.app import create_app
from appliance.controller.http.reading import answer
from appliance.controller.http.routers import make_router
from appliance.store.database import Database
from appliance.store.objects import files
from tests.simulator.control_plane import simulated_context

from .conftest import ADMIN, Control

_BOUNDED = "as many rows as the box has settings of its own, not what an owner keeps"
_IN_MEMORY = "reads nothing of the store"
_THEN_ANSWER = "takes what the loop has, and ends with `answer`"
ON_THE_LOOP = {
    "/admin/v1/doctor": _IN_MEMORY,
    "/admin/v1/nodes": _IN_MEMORY,
    "/admin/v1/oidc": _IN_MEMORY,
    "/admin/v1/tiers": _THEN_ANSWER,
    "/admin/v1/mode": _BOUNDED,
    "/admin/v1/mode/schedule": _BOUNDED,
    "/admin/v1/mode/schedule/preview": _BOUNDED,
    "/admin/v1/models/{name:path}/canary": "one canary, by index, and what gateways have counted of it",
    "/admin/v1/metrics": _THEN_ANSWER,
    "/admin/v1/models/{name:path}": _THEN_ANSWER,
    "/admin/v1/status": _THEN_ANSWER,
    "/v1/responses/{response_id}/input_items": _THEN_ANSWER,
    "/v1/responses/{response_id}": "waits for an answer on its way; what it reads and follows is a thread's",
    "/v1/chat/completions/{completion_id}": "waits for one on its way, and ends with `answer`",
    "/v1/chat/completions/{completion_id}/messages": "waits for one on its way, and ends with `answer`",
    "/internal/responses/context": "the same, turn by turn",
}
"""GET routes that are coroutines, and why they may be."""


def test_each_route_that_only_reads_does_it_on_a_thread_or_is_listed_with_the_reason(tmp_path: Path, db: Database):
    app = create_app(simulated_context(tmp_path, db))
    reading = [route for route in app.routes if isinstance(route, APIRoute) and "GET" in route.methods]
    coroutines = {route.path for route in reading if unwrap(route.endpoint) is route.endpoint}
    assert coroutines == ON_THE_LOOP.keys() and len(reading) > 60


_asked: ContextVar[bool] = ContextVar("_asked", default=False)


def seen_threads(monkeypatch: pytest.MonkeyPatch, db: Database) -> list[tuple[bool, str]]:
    """(whether on the loop's thread, SQL) of each statement from now on: on a thread anybody's, on the loop those of
    what the caller asks for, and not those of the rounds that come by beside it."""
    loop_thread, seen, execute = threading.get_ident(), list[tuple[bool, str]](), Database.execute

    def noted(self: Database, sql: str, parameters: Any = ()) -> Any:
        on_loop = threading.get_ident() == loop_thread
        if _asked.get() or not on_loop:
            seen.append((on_loop, sql))
        return execute(self, sql, parameters)

    _asked.set(True)
    monkeypatch.setattr(Database, "execute", noted)
    return seen


@pytest.mark.parametrize(
    ("path", "table"),
    [
        ("/v1/files", "files"),
        ("/v1/fine_tuning/jobs", "jobs"),
        ("/v1/batches", "batches"),
        ("/v1/evals", "evals"),
        ("/v1/models", "models"),
        ("/admin/v1/status", "jobs"),
        ("/admin/v1/metrics", "jobs"),
        ("/admin/v1/models", "models"),
        ("/admin/v1/handovers", "handovers"),
        ("/admin/v1/usage", "usage"),
        ("/admin/v1/keys", "keys"),
        ("/admin/v1/audit", "audit"),
        ("/admin/v1/queue", "jobs"),
    ],
)
async def test_the_loop_reads_who_asks_and_no_list(
    control: Control, monkeypatch: pytest.MonkeyPatch, path: str, table: str
):
    await control.job()
    seen = seen_threads(monkeypatch, control.db)
    told = await control.http.get(path, headers=ADMIN)
    assert told.status_code == 200, told.text
    on_loop = [sql for here, sql in seen if here]
    assert on_loop and not [sql for sql in on_loop if "FROM keys" not in sql and "FROM page_sessions" not in sql]
    assert any(f"FROM {table}" in sql for here, sql in seen if not here), seen


async def test_the_document_says_of_such_a_route_what_it_said(control: Control):
    paths = (await control.http.get("/openapi.json")).json()["paths"]
    of_a_list = paths["/v1/files"]["get"]
    assert [one["name"] for one in of_a_list["parameters"]] == ["after", "limit", "order", "purpose"]
    assert of_a_list["responses"]["200"]["content"]["application/json"]["schema"]["type"] == "object"
    assert "parameters" not in paths["/admin/v1/devices"]["get"], "what a route takes of the loop is nothing to send"


async def test_who_reads_after_an_answer_sees_what_it_told(control: Control):
    for number in range(20):
        file_id = await control.upload(name=f"{number}.jsonl")
        assert (await control.http.get(f"/v1/files/{file_id}")).json()["filename"] == f"{number}.jsonl"
        assert (await control.http.get("/v1/files?limit=1")).json()["data"][0]["id"] == file_id
        if number % 2:
            await control.http.delete(f"/v1/files/{file_id}")
            assert (await control.http.get(f"/v1/files/{file_id}")).status_code == 404


async def test_a_refusal_is_what_it_was(control: Control):
    told = await control.http.get("/v1/files/file-none")
    assert (told.status_code, told.json()["error"]["code"]) == (404, "file_not_found")
    told = await control.http.get("/v1/files?after=file-none")
    assert (told.status_code, told.json()["error"]["code"]) == (400, "invalid_cursor")
    told = await control.http.get("/v1/files?limit=many")
    assert (told.status_code, told.json()["error"]["param"]) == (400, "limit")


async def test_a_route_on_a_thread_cannot_write(control: Control):
    router = make_router("/v1/odd")

    @router.get("")
    def odd() -> dict[str, Any]:
        control.db.execute("DELETE FROM files")
        return {}

    control.app.router.routes.insert(0, router.routes[0])
    assert (await control.http.get("/v1/odd")).status_code == 500
    with pytest.raises(sqlite3.OperationalError):
        await answer(control.db, lambda: files.delete(control.db, "file-1"))


@pytest.mark.parametrize("path", ["/admin/v1/tiers", "/admin/v1/metrics"])
async def test_folders_of_tiers_are_listed_on_a_thread(control: Control, monkeypatch: pytest.MonkeyPatch, path: str):
    """Each ask listed those of shared memory on the loop, and read the manifest of everything in it to count it."""
    listed_on = set[int]()
    listed = control.context.tiers.status()

    def noted() -> list[dict[str, Any]]:
        listed_on.add(threading.get_ident())
        return listed()

    monkeypatch.setattr(control.context.tiers, "status", lambda: noted)
    answer = await control.http.get(path, headers=ADMIN)
    assert answer.status_code == 200 and "disk" in answer.text
    assert listed_on and threading.get_ident() not in listed_on
