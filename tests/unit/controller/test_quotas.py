"""What one owner may take of the box: every kind of stored or waiting thing has a bound, and the disk has a floor."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.controller.access.disk import GIB, Disk, floor_of
from appliance.controller.app import create_app
from appliance.controller.http.peers import FromBox
from appliance.controller.interfaces.errors import ApiError
from appliance.controller.interfaces.principal import Principal
from appliance.controller.interfaces.records import EngineAnswer
from appliance.controller.retention import keep_house
from appliance.store.database import Database
from appliance.store.objects import models, responses
from appliance.store.records import keys
from appliance.store.rows import ModelRow, ResponseRow, VersionRow
from tests.simulator.control_plane import SimulatedEngines, simulated_context
from tests.unit.controller.conftest import ADMIN, Control, chat_lines
from tests.unit.controller.test_batches import engines

BOUNDS = {"unfinished": 3, "models": 4, "bytes": 10_000, "responses": 3, "responses_bytes": 100_000}
LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "starter"}}\n'


@pytest.fixture
async def control(tmp_path: Path, db: Database) -> AsyncIterator[Control]:
    context = simulated_context(tmp_path, db, bounds=BOUNDS, disk_floor_bytes=0)
    app = create_app(context)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(FromBox(app)), base_url="http://box") as http,
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


async def test_bytes_are_bounded_for_all_keys_of_an_owner_and_for_no_admin(control: Control):
    first, second = caller(control.db, "ann", "ann"), caller(control.db, "ann-2", "ann")
    made = [(await file(control, who, b"x" * 4000)).json()["id"] for who in (first, second)]
    assert refused(await file(control, second, b"x" * 2001), 413, "bytes")
    assert refused(await upload(control, second, 1001), 413, "bytes")
    assert (await file(control, caller(control.db, "ben"), b"x" * 9000)).status_code == 200
    for who in (ADMIN, {}):
        assert (await file(control, who, b"x" * 11_000)).status_code == 200
    await control.http.delete(f"/v1/files/{made[0]}", headers=first)
    assert (await upload(control, second, 1000)).status_code == 200
    # Sent at once, they pass together no more than one after the other.
    answers = await asyncio.gather(*(file(control, second, b"x" * 3000) for _ in range(8)))
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) == 1 and set(statuses) <= {200, 413}


async def test_the_input_of_a_batch_outlasts_its_expiry_until_the_batch_has_ended(control: Control):
    given = (await file(control, ADMIN, LINE, "batch")).json()["id"]
    control.context.asking.lines = 0  # type: ignore[attr-defined]
    body = {"completion_window": "24h", "endpoint": "/v1/chat/completions", "input_file_id": given}
    batch = (await control.http.post("/v1/batches", headers=ADMIN, json=body)).json()["id"]
    later_s = time.time() + 31 * 86400
    keep_house(control.context, later_s)
    assert (control.context.files_dir / given).exists()
    await control.http.post(f"/v1/batches/{batch}/cancel", headers=ADMIN)
    await control.context.tasks.idle("batches")
    keep_house(control.context, later_s)
    assert not (control.context.files_dir / given).exists()


async def test_unfinished_work_of_all_kinds_is_bounded_together(control: Control):
    ann, ben = caller(control.db, "ann"), caller(control.db, "ben")
    engines(control).lines = 0
    asked = {"model": "starter", "input": "hello", "background": True}
    given = (await file(control, ann, LINE, "batch")).json()["id"]
    training = (await file(control, ann, chat_lines(), "fine-tune")).json()["id"]
    batch = {"completion_window": "24h", "endpoint": "/v1/chat/completions", "input_file_id": given}
    job = {"model": "starter", "training_file": training}
    response = await control.http.post("/v1/responses", headers=ann, json=asked)
    for answer in (
        response,
        await control.http.post("/v1/batches", headers=ann, json=batch),
        await control.http.post("/v1/fine_tuning/jobs", headers=ann, json=job),
    ):
        assert answer.status_code == 200, answer.text
    for path, body in (("/v1/responses", asked), ("/v1/batches", batch), ("/v1/fine_tuning/jobs", job)):
        assert refused(await control.http.post(path, headers=ann, json=body), 429, "unfinished")
    assert refused(await upload(control, ann, 1), 429, "unfinished")
    assert (await control.http.post("/v1/responses", headers=ben, json=asked)).status_code == 200
    cancelled = await control.http.post(f"/v1/responses/{response.json()['id']}/cancel", headers=ann)
    assert cancelled.status_code == 200
    assert (await upload(control, ann, 1)).status_code == 200
    await control.settle()


async def test_an_admin_gives_a_key_bounds_and_takes_them_away(control: Control):
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


async def test_stored_responses_of_an_owner_push_out_the_owners_own(control: Control):
    ann, ben = (caller(control.db, name)["x-appliance-key-id"] for name in ("ann", "ben"))
    stored = control.app.state.responses

    def row(key_id: str, n: int, size: int = 10) -> ResponseRow:
        return ResponseRow(
            id=f"resp_{key_id}{n}",
            key_id=key_id,
            owner=keys.owner_of(control.db, key_id),
            status="completed",
            created_s=time.time(),
            bytes=size,
            input="[]",
            response="{}",
        )

    def add(*rows: ResponseRow) -> None:
        for one in rows:
            responses.insert(control.db, one)
        stored.keep_house(time.time())

    add(row(ben, 0), *(row(ann, n) for n in range(5)))

    def left(key_id: str) -> list[str]:
        return [f"resp_{key_id}{n}" for n in range(5) if responses.find(control.db, f"resp_{key_id}{n}")]

    assert left(ann) == [f"resp_{ann}{n}" for n in (2, 3, 4)] and len(left(ben)) == 1
    add(row(ann, 0, 99_995))
    add(row(ann, 1, 5 << 20))
    assert responses.find(control.db, f"resp_{ann}1") is None or not left(ann)


# --- the disk


def volume(total: int, free: int) -> Any:
    return lambda _: os.statvfs_result((4096, 4096, total // 4096, free // 4096, free // 4096, 0, 0, 0, 0, 255))


@pytest.mark.parametrize(
    ("total", "floor"),
    [(64 << 20, 6.4 * 2**20), (10 * GIB, GIB), (100 * GIB, 2 * GIB), (400 * GIB, 8 * GIB), (10_000 * GIB, 20 * GIB)],
)
def test_the_floor_fits_the_volume(total: int, floor: float):
    assert floor_of(total) == int(floor)


def test_what_would_go_below_the_floor_is_refused():
    disk = Disk(Path("/"), None, volume(100 * GIB, 3 * GIB))
    disk.check()
    disk.check(GIB)
    with pytest.raises(ApiError) as short:
        disk.check(GIB + 4096)
    assert (short.value.status_code, short.value.code) == (507, "insufficient_storage")
    with pytest.raises(ApiError):
        Disk(Path("/"), None, volume(100 * GIB, 2 * GIB)).check()
    Disk(Path("/"), 0, volume(100 * GIB, 4096)).check()


async def test_stored_responses_are_bounded_by_the_key_of_the_newest(control: Control, db: Database):
    made = [keys.create(db, name, ["inference"], "ann")[0].id for name in ("old", "new")]
    old, new = sorted(made)
    keys.update(db, old, bounds={"responses": 1})
    for number, key_id in enumerate((old, new, new)):
        row = ResponseRow(f"resp_{number}", key_id, "completed", time.time(), 9, "[]", "{}", owner="ann")
        responses.insert(db, row)
    control.app.state.responses.keep_house(time.time())
    assert responses.totals(db)[0] == 3


async def test_below_the_floor_nothing_is_stored_and_room_can_be_made(control: Control):
    ann = caller(control.db, "ann")
    kept = (await file(control, ann, b"x")).json()["id"]
    pending = (await upload(control, ann, 10)).json()["id"]
    given = (await file(control, ann, LINE, "batch")).json()["id"]
    control.context.quotas.disk = Disk(Path("/"), None, volume(100 * GIB, GIB))
    batch = {"completion_window": "24h", "endpoint": "/v1/chat/completions", "input_file_id": given}
    part = control.http.post(f"/v1/uploads/{pending}/parts", headers=ADMIN, files={"data": ("d", b"x")})
    answers = [
        await file(control, ann, b"x"),
        await file(control, {}, b"x"),
        await upload(control, ADMIN, 1),
        await part,
        await control.http.post("/v1/batches", headers=ADMIN, json=batch),
        await control.http.post("/admin/v1/models/import", headers=ADMIN, json={"source": "/models/m"}),
        await control.http.post("/v1/fine_tuning/jobs", headers=ADMIN, json={"model": "starter", "training_file": "f"}),
        await control.http.post(
            "/v1/responses", headers=ADMIN, json={"model": "starter", "input": "hello", "background": True}
        ),
    ]
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_storage"), answer.text
        assert answer.headers["x-should-retry"] == "false"
    copy = {
        "key": "key_x",
        "previous": None,
        "input": "hello",
        "response": {"id": "resp_1", "status": "completed", "created_at": time.time()},
    }
    assert await control.app.state.responses.take([copy]) == 0
    assert (await control.http.delete(f"/v1/files/{kept}", headers=ann)).status_code == 200
    assert (await control.http.post(f"/v1/uploads/{pending}/cancel", headers=ann)).status_code == 200
    assert len(list(control.context.files_dir.iterdir())) == 1 and not list(control.context.uploads_dir.iterdir())


def fine_tuned(db: Database, owner: str, number: int, size: int) -> None:
    row = ModelRow(
        id=f"ft:{owner}:{number}",
        kind="fine-tuned",
        base="starter",
        arch="x",
        params=1,
        bytes=size,
        owned_by="org",
        source="job",
        created_s=1.0,
        task="generate",
        job_id=None,
        owner=owner,
        max_model_len=None,
        info={},
    )
    models.insert(db, row)
    models.insert_version(db, VersionRow(model=row.id, version="v1", source="job", bytes=size, created_s=1.0))


def test_models_that_jobs_made_are_bounded_by_number_and_bytes(control: Control, db: Database) -> None:
    quotas = control.context.quotas
    rows = {name: keys.create(db, name, ["fine_tuning"], name)[0] for name in ("ann", "ben")}
    callers = {name: Principal(row.id, frozenset({"fine_tuning"}), "req", name) for name, row in rows.items()}
    quotas.check(callers["ann"], makes_model=True)
    for number in range(4):
        fine_tuned(db, "ann", number, 10)
    with pytest.raises(ApiError) as found:
        quotas.check(callers["ann"], makes_model=True)
    assert (found.value.param, found.value.status_code) == ("models", 429)
    fine_tuned(db, "ben", 9, 10_000)
    with pytest.raises(ApiError) as found:
        quotas.check(callers["ben"], makes_model=True)
    assert (found.value.param, found.value.status_code) == ("bytes", 413)


async def test_batches_under_way_hold_the_place_of_their_answers(control: Control, db: Database) -> None:
    """All that were admitted at once were checked against the same room: thirty times the bound was written."""
    ann = caller(db, "ann", bounds={"unfinished": 32, "bytes": 20 * len(LINE)})
    made = await file(control, ann, LINE, "batch")
    batch = {"input_file_id": made.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    answers = [await control.http.post("/v1/batches", headers=ann, json=batch) for _ in range(10)]
    assert sum(answer.status_code == 200 for answer in answers) == 6  # 1 + 6 x 3 of 20 lines, and 3 more do not fit
    error = answers[-1].json()["error"]
    assert (answers[-1].status_code, error["code"], error["param"]) == (413, "limit_reached", "bytes")


async def batch_of(control: Control, who: dict[str, str], lines: int, answer: int) -> dict[str, Any]:
    """One whose every line is answered with so many bytes, four at once."""
    engines = control.context.asking
    assert isinstance(engines, SimulatedEngines)

    async def rule(body: dict[str, Any]) -> EngineAnswer:
        return EngineAnswer(200, {"text": "x" * answer})

    engines.rule = rule
    asked = [LINE.replace(b'"1"', b'"%d"' % number) for number in range(lines)]
    made = await file(control, who, b"".join(asked), "batch")
    batch = {"input_file_id": made.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    found = await control.http.post("/v1/batches", headers=who, json=batch)
    assert found.status_code == 200, found.text
    return found.json()


async def until(control: Control, who: dict[str, str], batch_id: str, seen: Callable[[dict[str, Any]], Any]) -> Any:
    async with asyncio.timeout(60):
        while True:
            batch = (await control.http.get(f"/v1/batches/{batch_id}", headers=who)).json()
            if found := seen(batch):
                return found
            await asyncio.sleep(0.01)


async def test_answers_of_batches_wait_below_the_floor(control: Control, db: Database) -> None:
    ann = caller(db, "ann")
    free = [100 * GIB]
    control.context.quotas.disk = Disk(Path("/"), None, lambda _: volume(100 * GIB, free[0])(Path("/")))
    engines = control.context.asking
    assert isinstance(engines, SimulatedEngines)
    engines.lines = 0
    made = await batch_of(control, ann, 3, 10)
    free[0], engines.lines = GIB, 4
    why = await until(control, ann, made["id"], lambda batch: "disk" in (batch["waiting_for"] or "") and batch)
    assert why["waiting_for"] == "the disk of the box is short of space" and not engines.sent
    free[0] = 100 * GIB
    await until(control, ann, made["id"], lambda batch: batch["status"] == "completed")
