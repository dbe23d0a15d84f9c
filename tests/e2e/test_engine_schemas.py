"""For every schema that the gateway accepts, a real engine generates a value that fits it."""

import json
import random
from typing import Any

import jsonschema
import openai
import orjson
import pytest

from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import resolve
from appliance.gateway.requests.request_check import check_body
from tests.property.test_schema_keywords import PARTS, as_read

KINDS = (None, "object", "array", "string", "integer", "number")
CHAT = resolve(b"POST", b"/v1/chat/completions")
ASKED = {"model": "starter", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 96}


def read(more: dict[str, Any]) -> dict[str, Any] | None:
    """The request body for the engine; None if the gateway refuses it."""
    body = orjson.dumps(ASKED | more)
    try:
        return check_body(CHAT, body, Limits()).data
    except HttpError as error:
        assert error.code == "unsupported_schema_keyword", error.message
        return None


def schemas(count: int, seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    single = [part if kind is None else {"type": kind, **part} for part in PARTS for kind in KINDS]
    pairs = [{"type": chance.choice(KINDS[1:]), **chance.choice(PARTS), **chance.choice(PARTS)} for _ in range(count)]
    return chance.sample([*single, *pairs], count)


async def wrong_answers(sdk: Any, wanted: list[dict[str, Any]]) -> tuple[list[Any], int]:
    """Answers that do not fit their schema, and the number of complete answers."""
    wrong, whole = [], 0
    for place, schema in enumerate(wanted):
        body = read({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}})
        if body is None:
            continue
        try:
            answer = await sdk.chat.completions.create(**body, seed=place, temperature=1)
        except openai.BadRequestError:
            continue  # no value fits it
        choice = answer.choices[0]
        if choice.finish_reason != "stop":
            continue  # cut off by the token limit
        whole += 1
        if not fits(choice.message.content, schema):
            wrong.append((schema, choice.message.content))
    return wrong, whole


def fits(text: str, schema: dict[str, Any]) -> bool:
    try:
        return jsonschema.Draft202012Validator(as_read(schema)).is_valid(json.loads(text))
    except json.JSONDecodeError:
        return False


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.soak)])
async def test_engine_answers_fit_schemas(start: Any, a: Any, count: int) -> None:
    wrong, whole = await wrong_answers((await start("schemas", a)).sdk, schemas(count, seed=count))
    assert not wrong and whole >= count // 4
