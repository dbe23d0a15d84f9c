"""Bodies of control routes: their size, depth and what is kept of them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from appliance.controller.http.routers import StrictRoute
from tests.unit.controller.conftest import ADMIN, Control


def padded(body: dict[str, Any], size: int) -> bytes:
    text = orjson.dumps(body)
    return text + b" " * (size - len(text))


async def test_json_route_longer_body_refused(control: Control) -> None:
    """Whether its length is announced or not."""
    tried = 0
    for route in control.app.routes:
        if not isinstance(route, StrictRoute) or not route.body_field or route.path.startswith("/internal"):
            continue
        (method,) = route.methods
        path = route.path.replace(":path", "").replace("{", "").replace("}", "")
        text = padded({"x": 1}, route.max_bytes(control.context.config) + 1)
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
    deep = body.replace("%s", "[" * 300 + "]" * 300)
    refused = await control.http.post(path, content=deep, headers={"content-type": "application/json"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_json")
