"""Bounds of a body: sizes, counts and depth, the fields it may have, and the forms that an engine has to prepare."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import resolve
from appliance.gateway.requests.fields import FIELDS, REFUSED
from appliance.gateway.requests.request_check import check_body

from .conftest import Box, chat

LIMITS = Limits()
CHAT = resolve(b"POST", b"/v1/chat/completions")
COMPLETIONS = resolve(b"POST", b"/v1/completions")
RESPONSES = resolve(b"POST", b"/v1/responses")
MESSAGES = resolve(b"POST", b"/v1/messages")
EMBEDDINGS = resolve(b"POST", b"/v1/embeddings")


def refusal(route: Any, body: bytes | dict[str, Any]) -> HttpError:
    with pytest.raises(HttpError) as caught:
        check_body(route, body if isinstance(body, bytes) else orjson.dumps(body), LIMITS)
    assert caught.value.status == 400 and len(caught.value.body()) < 1000
    return caught.value


async def test_bad_bodies_spend_the_rate_and_are_not_looked_at_beyond_it(box: Box) -> None:
    box.limit(requests_per_minute=2)
    bodies = ((b"{", 400), (chat(), 200), (b"{", 429), (b'{"model":"nobody"}', 429), (b"[" * 100_000, 429))
    for body, status in bodies:
        assert (await box.ask("POST", "/v1/chat/completions", body)).status == status


def test_lists_have_bounds_and_say_them() -> None:
    for given, param in (
        (chat(messages=[{"role": "user", "content": "x"}] * 2049), "messages"),
        (chat(stop=["a"] * 65), "stop"),
        (chat(stop=["x" * 2000]), "stop[0]"),
        (chat(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias"),
        (chat(tools=[{"type": "function", "function": {"name": "f"}}] * 513), "tools"),
        (chat(chat_template_kwargs={str(i): i for i in range(65)}), "chat_template_kwargs"),
    ):
        assert refusal(CHAT, given).param == param
    items = [{"role": "user", "content": "x"}] * 1025
    assert refusal(RESPONSES, {"model": "m", "input": items}).param == "input"
    metadata = {str(i): "x" for i in range(17)}
    assert refusal(RESPONSES, {"model": "m", "input": "x", "metadata": metadata}).param == "metadata"
    assert refusal(EMBEDDINGS, {"model": "m", "messages": ["x"]}).param == "messages[0]"


@pytest.mark.parametrize("item", ["x", {}, {"role": ["user"], "content": "x"}])
def test_items_without_role_or_type_are_refused_by_their_place(item: Any) -> None:
    refused = refusal(RESPONSES, {"model": "m", "input": [{"role": "user", "content": "x"}, item]})
    assert refused.param.startswith("input[1]")


def test_a_body_holds_a_number_of_lists_and_objects() -> None:
    error = refusal(CHAT, b'{"model":"m","messages":[' + b"[]," * (1 << 17) + b"1]}")
    assert error.code == "too_many_values"


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS], ids=lambda route: route.name)
def test_a_field_that_nobody_knows_is_refused(route: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x"}
    body = {name: value for name, value in body.items() if name in FIELDS[route.name]}
    if route is RESPONSES:
        del body["prompt"]  # known, and refused for what it is
    assert check_body(route, orjson.dumps(body), LIMITS)
    assert refusal(route, body | {"guided_grammar": {}}).param == "guided_grammar"


@pytest.mark.parametrize(
    "field",
    ["stream_interval", "kv_transfer_params", "request_id", "vllm_xargs", "mm_processor_kwargs"],
)
def test_fields_that_change_what_is_counted_or_where_are_refused(field: str) -> None:
    error = refusal(CHAT, chat(**{field: {"a": 1} if field.endswith(("params", "kwargs", "xargs")) else "2"}))
    assert error.param == field and error.code == "unsupported_parameter"
    for nothing in (None, False, 0):
        assert check_body(CHAT, orjson.dumps(chat(**{field: nothing})), LIMITS)


def test_every_field_of_openais_sdk_is_known() -> None:
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat_params
    from openai.types.responses import input_token_count_params, response_create_params

    for route, params in (
        (CHAT, chat_params.CompletionCreateParamsBase),
        (COMPLETIONS, completion_create_params.CompletionCreateParamsBase),
        (EMBEDDINGS, embedding_create_params.EmbeddingCreateParams),
        (RESPONSES, response_create_params.ResponseCreateParamsBase),
        (RESPONSES, input_token_count_params.InputTokenCountParams),
    ):
        names = set(params.__annotations__)
        assert len(names) > 4 and not names - set(FIELDS[route.name]) - set(REFUSED)


# --- forms that an engine has to prepare


def schema_of(schema: Any) -> dict[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


LONG = {"enum": ["x" * 1000 + str(i) for i in range(300)]}
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def tool(schema: Any, **more: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema} | more}]}


@pytest.mark.parametrize("more", [{"tool_choice": "required"}, {}])
def test_check_keyword_of_a_tool_that_is_not_enforced_passes(more: dict[str, Any]) -> None:
    assert check_body(CHAT, orjson.dumps(chat(**tool(UNIQUE, strict=not more), **more)), LIMITS).model == "m"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(structured_outputs={"grammar": 'root ::= "a"'}), "structured_outputs"),
        (chat(structured_outputs={"json": {}, "whitespace_pattern": "(a*)*"}), "structured_outputs"),
        (chat(structured_outputs={"json": "{"}), "structured_outputs.json"),
        (chat(response_format={"type": "structural_tag", "format": {}}), "response_format"),
    ],
)
def test_check_forms_of_other_kinds_are_refused(body: dict[str, Any], param: str) -> None:
    assert refusal(CHAT, body).param == param


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (CHAT, schema_of(UNIQUE), "response_format.json_schema.schema.properties.a.uniqueItems"),
        (CHAT, chat(structured_outputs={"json": '{"items": {"not": {}}}'}), "structured_outputs.json.items.not"),
        (
            RESPONSES,
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": UNIQUE}}},
            "text.format.schema.properties.a.uniqueItems",
        ),
        (
            MESSAGES,
            chat(max_tokens=5, output_config={"format": {"schema": UNIQUE}}),
            "output_config.format.schema.properties.a.uniqueItems",
        ),
    ],
)
def test_check_keyword_that_is_not_enforced_is_refused_with_its_place(route: Any, body: Any, param: str) -> None:
    error = refusal(route, {"model": "m", **body})
    assert (error.param, error.code) == (param, "unsupported_schema_keyword")


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (
            RESPONSES,
            {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": LONG, "strict": True}]},
            "tools[0]",
        ),
        (
            MESSAGES,
            chat(max_tokens=5, tools=[{"name": "f", "input_schema": LONG}], tool_choice={"type": "any"}),
            "tools[0]",
        ),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "x" * 300_000}}, "structured_outputs"),
        (CHAT, schema_of(LONG), "response_format"),
        (CHAT, chat(structured_outputs={"choice": [str(i) for i in range(100_000)]}), "structured_outputs"),
        (CHAT, chat(**tool(LONG), tool_choice="required"), "tools[0]"),
        (CHAT, chat(functions=[{"name": "f", "parameters": LONG}], function_call={"name": "f"}), "tools[0]"),
    ],
)
def test_check_forms_beyond_their_size_are_refused(route: Any, body: Any, param: str) -> None:
    error = refusal(route, {"model": "m", **body})
    assert (error.param, error.code) == (param, "structure_too_complex")


@pytest.mark.parametrize(
    "prompt",
    [
        [1, *[1.5] * 50_000],
        [-1] * 50_000,
        [1 << 32] * 50_000,
        ["a", *[1] * 50_000],
        [[1], *[["a"]] * 50_000],
    ],
    ids=["fractions", "below zero", "past any vocabulary", "texts too", "lists of texts"],
)
def test_a_prompt_of_other_things_than_tokens_is_refused(prompt: list[Any]) -> None:
    assert refusal(COMPLETIONS, {"model": "m", "prompt": prompt}).param == "prompt"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}, "minItems": 2**31, "maxItems": 2**33},
        {"type": "array", "items": {}, "maxItems": 200_000},
        {"type": "array", "items": {}, "minItems": 1e9},
        {"type": "array", "prefixItems": [{"type": "array", "maxItems": 900}] * 12},
        {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(300)}},
    ],
)
@pytest.mark.parametrize("where", ["format", "outputs", "tool"])
def test_check_schema_that_ends_an_engine_is_refused(schema: dict[str, Any], where: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    asked = {
        "format": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        "outputs": {"structured_outputs": {"json": schema}},
        "tool": {"tool_choice": "required", "tools": [tool]},
    }[where]
    assert b"structure_too_complex" in refusal(CHAT, chat(**asked)).body()


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("padding", ["max_length"], ["do_not_pad"]),
        ("encoding_format", ["bytes", "bytes_only", 7], ["float", "base64", None]),
    ],
)
def test_embeddings_are_not_padded_and_come_in_forms_that_clients_get(field: str, bad: list, good: list) -> None:
    asked = {"model": "m", "input": ["a"] * 2048}
    for value in bad:
        assert refusal(EMBEDDINGS, {**asked, field: value}).param == field
    for value in good:
        check_body(EMBEDDINGS, orjson.dumps({**asked, field: value}), LIMITS)


@pytest.mark.parametrize("level", ['{"anyOf":[%s]}', '{"oneOf":[%s]}', '{"const":%s}', '{"enum":[%s]}', '{"a":%s}'])
def test_a_schema_as_text_is_no_deeper_than_one_in_the_body(level: str) -> None:
    schema = "1"
    for _ in range(500):
        schema = level % schema
    body = chat(structured_outputs={"json": '{"properties":{"a":' + schema + "}}"})
    assert refusal(CHAT, body).param == "structured_outputs.json"
