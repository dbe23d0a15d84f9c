"""Repeated requests: each creating POST creates one object for two equal requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.controller.conftest import Control
from tests.unit.controller.test_evals import CHECK, SCHEMA, given

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "starter", "messages": []}}


def form(name: str, data: bytes, **fields: str) -> dict[str, Any]:
    return {"files": {name: ("items.jsonl", data)}, "data": fields}


KEYED = {"idempotency-key": "one"}


async def bodies(control: Control) -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Route -> (URL, body, different body)."""
    post = control.http.post
    one = {"data_source_config": SCHEMA, "testing_criteria": [CHECK]}
    eval_id = (await post("/v1/evals", json=one)).json()["id"]
    announced = {"filename": "f", "purpose": "batch", "bytes": 9, "mime_type": "text/plain"}
    batch = {
        "input_file_id": await control.upload(json.dumps(LINE).encode(), "lines.jsonl", "batch"),
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    job = {"model": "starter", "training_file": await control.upload()}
    asked = {"model": "starter", "input": "1", "background": True}
    run = {"data_source": given(("yes", "yes"))}
    return {
        "/v1/files": ("/v1/files", form("file", b"a", purpose="user_data"), form("file", b"b", purpose="user_data")),
        "/v1/uploads": ("/v1/uploads", {"json": announced}, {"json": announced | {"bytes": 8}}),
        "/v1/batches": ("/v1/batches", {"json": batch}, {"json": batch | {"metadata": {"a": "b"}}}),
        "/v1/fine_tuning/jobs": ("/v1/fine_tuning/jobs", {"json": job}, {"json": job | {"suffix": "b"}}),
        "/v1/responses": ("/v1/responses", {"json": asked}, {"json": asked | {"input": "2"}}),
        "/v1/evals": ("/v1/evals", {"json": one}, {"json": one | {"name": "b"}}),
        "/v1/evals/{eval_id}/runs": (f"/v1/evals/{eval_id}/runs", {"json": run}, {"json": run | {"name": "b"}}),
    }


@pytest.mark.usefixtures("checked_here")
async def test_repeated_create_makes_one_object_on_every_route(control: Control):
    made = await bodies(control)
    for path, (url, same, other) in made.items():

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


async def test_repeated_create_returns_the_first_without_its_file(control: Control):
    made = await bodies(control)
    of_batches, (runs, of_runs, _) = made["/v1/batches"][1], made["/v1/evals/{eval_id}/runs"]
    file_id = of_batches["json"]["input_file_id"]
    of_runs["json"]["data_source"]["source"] = {"type": "file_id", "id": file_id}
    requests = [("/v1/batches", of_batches), (runs, of_runs)]
    first = [await control.http.post(url, headers=KEYED, **body) for url, body in requests]
    await control.context.tasks.idle("batches", "eval_runs")
    (await control.http.delete(f"/v1/files/{file_id}")).raise_for_status()
    repeated = [await control.http.post(url, headers=KEYED, **body) for url, body in requests]
    assert [one.json()["id"] for one in repeated] == [one.json()["id"] for one in first]


async def test_empty_idempotency_key_is_none(control: Control):
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
