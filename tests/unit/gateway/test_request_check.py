"""The gateway rejects bodies that could harm engines: fields, sizes, counts, depth, media, answer schemas."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import Route, resolve
from appliance.gateway.requests.fields import FIELDS, REFUSED
from appliance.gateway.requests.request_check import Checked, check_body

from .conftest import Box, chat, request_bytes

LIMITS = Limits()
CHAT = resolve(b"POST", b"/v1/chat/completions")
COMPLETIONS = resolve(b"POST", b"/v1/completions")
RESPONSES = resolve(b"POST", b"/v1/responses")
MESSAGES = resolve(b"POST", b"/v1/messages")
EMBEDDINGS = resolve(b"POST", b"/v1/embeddings")
COUNT_TOKENS = resolve(b"POST", b"/v1/messages/count_tokens")
BASE: dict[str, dict[str, Any]] = {
    "chat.completions": chat(),
    "completions": {"model": "m", "prompt": "x"},
    "responses": {"model": "m", "input": "x"},
    "messages": chat(max_tokens=5),
    "messages.count_tokens": chat(),
    "embeddings": {"model": "m", "input": "x"},
}


def check(route: Route, **fields: Any) -> Checked:
    return check_body(route, orjson.dumps(BASE[route.name] | fields), LIMITS)


def refusal(route: Route, **fields: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        check(route, **fields)
    assert caught.value.status == 400 and len(caught.value.body()) < 1000
    return caught.value


def image(url: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url, **more}]}]}


def answer_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def tool(schema: Any, **more: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema} | more}]}


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 1, "pattern": "a+"}, "b": {"$ref": "#/$defs/c"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"c": {"anyOf": [{"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 3}, {}]}},
}
LONG = {"enum": ["x" * 1000 + str(i) for i in range(300)]}
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
UNIQUE_FORMAT = {"type": "json_schema", "name": "a", "schema": UNIQUE}
USER = {"role": "user", "content": "x"}


async def test_check_rejects_bad_bytes_before_any_engine(box: Box) -> None:
    head = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], '
    cases: tuple[tuple[bytes, str | None], ...] = (
        (b"{", None),
        (head + b'"documents": ' + b"[" * 200 + b"]" * 200 + b"}", None),
        (head + b'"seed": ' + b"9" * 30 + b"}", "seed"),
        (head + b'"logit_bias": {"1": 1e999}}', None),
        (head + b'"chat\\u005ftemplate": "{{ x }}"}', "chat_template"),
        (
            b'{"model":"m","messages":[{"role":"user","content":[{"type":"x","image\\u005furl":"http://x"}]}]}',
            "image_url",
        ),
        (b'{"messages": []}', "model"),
        (b'{"model": 3, "messages": []}', "model"),
    )
    wire = await box.connect()
    for body, param in cases:
        await wire.send(request_bytes("POST", "/v1/chat/completions", body))
        response = await wire.response()
        assert (response.status, response.error["param"]) == (400, param)
    assert box.engines["e0"].requests == []
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat()))
    assert (await wire.response()).status == 200


async def test_requests_with_bad_body_count_toward_rate_limit(box: Box) -> None:
    box.limit(requests_per_minute=2)
    bodies = ((b"{", 400), (chat(), 200), (b"{", 429), (b'{"model":"nobody"}', 429), (b"[" * 100_000, 429))
    for body, status in bodies:
        assert (await box.ask("POST", "/v1/chat/completions", body)).status == status


@pytest.mark.parametrize("depth", [LIMITS.json_depth, LIMITS.json_depth + 1])
def test_check_limits_depth_of_body_and_schema_text(depth: int) -> None:
    def fields(levels: int) -> tuple[dict[str, Any], ...]:
        lists = "[" * levels + "]" * levels
        return {"logit_bias": {"x": json.loads(lists[2:-2])}}, {"structured_outputs": {"json": lists[1:-1]}}

    for more in fields(depth):
        if depth <= LIMITS.json_depth:
            check(CHAT, **more)
        else:
            assert refusal(CHAT, **more).code == "invalid_json"


@pytest.mark.parametrize(("count", "end"), [(1 << 17, b"1]}"), (1 << 21, b"not JSON")])
def test_check_rejects_too_many_arrays(count: int, end: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        check_body(CHAT, b'{"model":"m","messages":[' + b"[]," * count + end, LIMITS)
    assert caught.value.code == "too_many_values"


def test_check_value_out_of_bounds_names_the_field() -> None:
    for route, fields, param in (
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [USER] * 2049}, "messages"),
        (CHAT, {"temperature": "1"}, "temperature"),
        (CHAT, {"seed": (1 << 63) - 1}, "seed"),
        (CHAT, {"max_completion_tokens": 1 << 63}, "max_completion_tokens"),
        (CHAT, {"stop": ["a"] * 65}, "stop"),
        (CHAT, {"stop": ["x" * 2000]}, "stop[0]"),
        (CHAT, {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        (CHAT, tool({}) | {"tools": [{"type": "function"}] * 513}, "tools"),
        (CHAT, {"chat_template_kwargs": {str(i): i for i in range(65)}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"thinking_budget": {"a": 1}}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        (CHAT, image("HTTP://a/"), "image_url"),
        (CHAT, image({"url": "data:text/html,x"}), "image_url"),
        (CHAT, {"messages": [{"role": "user", "content": [{"image_url": "http://x"}]}]}, "messages[0].content[0]"),
        (CHAT, {"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs"),
        (CHAT, {"structured_outputs": {"json": {}, "whitespace_pattern": "(a*)*"}}, "structured_outputs"),
        (CHAT, {"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        (CHAT, {"structured_outputs": {"json": '{"anyOf":[' * 500 + "1" + "]}" * 500}}, "structured_outputs.json"),
        (CHAT, {"response_format": {"type": "structural_tag", "format": {}}}, "response_format"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": ["x"] * 257}, "n"),
        (COMPLETIONS, {"logprobs": 1_000_000}, "logprobs"),
        (COMPLETIONS, {"prompt": [1, *[1.5] * 50_000]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1] * 50_000}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], *[["a"]] * 50_000]}, "prompt"),
        (EMBEDDINGS, {"input": ["x"] * 2049}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"messages": ["x"]}, "messages[0]"),
        (EMBEDDINGS, {"padding": "max_length"}, "padding"),
        (RESPONSES, {"input": [USER] * 1025}, "input"),
        (RESPONSES, {"input": [USER, "x"]}, "input[1]"),
        (RESPONSES, {"input": [USER, {}]}, "input[1]"),
        (RESPONSES, {"input": [USER, {"role": ["user"], "content": "x"}]}, "input[1].role"),
        (RESPONSES, {"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        (RESPONSES, {"tools": [{"type": "mcp", "server_url": "http://x"}]}, "tools[0]"),
        (RESPONSES, {"background": True, "store": False}, "background"),
        (RESPONSES, {"previous_response_id": "x" * 300}, "previous_response_id"),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}]},
            "source.url",
        ),
    ):
        assert refusal(route, **fields).param == param


def test_check_rejects_unsupported_fields_unless_empty() -> None:
    for route in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS):
        assert check(route).model == "m"
        assert refusal(route, guided_grammar={}).param == "guided_grammar"
    for field in ("stream_interval", "kv_transfer_params", "request_id", "mm_processor_kwargs"):
        error = refusal(CHAT, **{field: {"a": 1} if field.endswith(("params", "kwargs")) else "2"})
        assert (error.param, error.code) == (field, "unsupported_parameter")
        for nothing in (None, False, 0):
            assert check(CHAT, **{field: nothing})
    for elsewhere in ("conversation", "prompt"):
        assert refusal(RESPONSES, **{elsewhere: {"id": "x"}}).code == "unsupported_parameter"


def test_known_fields_include_every_field_of_openai_sdk() -> None:
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


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
SOUND = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
REFUSAL = {"type": "refusal", "refusal": "no"}
ANSWER = {"role": "assistant", "content": [REFUSAL], "reasoning": "b", "tool_calls": [CALL]}
ENTRY = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
INPUT = [
    {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1"},
    {"type": "function_call_output", "call_id": "c", "output": "o"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
]
CHOSEN = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
BLOCKS = [
    {"type": "text", "text": "t", "cache_control": {"type": "ephemeral"}},
    {"type": "thinking", "thinking": "h", "signature": "s"},
    {"type": "tool_use", "id": "t1", "name": "f", "input": {"image_url": "http://x"}},
    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
]
CLAUDE_TOOL = {"name": "f", "input_schema": SCHEMA, "strict": True}
GOOD: list[tuple[Route, dict[str, Any]]] = [
    (CHAT, {"stream": None, "n": None, "max_completion_tokens": 4096, "user": "https://a.org/image_url, \\u0041"}),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE, SOUND], "name": "ann"}, ANSWER, USER]}),
    (CHAT, {"messages": [{"role": "tool", "tool_call_id": "call_1", "content": "r"}], "documents": [{"title": "t"}]}),
    (CHAT, tool(SCHEMA, strict=True) | {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    (CHAT, tool({"image_url": {"type": "string"}})),
    (CHAT, tool(UNIQUE, strict=True)),
    (CHAT, tool(UNIQUE) | {"tool_choice": "required"} | answer_schema(SCHEMA)),
    (CHAT, {"structured_outputs": {"choice": ["yes", "no"]}, "metadata": {"a": "b"}, "reasoning_effort": "low"}),
    (CHAT, {"n": 2, "logprobs": True, "top_logprobs": 20, "logit_bias": {"5": 1.5}, "stop": ["x"], "seed": -1}),
    (CHAT, {"stream": True, "stream_options": {"include_usage": True}, "chat_template_kwargs": {"thinking": False}}),
    (COMPLETIONS, {"prompt": [1, 2, 3], "logprobs": 5, "echo": True, "best_of": 2, "suffix": ""}),
    (COMPLETIONS, {"prompt": [[1], [2]], "n": 2, "structured_outputs": {"json": SCHEMA}, "bad_words": ["b"]}),
    (EMBEDDINGS, {"input": ["x"] * 2048, "encoding_format": "base64", "padding": "do_not_pad", "dimensions": None}),
    (EMBEDDINGS, {"input": [[15, 16]], "add_special_tokens": False, "truncate_prompt_tokens": 5}),
    (EMBEDDINGS, {"input": None, "messages": [USER], "chat_template_kwargs": {"a": "b"}}),
    (RESPONSES, {"max_output_tokens": 10, "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"]}),
    (RESPONSES, {"input": INPUT, "instructions": "i", "tools": [ENTRY], "tool_choice": CHOSEN}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}}),
    (MESSAGES, {"messages": [{"role": "user", "content": BLOCKS}], "system": [{"type": "text", "text": "s"}]}),
    (MESSAGES, {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "auto"}, "stop_sequences": ["x"]}),
    (
        MESSAGES,
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "thinking": {"type": "enabled"}},
    ),
    (COUNT_TOKENS, {"messages": [{"role": "assistant", "content": BLOCKS}], "metadata": {"user_id": "u"}}),
]


@pytest.mark.parametrize(("route", "fields"), GOOD)
def test_check_accepts_good_body_and_rejects_changed_ones_without_crash(route: Route, fields: dict[str, Any]) -> None:
    checked = check(route, **fields)
    assert checked.model == "m" and checked.stream is bool(fields.get("stream")) and checked.tokens > 0
    for place in places({name: value for name, value in fields.items() if len(str(value)) < 2000}):
        for odd in (None, True, 0, -1.5, 1 << 70, "", "\x00", [], [[]], {}, {"a": []}):
            body = json.dumps(BASE[route.name] | changed(fields, place, odd))
            try:
                check_body(route, body.encode(), LIMITS)
            except HttpError as error:
                assert error.status == 400
            except (TypeError, ValueError) as error:
                pytest.fail(f"{place} = {odd!r}: {error!r}")


def places(value: Any) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each value in nested dicts and lists, at any depth."""
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (name,)
        if isinstance(inner, dict | list):
            for rest in places(inner):
                yield (name, *rest)


