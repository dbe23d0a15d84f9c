"""What only reads is answered on a thread of the store's: the loop, and with it everybody's hand-overs and keys, waits
for no query, no decoding and no JSON of it."""

from __future__ import annotations

import sqlite3
import threading
from contextvars import ContextVar
from typing import Any

import pytest

from appliance.controller.http.reading import answer
from appliance.controller.http.routers import make_router
from appliance.store.database import Database
from appliance.store.objects import files

from .conftest import ADMIN, Control

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
    ("path", "table"), [("/v1/fine_tuning/jobs", "jobs"), ("/admin/v1/status", "jobs"), ("/admin/v1/keys", "keys")]
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
