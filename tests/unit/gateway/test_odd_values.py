"""Whatever stands in whatever place of a request, the gateway's checks take or refuse it; nothing else escapes them."""

from __future__ import annotations

import random

import orjson
import pytest

from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import resolve
from appliance.gateway.requests.fields import FIELDS
from appliance.gateway.requests.request_check import check_body
from tests.front.request_samples import REQUESTS, changes

PLAIN = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "n"}], "seed": 1}


@pytest.mark.parametrize("level", ['{"anyOf":[%s]}', '{"oneOf":[%s]}', '{"const":%s}', '{"enum":[%s]}', '{"a":%s}'])
def test_a_schema_as_text_is_no_deeper_than_one_in_the_body(level: str) -> None:
    """What measures it goes down into it by recursion: at 500 levels the gateway's check failed."""
    schema = "1"
    for _ in range(500):
        schema = level % schema
    body = {"model": "m", **PLAIN, "structured_outputs": {"json": '{"properties":{"a":' + schema + "}}"}}
    with pytest.raises(HttpError) as refused:
        check_body(resolve(b"POST", b"/v1/chat/completions"), orjson.dumps(body), Limits())
    assert (refused.value.status, refused.value.param) == (400, "structured_outputs.json")


@pytest.mark.parametrize("calls", ["abc", [1], [None], True])
@pytest.mark.parametrize("role", ["system", "user", "tool", "assistant"])
def test_calls_of_another_type_are_refused_for_every_role(role: str, calls: object) -> None:
    body = {"model": "m", "messages": [{"role": role, "content": "x", "tool_calls": calls}]}
    with pytest.raises(HttpError) as refused:
        check_body(resolve(b"POST", b"/v1/chat/completions"), orjson.dumps(body), Limits())
    assert refused.value.status == 400


@pytest.mark.parametrize("path", REQUESTS)
def test_a_check_raises_nothing_but_a_refusal(path: str) -> None:
    chance, route, limits = random.Random(path), resolve(b"POST", path.encode()), Limits()
    requests = (PLAIN, *REQUESTS[path]) if path == "/v1/chat/completions" else REQUESTS[path]
    for body in requests:
        # Every place of a small one; of the others a share, as the whole scan belongs to `make soak`.
        share = 1 if body is PLAIN else 0.05
        for one in changes(body, sorted(FIELDS[route.name]), chance, share, pairs=20):
            text = orjson.dumps({"model": "m", **one})
            try:
                check_body(route, text, limits)
            except HttpError as error:
                assert error.status in (400, 404), text
