"""No body of a control route costs the loop more than its route is worth: it has bounds, and is read beside it."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from fastapi.routing import APIRoute

from appliance.controller.evals.requests import MAX_CRITERIA_BYTES, MAX_SCHEMA_BYTES
from appliance.controller.http import bodies
from appliance.controller.http.body_weight import check_weight
from appliance.controller.http.strict_body import MOST_MISTAKES
from appliance.controller.interfaces.errors import BadRequest
from tests.simulator.control_plane import change
from tests.unit.controller.conftest import ADMIN, Control
from train.graders.graders import MAX_BYTES

GRADER: Any = {"type": "string_check", "name": "s", "input": "a", "reference": "a", "operation": "eq"}


@pytest.fixture
def control(control: Control) -> Control:
    """With the bounds of a real box: the routes' own are smaller than the one of all."""
    change(control.context, config=control.context.config.model_copy(update={"json_body_bytes": 8 << 20}))
    for layer in control.app.user_middleware:
        if "config" in layer.kwargs:
            layer.kwargs["config"] = control.context.config
    control.app.middleware_stack = control.app.build_middleware_stack()
    return control


def padded(body: dict[str, Any], size: int) -> bytes:
    text = orjson.dumps(body)
    return text + b" " * (size - len(text))


def test_each_bound_is_of_a_route(control: Control) -> None:
    routes = {route.path for route in control.app.routes if isinstance(route, APIRoute)}
    assert set(bodies.BOUNDS) <= routes


def test_what_a_route_takes_fits_its_bound() -> None:
    assert bodies.bound_of("/v1/evals").nbytes >= MAX_SCHEMA_BYTES + MAX_CRITERIA_BYTES
    for path in ("/v1/fine_tuning/jobs", "/v1/fine_tuning/alpha/graders/run"):
        assert bodies.bound_of(path).nbytes > MAX_BYTES


async def test_every_route_refuses_what_is_longer_announced_or_not(control: Control) -> None:
    """All routes that read JSON; what takes files has bounds of its own (test_files, test_uploads)."""
    tried = 0
    for route in control.app.routes:
        if not isinstance(route, APIRoute) or not route.body_field or route.path.startswith("/internal"):
            continue
        bound, (method,) = bodies.bound_of(route.path), route.methods
        path = route.path.replace(":path", "").replace("{", "").replace("}", "")
        for announced in (True, False):
            text = padded({"x": 1}, bound.nbytes + 1)
            content = text if announced else _in_pieces(text)
            answer = await control.http.request(
                method, path, content=content, headers={**ADMIN, "content-type": "application/json"}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large"), route.path
        heavy = padded({"x": [1] * bound.weight}, 2 * bound.weight + 20)
        if len(heavy) <= bound.nbytes:
            answer = await control.http.request(
                method, path, content=heavy, headers={**ADMIN, "content-type": "application/json"}
            )
            assert answer.json()["error"]["code"] == "too_many_values", route.path
        tried += 1
    assert tried > 20


async def _in_pieces(text: bytes) -> Any:
    for at in range(0, len(text), 1 << 18):
        yield text[at : at + (1 << 18)]


async def test_a_large_body_is_parsed_beside_the_loop(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    parsed = bodies._parsed

    def noted(text: bytes, weight: int) -> Any:
        threads.append(threading.get_ident())
        return parsed(text, weight)

    monkeypatch.setattr(bodies, "_parsed", noted)
    headers = {"content-type": "application/json"}
    for size in (1000, 100_000):
        answer = await control.http.post(
            "/v1/fine_tuning/alpha/graders/validate", content=padded({"grader": GRADER}, size), headers=headers
        )
        assert answer.status_code == 200, answer.text
    assert threads[0] == threading.get_ident() != threads[1]


async def test_a_response_in_background_is_counted_before_it_is_parsed(control: Control) -> None:
    text = padded({"model": "starter", "background": True, "input": [[]] * 20_000}, 200_000)
    answer = await control.http.post("/v1/responses", content=text, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_values")


def test_what_is_no_json_is_said_from_beside_the_loop() -> None:
    for text, error in ((b"[" + b" " * 100_000, orjson.JSONDecodeError), (b"[[]" + b",[]" * 50_000 + b"]", BadRequest)):
        with pytest.raises(error):
            asyncio.run(bodies.parsed(text, 1 << 16))


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


async def test_of_a_body_of_mistakes_their_number_is_told_and_not_each(control: Control) -> None:
    """pydantic makes the words of all or none: 26,000 unknown fields held the loop for 0.2 s."""

    async def asked(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await control.http.post(path, json=body)
        assert answer.status_code == 400
        return answer.json()["error"]

    unknown = {f"x{number}": 1 for number in range(26_000)}
    path = "/v1/evals/eval_1/runs"
    error = await asked(path, unknown)
    assert error["message"] == "In the body 26001 fields or values are not what is expected."
    assert (error["param"], error["code"]) == (None, "invalid_body")
    error = await asked(path, {"data_source": {"type": "jsonl", **unknown}})
    assert "'data_source.jsonl' 26001" in error["message"] and error["param"] == "data_source.jsonl"
    content = [{}] * MOST_MISTAKES
    source: dict[str, Any] = {"type": "file_content", "content": content}
    error = await asked(path, {"data_source": {"type": "jsonl", "source": source}})
    assert error["param"] == "data_source.source.content.0.item"
    content.append({})
    error = await asked(path, {"data_source": {"type": "jsonl", "source": source}})
    assert "101 fields or values" in error["message"]


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


@pytest.mark.parametrize("text", ['"', '\\"', "\\\\", '\\\\"', 'a"[1,2', "\\", "\\\\\\"])
def test_the_count_of_values_agrees_with_the_parser_about_where_strings_end(text: str) -> None:
    value = [text, [1, 2], {text: text}] * 20
    weight = 12 * 41 + 4 * 60 + 3 * 20 - 1 + 20  # lists and objects, strings and keys, commas
    raw = orjson.dumps(value)
    padded = raw + b" " * len(raw)  # long enough to be looked at
    check_weight(padded, weight)
    with pytest.raises(BadRequest):
        check_weight(padded, weight - 1)
