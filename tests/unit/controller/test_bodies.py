"""Bodies of control routes: their size, depth and what is kept of them."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from fastapi.routing import APIRoute

from appliance.controller.evals.requests import MAX_CRITERIA_BYTES, MAX_SCHEMA_BYTES
from appliance.controller.http import strict_json
from tests.unit.controller.conftest import ADMIN, Control
from train.graders.graders import MAX_BYTES


def padded(body: dict[str, Any], size: int) -> bytes:
    text = orjson.dumps(body)
    return text + b" " * (size - len(text))


def test_max_bytes_of_names_only_routes(control: Control) -> None:
    routes = {route.path for route in control.app.routes if isinstance(route, APIRoute)}
    assert set(strict_json.MAX_BYTES_OF) <= routes


def test_max_bytes_of_graders_and_evals_have_room_for_them(control: Control) -> None:
    config = control.context.config
    assert strict_json.max_bytes("/v1/evals", config) >= MAX_SCHEMA_BYTES + MAX_CRITERIA_BYTES
    for path in ("/v1/fine_tuning/jobs", "/v1/fine_tuning/alpha/graders/run"):
        assert strict_json.max_bytes(path, config) > MAX_BYTES


async def test_json_route_longer_body_refused(control: Control) -> None:
    """Whether its length is announced or not."""
    tried = 0
    for route in control.app.routes:
        if not isinstance(route, APIRoute) or not route.body_field or route.path.startswith("/internal"):
            continue
        (method,) = route.methods
        path = route.path.replace(":path", "").replace("{", "").replace("}", "")
        text = padded({"x": 1}, strict_json.max_bytes(route.path, control.context.config) + 1)
        for content in (text, _in_pieces(text)):
            answer = await control.http.request(
                method, path, content=content, headers={**ADMIN, "content-type": "application/json"}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large"), route.path
        tried += 1
    assert tried > 20


async def _in_pieces(text: bytes) -> Any:
    for at in range(0, len(text), 1 << 18):
        yield text[at : at + (1 << 18)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/fine_tuning/jobs", '{"model":"starter","training_file":"f","hyperparameters":{"x":%s}}'),
        ("/v1/evals", '{"data_source_config":{"type":"custom","item_schema":{"a":%s}},"testing_criteria":[{}]}'),
        ("/v1/responses", '{"model":"starter","background":true,"input":"x","metadata":%s}'),
    ],
)
async def test_a_body_is_no_deeper_than_it_can_be_written(control: Control, path: str, body: str):
    """It was a 500, from where the body was kept."""
    deep = body.replace("%s", "[" * 300 + "]" * 300)
    refused = await control.http.post(path, content=deep, headers={"content-type": "application/json"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_json")


@pytest.fixture
def cycles() -> Iterator[list[Any]]:
    """What a test leaves that only the collector finds."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("wrong", ["json", "on a thread", "field"])
async def test_what_is_refused_keeps_no_body(control: Control, cycles: list[Any], wrong: str) -> None:
    """The collector comes seldom (garbage.py): with 15 MiB for each body one key had the controller hold 3 GiB."""
    long = "x" * 9000
    path, body = "/v1/evals", {"data_source_config": {}, long: 1}
    if wrong == "on a thread":
        path = f"/v1/evals/{await an_eval(control)}/runs"
        source = {"type": "file_content", "content": [{"item": {"a": long}}]}
        odd = {"tools": [{"type": "x"}]}
        asked = {"type": "template", "template": [{"role": "user", "content": "a"}]}
        body = {
            "type": "completions",
            "model": "starter",
            "source": source,
            "input_messages": asked,
            "sampling_params": odd,
        }
        body = {"data_source": body}
    text = json.dumps(body).encode()
    text = text[:-1] if wrong == "json" else text
    gc.collect()
    gc.garbage.clear()
    answer = await control.http.post(path, content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    del answer
    await asyncio.sleep(0.05)  # until the thread is at its end, too
    gc.collect()
    server = [left for left in cycles if not type(left).__module__.startswith("httpx")]
    kept = [one for left in server for one in gc.get_referents(left) if isinstance(one, str | bytes)]
    assert not [one[:60] for one in kept if len(one) >= len(long)]


async def an_eval(control: Control) -> str:
    check = {"type": "string_check", "name": "n", "input": "a", "reference": "b", "operation": "eq"}
    config = {"type": "custom", "item_schema": {"type": "object"}}
    made = await control.http.post("/v1/evals", json={"data_source_config": config, "testing_criteria": [check]})
    return str(made.json()["id"])
