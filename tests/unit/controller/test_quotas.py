"""Limits per owner for every kind of stored or waiting object, and the disk space that must stay free."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.controller.access.limits import GIB, Disk
from appliance.controller.app import create_app
from appliance.controller.interfaces.principal import Listener
from appliance.store import keys
from appliance.store.database import Database
from appliance.store.rows import RESPONSES, ResponseRow
from tests.simulator.control_plane import simulated_context
from tests.unit.controller.conftest import ADMIN, Control, chat_lines

BOUNDS = {"unfinished": 3, "bytes": 10_000, "responses": 3, "responses_bytes": 100_000}
LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "starter"}}\n'
BATCH = {"completion_window": "24h", "endpoint": "/v1/chat/completions"}


@pytest.fixture
async def control(tmp_path: Path, db: Database) -> AsyncIterator[Control]:
    context = simulated_context(tmp_path, db, bounds=BOUNDS, disk_floor_bytes=0)
    app = create_app(context)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(Listener(app)), base_url="http://box") as http,
    ):
        yield Control(app, context, http, None)  # type: ignore[arg-type]


def caller(db: Database, name: str, owner: str | None = None, **more: Any) -> dict[str, str]:
    row, _ = keys.create(db, name, ["inference", "fine_tuning"], owner, **more)
    return {"x-appliance-key-id": row.id, "x-appliance-scopes": "inference,fine_tuning"}


async def file(control: Control, who: dict[str, str], data: bytes, purpose: str = "user_data") -> httpx.Response:
    return await control.http.post("/v1/files", headers=who, files={"file": ("a.bin", data)}, data={"purpose": purpose})


async def upload(control: Control, who: dict[str, str], size: int) -> httpx.Response:
    body = {"bytes": size, "filename": "a.bin", "mime_type": "text/plain", "purpose": "user_data"}
    return await control.http.post("/v1/uploads", headers=who, json=body)


def refused(answer: httpx.Response, status: int, bound: str) -> bool:
    error = answer.json().get("error", {})
    return (answer.status_code, error.get("code"), error.get("param")) == (status, "limit_reached", bound) and str(
        BOUNDS[bound]
    ) in error["message"]


async def test_bytes_bound_counts_all_keys_of_owner(control: Control):
    first, second = caller(control.db, "ann", "ann"), caller(control.db, "ann-2", "ann")
    made = [(await file(control, who, b"x" * 4000)).json()["id"] for who in (first, second)]
    assert refused(await file(control, second, b"x" * 2001), 413, "bytes")
    assert refused(await upload(control, second, 1001), 413, "bytes")
    assert (await file(control, caller(control.db, "ben"), b"x" * 9000)).status_code == 200
    for who in (ADMIN, {}):
        assert (await file(control, who, b"x" * 11_000)).status_code == 200
    await control.http.delete(f"/v1/files/{made[0]}", headers=first)
    assert (await upload(control, second, 1000)).status_code == 200
    # Concurrent uploads together also stay within the bound.
    answers = await asyncio.gather(*(file(control, second, b"x" * 3000) for _ in range(8)))
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) == 1 and set(statuses) <= {200, 413}


async def test_unfinished_bound_counts_all_kinds_of_work(control: Control):
    ann, ben = caller(control.db, "ann"), caller(control.db, "ben")
    control.engines.lines = 0
    given = (await file(control, ann, LINE, "batch")).json()["id"]
    training = (await file(control, ann, chat_lines(), "fine-tune")).json()["id"]
    asked = {"model": "starter", "input": "hello", "background": True}
    work = {
        "/v1/responses": asked,
        "/v1/batches": BATCH | {"input_file_id": given},
        "/v1/fine_tuning/jobs": {"model": "starter", "training_file": training},
    }
    made = [await control.http.post(path, headers=ann, json=body) for path, body in work.items()]
    assert [answer.status_code for answer in made] == [200, 200, 200]
    for path, body in work.items():
        assert refused(await control.http.post(path, headers=ann, json=body), 429, "unfinished")
    assert refused(await upload(control, ann, 1), 429, "unfinished")
    assert (await control.http.post("/v1/responses", headers=ben, json=asked)).status_code == 200
    await control.http.post(f"/v1/responses/{made[0].json()['id']}/cancel", headers=ann)
    assert (await upload(control, ann, 1)).status_code == 200
    await control.settle()


async def test_bounds_of_key_override_bounds_of_box(control: Control):
    made = await control.http.post("/admin/v1/keys", json={"name": "ann", "bounds": {"unfinished": 1, "bytes": 4}})
    assert made.status_code == 200 and made.json()["bounds"] == {"unfinished": 1, "bytes": 4}
    ann = {"x-appliance-key-id": made.json()["id"], "x-appliance-scopes": "inference,fine_tuning"}
    assert (await file(control, ann, b"12345")).status_code == 413
    changed = await control.http.patch("/admin/v1/keys/ann", json={"bounds": {"unfinished": 2}})
    assert changed.json()["bounds"] == {"unfinished": 2}
    assert [(await upload(control, ann, 1)).status_code for _ in range(3)] == [200, 200, 429]
    assert (await control.http.patch("/admin/v1/keys/ann", json={"bounds": None})).json()["bounds"] is None
    assert (await upload(control, ann, 1)).status_code == 200 and refused(
        await upload(control, ann, 1), 429, "unfinished"
    )
    wrong = await control.http.patch("/admin/v1/keys/ann", json={"bounds": {"planets": 3}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "bounds.planets")


async def test_responses_bound_deletes_oldest_of_owner(control: Control):
    ann, ben = (caller(control.db, name)["x-appliance-key-id"] for name in ("ann", "ben"))

    def add(key_id: str, *numbers: int, size: int = 10) -> None:
        for n in numbers:
            owner = keys.owner_of(control.db, key_id)
            row = ResponseRow(f"resp_{key_id}{n}", key_id, "completed", time.time(), size, [], {}, owner=owner)
            RESPONSES.insert(control.db, row)
        control.app.state.responses.keep_house(time.time())

    def left(key_id: str) -> list[int]:
        return [n for n in range(5) if RESPONSES.find(control.db, f"resp_{key_id}{n}")]

    add(ben, 0)
    add(ann, *range(5))
    assert left(ann) == [2, 3, 4] and left(ben) == [0]
    add(ann, 0, size=99_995)
    assert left(ann) == [0]


# --- free disk space


def volume(total: int, free: int) -> Any:
    return lambda _: os.statvfs_result((4096, 4096, total // 4096, free // 4096, free // 4096, 0, 0, 0, 0, 255))


async def test_disk_below_floor_rejects_writes_but_not_deletes(control: Control):
    ann, post = caller(control.db, "ann"), control.http.post
    kept = (await file(control, ann, b"x")).json()["id"]
    pending = (await upload(control, ann, 10)).json()["id"]
    given = (await file(control, ann, LINE, "batch")).json()["id"]
    control.context.quotas.disk = Disk(Path("/"), None, volume(100 * GIB, GIB))
    answers = [
        await file(control, ann, b"x"),
        await file(control, {}, b"x"),
        await upload(control, ADMIN, 1),
        await post(f"/v1/uploads/{pending}/parts", headers=ADMIN, files={"data": ("d", b"x")}),
    ]
    for path, body in (
        ("/v1/batches", BATCH | {"input_file_id": given}),
        ("/admin/v1/models/import", {"source": "/models/m"}),
        ("/v1/fine_tuning/jobs", {"model": "starter", "training_file": "f"}),
        ("/v1/responses", {"model": "starter", "input": "hello", "background": True}),
    ):
        answers.append(await post(path, headers=ADMIN, json=body))
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_storage"), answer.text
        assert answer.headers["x-should-retry"] == "false"
    gateway = {"x-appliance-key-id": "gateway", "x-appliance-scopes": "gateway"}
    assert (await post("/internal/responses", headers=gateway, json=[{}])).status_code == 507, "it counts them"
    assert (await control.http.delete(f"/v1/files/{kept}", headers=ann)).status_code == 200
    assert (await post(f"/v1/uploads/{pending}/cancel", headers=ann)).status_code == 200
    assert len(list(control.context.files_dir.iterdir())) == 1 and not list(control.context.uploads_dir.iterdir())
