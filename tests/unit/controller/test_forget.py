"""`forget` deletes all data of an owner from disk and tables, but no data of other owners."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from appliance.controller.devices import cordons
from appliance.store import box, jobs, keys, models, usage
from appliance.store.rows import AUDIT, HANDOVERS, HandoverRow
from tests.unit.controller.conftest import ADMIN, Control, chat_lines, insert_model

NAME, OTHER = "annabel-q7", "benedict-z3"
SECRET = b"what annabel taught"
LINE = (
    b'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", '
    b'"body": {"model": "starter", "messages": []}}\n'
)


async def ask(control: Control, *, once: bool = False) -> dict[str, Any]:
    """Repeat the request until the answer is done, as the command does; return the answer. once: send it only once."""
    async with asyncio.timeout(60):
        while True:
            answer = await control.http.post("/admin/v1/forget", headers=ADMIN, json={"owner": NAME})
            assert answer.status_code == 200, answer.text
            if once or answer.json()["done"]:
                return answer.json()
            await asyncio.sleep(0.01)


class Person:
    """An owner with two keys, and with one object of each kind after `acts`."""

    def __init__(self, control: Control, name: str):
        self.control, self.name = control, name
        scopes = ["inference", "fine_tuning"]
        self.rows = [keys.create(control.db, name + more, scopes, name)[0] for more in ("", "-laptop")]
        self.heads = [{"x-appliance-key-id": row.id, "x-appliance-scopes": ",".join(scopes)} for row in self.rows]

    async def post(self, path: str, which: int = 0, **more: Any) -> dict[str, Any]:
        answer = await self.control.http.post(path, headers=self.heads[which], **more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def make(self, path: str, which: int = 0, **body: Any) -> str:
        return (await self.post(f"/v1/{path}", which, json=body))["id"]

    async def upload(self, name: str, data: bytes, purpose: str, which: int = 0) -> str:
        sent = {"files": {"file": (name, data)}, "data": {"purpose": purpose}}
        return (await self.post("/v1/files", which, **sent))["id"]

    async def acts(self) -> None:
        db, name = self.control.db, self.name
        data = chat_lines() + chat_lines(1).replace(b"0+1?", SECRET if name == NAME else b"other")
        self.file = await self.upload(f"{name}.jsonl", data, "fine-tune")
        given = await self.upload("b.jsonl", LINE, "batch", 1)
        part = await self.make("uploads", bytes=9, filename=name, mime_type="text/plain", purpose="user_data")
        await self.post(f"/v1/uploads/{part}/parts", files={"data": ("d", b"x" * 9)})
        who = {"metadata": {"who": name}}
        self.job = await self.make("fine_tuning/jobs", model="starter", training_file=self.file, **who)
        await self.control.settle()
        batch = {"completion_window": "24h", "endpoint": "/v1/chat/completions", "input_file_id": given}
        self.batch = await self.make("batches", 1, **batch, **who)
        self.response = await self.make("responses", model="starter", input=f"I am {name}", background=True)
        spent = {"model": "starter", "version": "v1", "requests": 2, "errors": 0}
        spent |= {"prompt_tokens": 3, "completion_tokens": 4}
        usage.add(db, [{"key": row.id, **spent} for row in self.rows], 7200.0)
        await self.control.http.patch(f"/admin/v1/keys/{name}", headers=ADMIN, json={"requests_per_minute": 5})
        self.model = f"ft:starter:local:mine:{'a' * 7}{len(name) % 10}"
        insert_model(db, self.model, kind="fine-tuned", base="starter")
        models.update(db, self.model, job_id=self.job)


@pytest.fixture
async def people(control: Control) -> list[Person]:
    found = [Person(control, name) for name in (NAME, OTHER)]
    for person in found:
        await person.acts()
    return found


def written(control: Control) -> str:
    """Return all text in the files of the data directory, including the database and its log."""
    dump = "\n".join(control.db._connection.iterdump())
    folder = Path(control.context.box["data_dir"])
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "appliance.db-shm":
            dump += f"\n{path}\n" + path.read_bytes().decode("utf-8", "replace")
    return dump


def spent(control: Control) -> dict[str, int]:
    return {row["name"]: row["completion_tokens"] for row in usage.report(control.db, "owner", 0.0, 9000.0)}


async def test_forget_removes_name_of_owner_and_keeps_other_owners(control: Control, people: list[Person]):
    ann, ben = people
    assert NAME in written(control) and SECRET.decode() in written(control)
    before = spent(control)
    assert before[NAME] >= 8 <= before[OTHER]
    audited = len(AUDIT.page(control.db, after=None, limit=999).data)

    shown = (await control.http.get(f"/admin/v1/forget?owner={NAME}", headers=ADMIN)).json()
    # The batch and the response may finish meanwhile.
    assert shown["unfinished"][0] == ann.job and {*shown["unfinished"]} <= {ann.job, ann.batch, ann.response}
    assert shown["models"] == [ann.model]
    assert shown["files"] == 2 + (ann.batch not in shown["unfinished"]), "with that of the batch's answers"
    assert (shown["uploads"], shown["batches"], shown["responses"], shown["jobs"]) == (1, 1, 1, 1)
    assert len(control.gateway_keys) == 4, "nothing was done"

    done = await ask(control)
    assert done["done"] and done["models"] == [ann.model]
    left = written(control)
    assert NAME not in left and SECRET.decode() not in left
    assert control.db.path.with_name("appliance.db-wal").stat().st_size == 0, "what is deleted stands in it for long"
    assert len(control.gateway_keys) == 2
    assert jobs.get(control.db, ann.job).phase == "cancelled" and models.find(control.db, ann.model) is not None
    log = AUDIT.page(control.db, after=None, limit=999).data
    assert (log[0].action, log[0].target) == ("owner.forget", done["pseudonym"])
    revoked = [(row.action, row.target) for row in log[1:-audited]]
    assert revoked == [("key.revoke", row.id) for row in ann.rows[::-1]], "once, however often it was asked"

    assert OTHER in left and jobs.get(control.db, ben.job).metadata == {"who": OTHER}
    for path in (f"/v1/files/{ben.file}", f"/v1/batches/{ben.batch}", f"/v1/responses/{ben.response}"):
        assert (await control.http.get(path, headers=ben.heads[1 if "batch" in path else 0])).status_code == 200

    again = await ask(control)
    assert again["done"] and again["keys"] == [] and again["files"] == 0
    now = spent(control)
    assert now.keys() == {done["pseudonym"], OTHER} and now[done["pseudonym"]] >= before[NAME]


async def test_forget_deletes_rows_of_any_table_with_an_owner_or_a_key(control: Control):
    for person in (Person(control, NAME), Person(control, OTHER)):
        for table, column, who in (("letters", "owner", person.name), ("drafts", "key_id", person.rows[1].id)):
            control.db.execute(f"CREATE TABLE IF NOT EXISTS {table} (text TEXT, {column} TEXT)")
            control.db.execute(f"INSERT INTO {table} VALUES (?, ?)", [f"of {person.name}", who])
    assert (await ask(control))["done"] and f"of {NAME}" not in written(control)
    assert [control.db.column(f"SELECT text FROM {table}") for table in ("letters", "drafts")] == [[f"of {OTHER}"]] * 2


async def test_forget_administrator_removes_the_name_from_actions(control: Control):
    """The mode, drained devices, hand-overs and model settings record the name of the requesting key."""
    db = control.db
    keys.create(db, NAME, ["admin"], NAME)
    keys.create(db, "pager", ["admin"], NAME)
    insert_model(db, "of-all")
    for number, by in enumerate((NAME, "pager", OTHER), 1):
        HANDOVERS.insert(db, HandoverRow(number, "demand", 1.0, by, "x", "done"))
        models.add_settings(db, "of-all", {}, str(number), by, 1.0)
    box.put(db, "mode", {"by": NAME, "policy": NAME})
    for device, by in (("n0/1", "pager"), ("n0/2", OTHER)):
        cordons.drain(db, {"id": device}, "dust", by, 1.0)
    who = (await ask(control))["pseudonym"]
    assert box.get(db, "mode") == {"by": who, "policy": NAME}, "who asked, and no other word"
    drains = [row.drain for row in cordons.read(db).values()]
    assert [(drain["by"], drain["reason"]) for drain in drains if drain] == [(who, "dust"), (OTHER, "dust")]
    asked = [row.asked_by for row in HANDOVERS.page(db).data]
    changed = [row["by_whom"] for row in db.execute("SELECT by_whom FROM model_settings ORDER BY number")]
    assert asked[::-1] == changed == [who, who, OTHER]


async def test_forget_waits_for_a_running_job_and_resumes(control: Control, people: list[Person]):
    ann = people[0]
    jobs.set_phase(control.db, ann.job, "running")
    waiting = await ask(control, once=True)
    assert not waiting["done"] and ann.job in waiting["unfinished"]
    again = await ask(control, once=True)
    assert not again["done"] and ann.job in again["unfinished"]
    log = [row.action for row in AUDIT.page(control.db, after=None, limit=999).data]
    assert log.count("key.revoke") == 2, "what ends the work of a key is not begun again by each request"
    assert (control.context.files_dir / ann.file).exists()
    jobs.set_phase(control.db, ann.job, "cancelled")
    assert (await ask(control))["done"] and NAME not in written(control)
