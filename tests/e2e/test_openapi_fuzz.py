"""Whatever our own OpenAPI document allows, sent through the gateway: never a 5xx; refusals are OpenAI error objects.

Cases by schemathesis; `pytest -m soak` sends thirty times as many. Every second one is asked of something that exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from appliance.controller.app import create_app
from tests.e2e.test_bad_inputs import training_file
from tests.front.box import MODEL, Front, running_front


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(imports=False) as running:
        yield running


@pytest.mark.parametrize("examples", [2, pytest.param(60, marks=pytest.mark.soak)])
def test_no_request_is_answered_with_a_server_error(front: Front, examples: int) -> None:
    document = front.call(lambda: create_app(front.context).openapi())  # type: ignore[arg-type]
    statuses: Counter[int] = Counter()
    operations = 0
    limits = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples < 10,
        suppress_health_check=list(HealthCheck),
    )
    with front.http() as client:
        known = what_exists(client)
        for found in schemathesis.openapi.from_dict(document).get_all_operations():
            operations += 1

            @limits
            @given(case=found.ok().as_strategy())
            def send(case: Any) -> None:
                for name in case.path_parameters:
                    if statuses.total() % 2 and case.method != "DELETE" and name in known:
                        case.path_parameters[name] = known[name]
                statuses[never_our_fault(client, case)] += 1

            send()
        assert client.get("/admin/v1/status").status_code == 200
    print(f"\n{operations} operations, {sum(statuses.values())} requests: {dict(sorted(statuses.items()))}")
    assert operations > 60 and sum(statuses.values()) >= operations and statuses[200] > 20


def what_exists(client: httpx.Client) -> dict[str, str]:
    """A value for path parameters by their name."""
    file_id = training_file(client)
    job = client.post("/v1/fine_tuning/jobs", json={"model": MODEL, "training_file": file_id}).raise_for_status()
    asked = {"model": MODEL, "input": "1+1?", "background": True}
    response = client.post("/v1/responses", json=asked).raise_for_status()
    return {
        "file_id": file_id,
        "job_id": job.json()["id"],
        "model": MODEL,
        "name": MODEL,
        "device_id": "n0/0",
        "response_id": response.json()["id"],
    }


def never_our_fault(client: httpx.Client, case: Any) -> int:
    given = case.as_transport_kwargs(base_url=str(client.base_url))
    given["headers"] = {**dict(given.get("headers") or {}), "authorization": client.headers["authorization"]}
    try:
        response = client.request(
            **{
                name: given[name]
                for name in ("method", "url", "params", "headers", "json", "data", "files")
                if given.get(name) is not None
            }
        )
    except (httpx.LocalProtocolError, httpx.InvalidURL, UnicodeError, TypeError):
        return 0  # nothing that an HTTP client can write
    assert response.status_code < 500, (case.method, str(response.url), case.body, response.text[:500])
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"], error
    assert response.headers["x-request-id"]
    return response.status_code
