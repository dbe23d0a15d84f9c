"""Bodies of control routes are limited in size, depth and number of fields."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi.params import Form

from appliance.controller.http.routers import StrictRoute
from tests.unit.controller.conftest import ADMIN, Control


def padded(body: dict[str, Any], size: int) -> bytes:
    text = orjson.dumps(body)
    return text + b" " * (size - len(text))


async def test_json_route_rejects_oversized_body(control: Control) -> None:
    """The limit applies to bodies with and without a Content-Length."""
    tried = 0
    for route in control.app.routes:
        if not isinstance(route, StrictRoute) or not route.body_field or route.path.startswith("/internal"):
            continue
        if isinstance(route.body_field.field_info, Form):  # test_uploads.py
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


async def test_body_with_too_many_fields_is_refused_with_one_error(control: Control) -> None:
    many, job = {f"x{number}": 1 for number in range(10_001)}, {"model": "starter", "training_file": "f"}
    for path, body in (
        ("/admin/v1/keys", {"name": "n"} | many),
        ("/v1/fine_tuning/jobs", job | {"metadata": many}),
        ("/v1/fine_tuning/jobs", job | {"method": {"type": "dpo", "dpo": {"hyperparameters": many}}}),
    ):
        answer = await control.http.post(path, json=body, headers=ADMIN)
        assert answer.status_code == 400 and "more than 10,000 fields" in answer.json()["error"]["message"]