def changed(body: dict[str, Any], place: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(body)
    holder: Any = made
    for name in place[:-1]:
        holder = holder[name]
    holder[place[-1]] = value
    return made


# --- media and lengths


def test_check_rejects_media_part_with_uuid() -> None:
    for route, wrap in (
        (CHAT, lambda part: {"messages": [{"role": "user", "content": [part]}]}),
        (CHAT, lambda part: {"messages": [{"role": "user", "content": [part | {"image_url": None}]}]}),
        (CHAT, lambda part: {"messages": [{"role": "user", "content": [{"type": "x", "content": [part]}]}]}),
        (EMBEDDINGS, lambda part: {"input": None, "messages": [{"role": "user", "content": [part]}]}),
        (RESPONSES, lambda part: {"input": [{"role": "user", "content": [part]}]}),
    ):
        error = refusal(route, **wrap(IMAGE | {"uuid": "badge"}))  # vLLM caches media by uuid for all owners
        assert (error.param, error.code) == ("uuid", "unsupported_parameter")


# --- answer schemas, which an engine compiles into grammars


def test_structure_with_unenforced_keyword_names_its_path() -> None:
    for route, fields, param in (
        (CHAT, answer_schema(UNIQUE), "response_format.json_schema.schema.properties.a.uniqueItems"),
        (CHAT, {"structured_outputs": {"json": '{"items": {"not": {}}}'}}, "structured_outputs.json.items.not"),
        (RESPONSES, {"text": {"format": UNIQUE_FORMAT}}, "text.format.schema.properties.a.uniqueItems"),
        (
            MESSAGES,
            {"output_config": {"format": {"schema": UNIQUE}}},
            "output_config.format.schema.properties.a.uniqueItems",
        ),
    ):
        error = refusal(route, **fields)
        assert (error.param, error.code) == (param, "unsupported_schema_keyword")


def test_structure_over_size_limit_is_rejected() -> None:
    for route, fields, param in (
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": LONG, "strict": True}]}, "tools[0]"),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": LONG}], "tool_choice": {"type": "any"}}, "tools[0]"),
        (COMPLETIONS, {"structured_outputs": {"regex": "x" * 300_000}}, "structured_outputs"),
        (CHAT, answer_schema(LONG), "response_format"),
        (CHAT, {"structured_outputs": {"choice": [str(i) for i in range(100_000)]}}, "structured_outputs"),
        (CHAT, tool(LONG) | {"tool_choice": "required"}, "tools[0]"),
        (CHAT, {"functions": [{"name": "f", "parameters": LONG}], "function_call": {"name": "f"}}, "tools[0]"),
    ):
        error = refusal(route, **fields)
        assert (error.param, error.code) == (param, "structure_too_complex")


def test_structure_that_would_crash_engine_is_rejected() -> None:
    for schema in (
        {"type": "array", "items": {"type": "string"}, "minItems": 2**31, "maxItems": 2**33},
        {"type": "array", "prefixItems": [{"type": "array", "maxItems": 900}] * 12},
        {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(300)}},
    ):
        outputs = {"structured_outputs": {"json": schema}}
        for fields in (answer_schema(schema), outputs, tool(schema) | {"tool_choice": "required"}):
            assert refusal(CHAT, **fields).code == "structure_too_complex"
        space = {"type": "namespace", "name": "s", "tools": [{"type": "function", "name": "f", "parameters": schema}]}
        assert refusal(RESPONSES, tools=[space], tool_choice="required").code == "structure_too_complex"
        change = {"type": "tool_definition", "definition": {"name": "f", "strict": True, "input_schema": schema}}
        added = [{"role": "system", "content": [{"type": "tool_addition", "tool": change}]}]
        assert refusal(MESSAGES, messages=added).code == "structure_too_complex"
