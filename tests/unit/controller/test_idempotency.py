"""For each POST that makes an object: repeated requests make one object, its list is paged, its deletion is final."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.store.rows import AUDIT
from tests.unit.controller.conftest import Control
from tests.unit.controller.test_evals import CHECK, SCHEMA, given, made


def form(name: str, data: bytes, **fields: str) -> dict[str, Any]:
    return {"files": {name: ("items.jsonl", data)}, "data": fields}


KEYED = {"idempotency-key": "one"}


async def bodies(control: Control) -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return noun -> (URL, body, different body); bodies of nouns not listed here come from their test modules."""
    eval_id = await made(control)
    job = {"model": "starter", "training_file": await control.upload()}
    asked = {"model": "starter", "input": "1", "background": True}
    run = {"data_source": given(("yes", "yes"))}
    found = {
        "file": ("/v1/files", form("file", b"a", purpose="user_data"), form("file", b"b", purpose="user_data")),
        "job": ("/v1/fine_tuning/jobs", {"json": job}, {"json": job | {"suffix": "b"}}),
        "response": ("/v1/responses", {"json": asked}, {"json": asked | {"input": "2"}}),
        "eval_run": (f"/v1/evals/{eval_id}/runs", {"json": run}, {"json": run | {"name": "b"}}),
    }
    for noun, path in control.creating().items():
        if noun not in found:
            same, other = await control.bodies(path)
            found[noun] = path, {"json": same}, {"json": other}
    return found


@pytest.mark.usefixtures("checked_here")
async def test_repeated_create_makes_one_object_on_every_route(control: Control):
    for path, (url, same, other) in (await bodies(control)).items():

        async def ask(body: dict[str, Any], url: str = url, **headers: str) -> Any:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            return await control.http.post(url, headers=sent, **body)

        first = await ask(same, idempotency_key="one")
        assert first.status_code < 300, (path, first.text)
        again, third = await ask(same, idempotency_key="one"), await ask(same, x_stainless_retry_count="1")
        assert first.json()["id"] == again.json()["id"] == third.json()["id"], path
        assert (await ask(same, idempotency_key="two")).json()["id"] != first.json()["id"], path
        refused = await ask(other, idempotency_key="one")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_key_reused"), path
    await control.settle()


@pytest.mark.usefixtures("checked_here")
async def test_objects_are_listed_newest_first_and_gone_once_deleted(control: Control):
    ask = control.http.request
    for noun, (url, body, _) in (await bodies(control)).items():
        ids = [(await ask("POST", url, **body)).json()["id"] for _ in range(3)]
        await control.context.tasks.idle("validations", "batches", "responses", "eval_runs")
        page = await ask("GET", url, params={"limit": 2, "order": "desc"})
        if page.status_code != 405:
            first = page.json()
            rest = (await ask("GET", url, params={"limit": 2, "order": "desc", "after": first["last_id"]})).json()
            listed = [item["id"] for item in first["data"] + rest["data"]]
            assert (listed[:3], len(first["data"]), first["has_more"]) == (ids[::-1], 2, True), noun
        gone = await ask("DELETE", f"{url}/{ids[0]}")
        # Inference writes no audit row, and the audit row of an evaluation run is for its evaluation.
        done = [f"{noun}.create"] if control.creating().get(noun) == url else []
        if gone.status_code not in (404, 405):  # this kind of object can be deleted
            done.append(f"{noun}.delete")
            assert gone.json()["deleted"] and (await ask("GET", f"{url}/{ids[0]}")).status_code == 404, noun
        assert [row.action for row in AUDIT.list_all(control.db, "target LIKE ?", f"%{ids[0]}")] == done


async def test_repeated_create_after_deletion_of_its_file_returns_first_object(control: Control):
    known = await bodies(control)
    of_batches, (runs, of_runs, _) = known["batch"][1], known["eval_run"]
    file_id = of_batches["json"]["input_file_id"]
    of_runs["json"]["data_source"]["source"] = {"type": "file_id", "id": file_id}
    requests = [("/v1/batches", of_batches), (runs, of_runs)]
    first = [await control.http.post(url, headers=KEYED, **body) for url, body in requests]
    await control.context.tasks.idle("batches", "eval_runs")
    (await control.http.delete(f"/v1/files/{file_id}")).raise_for_status()
    repeated = [await control.http.post(url, headers=KEYED, **body) for url, body in requests]
    assert [one.json()["id"] for one in repeated] == [one.json()["id"] for one in first]


async def test_empty_idempotency_key_is_ignored(control: Control):
    asked = ({"purpose": "user_data"}, {"purpose": "batch"})
    answers = [
        await control.http.post("/v1/files", headers={"idempotency-key": ""}, **form("file", b"a", **fields))
        for fields in asked
    ]
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_repeated_create_ignores_a_reached_bound(control: Control):
    control.as_key("ann", owner="ann", bounds={"bytes": 400})
    body = {"data_source_config": SCHEMA, "testing_criteria": [CHECK]}

    async def post(**headers: str) -> Any:
        return await control.http.post("/v1/evals", json=body, headers=headers)

    first, again = await post(**KEYED), await post(**KEYED)
    assert first.status_code == again.status_code == 201 and again.json() == first.json()
    assert (await post()).status_code == 413
    (await control.http.delete(f"/v1/evals/{first.json()['id']}")).raise_for_status()
    later = await post(**KEYED)
    assert later.status_code == 201 and later.json()["id"] != first.json()["id"], "the first has gone"
