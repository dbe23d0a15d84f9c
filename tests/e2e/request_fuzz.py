"""Nothing that the gateway passes is answered by an engine with a 500, or in words of the engine's own code.

Whole requests of every route are changed in one place, or in two: each value gives way to values of other kinds, to
odd ones of its own kind, or is left out. The gateway's checks run first, as in the box; what they pass goes to vLLM's
server without a core (coreless_engine.py), which is all of an engine but the model's computing.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from runtime.processes.lifeline import Lifeline

IMAGE = "data:image/png;base64,iVBORw0KGgo="
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 1, "pattern": "a+"}, "b": {"$ref": "#/$defs/c"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"c": {"anyOf": [{"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 3}, {}]}},
}
# What xgrammar declines, llguidance takes.
OTHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "multipleOf": 2}, "b": {"enum": ["x", 1, None]}},
    "allOf": [{"required": ["a"]}, {"properties": {"c": {"const": 1}}}],
}
USER = {"role": "user", "content": "a"}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
ITEM_TOOL = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CLAUDE_TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}
SHORT = {"max_tokens": 3}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}

REQUESTS: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": (
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "t"}], "name": "ann"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "r"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning": "b"},
                USER,
            ],
            "tools": [CHAT_TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
        },
        {
            "messages": [USER],
            "tools": [CHAT_TOOL, {"type": "function", "function": {"name": "g"}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
        {"messages": [USER], "tools": [CHAT_TOOL], "tool_choice": "required"},
        {"messages": [USER], "response_format": FORMAT},
        {"messages": [USER], "response_format": {"type": "json_object"}, "stream": True},
        {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"schema": OTHER_SCHEMA}}},
        {"messages": [USER], "structured_outputs": {"json": OTHER_SCHEMA}},
        {"messages": [USER], "structured_outputs": {"regex": "[ab]{2}(c|d)+"}},
        {"messages": [USER], "structured_outputs": {"choice": ["yes", "no"]}, "stream": True},
        {
            "messages": [USER],
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"5": 1.5},
            "stop": ["x"],
            "stop_token_ids": [7],
            "bad_words": ["b"],
            "allowed_token_ids": [20, 21],
            "seed": 1,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "min_tokens": 1,
            "frequency_penalty": 0.1,
            "presence_penalty": 0.1,
            "repetition_penalty": 1.1,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": False},
        },
        {
            "messages": [{"role": "assistant", "content": "b"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
            "chat_template_kwargs": {"enable_thinking": False},
            "documents": [{"title": "t", "text": "u"}],
            "reasoning_effort": "low",
            "metadata": {"a": "b"},
            "user": "u",
            "echo": True,
            "prompt_logprobs": 1,
            "logprob_token_ids": [3],
            "truncate_prompt_tokens": 5,
            "truncation_side": "left",
            "thinking_token_budget": 5,
            "length_penalty": 1.0,
            "cache_salt": "s",
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        },
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}
            ]
        },
    ),
    "/v1/completions": (
        {"prompt": "a", "n": 2, "best_of": 2, "echo": True, "logprobs": 1, "suffix": "", "seed": 1},
        {"prompt": ["a", "b"], "response_format": FORMAT, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": [[15, 16], [17]], "structured_outputs": {"json": SCHEMA}, "prompt_logprobs": 1},
        {"prompt": [15, 16], "structured_outputs": {"regex": "a|b"}, "stop": "x", "logit_bias": {"5": 1}},
    ),
    "/v1/responses": (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1"},
                {"type": "function_call_output", "call_id": "c", "output": "o"},
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "t", "annotations": []}],
                },
                {"role": "user", "content": "u"},
            ],
            "instructions": "i",
            "tools": [ITEM_TOOL],
            "tool_choice": "auto",
        },
        {"input": "a", "tools": [ITEM_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"input": "a", "tools": [ITEM_TOOL], "tool_choice": {"type": "function", "name": "f"}, "stream": True},
        {
            "input": "a",
            "tools": [ITEM_TOOL],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        },
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
        {"input": "a", "text": {"format": {"type": "json_object"}, "verbosity": "low"}, "stream": True},
        {"input": "a", "structured_outputs": {"json": OTHER_SCHEMA}},
        {
            "input": "a",
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "truncation": "auto",
            "metadata": {"a": "b"},
            "max_tool_calls": 1,
            "temperature": 0.5,
            "top_p": 0.9,
            "prompt": {"id": "p"},
            "store": False,
            "stream_options": {"include_obfuscation": False},
            "context_management": [{"type": "compaction", "compact_threshold": 5}],
            "user": "u",
            "service_tier": "auto",
            "logit_bias": {"5": 1},
            "stop": ["x"],
            "seed": 1,
        },
    ),
    "/v1/messages": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "t", "cache_control": {"type": "ephemeral"}}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "h", "signature": "s"},
                        {"type": "redacted_thinking", "data": "d"},
                        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t1",
                            "is_error": False,
                            "content": [{"type": "text", "text": "r"}, {"type": "tool_reference", "tool_name": "f"}],
                        },
                        {"type": "tool_result", "tool_use_id": "t1", "content": "r"},
                    ],
                },
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u"},
            ],
            "system": [{"type": "text", "text": "s"}],
            "tools": [CLAUDE_TOOL],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "metadata": {"user_id": "u"},
            "stop_sequences": ["x"],
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.9,
        },
        {"messages": [USER], "tools": [CLAUDE_TOOL], "tool_choice": {"type": "tool", "name": "f"}, "stream": True},
        {"messages": [USER], "tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}},
        {"messages": [USER], "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}},
        {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 1024}, "system": "s"},
        {
            "messages": [USER],
            "thinking": {"type": "disabled"},
            "output_format": {"type": "json_schema", "schema": SCHEMA},
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
                        },
                        {
                            "type": "tool_result",
                            "tool_use_id": "t1",
                            "content": [
                                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
                            ],
                        },
                    ],
                }
            ]
        },
    ),
    "/v1/embeddings": (
        {"input": "a", "encoding_format": "float", "dimensions": None, "user": "u"},
        {"input": ["a", "b"], "encoding_format": "base64", "truncate_prompt_tokens": 5},
        {"input": [[15, 16]], "add_special_tokens": False, "embed_dtype": "float32", "endianness": "native"},
        {"messages": [USER], "add_generation_prompt": False, "chat_template_kwargs": {"a": "b"}},
    ),
}
REQUESTS["/v1/responses/input_tokens"] = REQUESTS["/v1/responses"][:1]
REQUESTS["/v1/messages/count_tokens"] = REQUESTS["/v1/messages"][:2]

# What was answered with 500 once, or with nothing.
LIST_OF_NOTHING = {"type": "array", "items": {"$ref": "#/$defs/p"}, "minItems": 1, "uniqueItems": True}
CYCLE = {"$ref": "#/$defs/p", "$defs": {"p": {"$ref": "#/$defs/q"}, "q": {"anyOf": [{"$ref": "#/$defs/p"}]}}}
KNOWN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "a", "bad_words": [chr(n) * 250 for n in range(0x4E00, 0x4E08)]}),
    *(
        (
            "/v1/messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "content": [{"type": "image", "source": source}],
                            }
                        ],
                    }
                ]
            },
        )
        for source in ("x", None, 1)
    ),
    *(
        (path, body)
        for schema in ({"$ref": "#"}, CYCLE, CYCLE | LIST_OF_NOTHING)
        for path, body in (
            (
                "/v1/chat/completions",
                {
                    "messages": [USER],
                    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
                },
            ),
            ("/v1/chat/completions", {"messages": [USER], "structured_outputs": {"json": schema}}),
            ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": orjson.dumps(schema).decode()}}),
            (
                "/v1/responses",
                {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}},
            ),
            (
                "/v1/messages",
                {"messages": [USER], "output_config": {"format": {"type": "json_schema", "schema": schema}}},
            ),
        )
    ),
)

LEFT_OUT: Any = object()
LOOP = {"$ref": "#"}
ODD: tuple[Any, ...] = (
    LEFT_OUT,
    None,
    True,
    0,
    -1,
    1.5,
    1 << 62,
    (1 << 63) - 1,
    "",
    "x",
    'a\x00\ud7ff\U0001f600"\n</tool_call>',
    [],
    [None],
    ["x"],
    [{}],
    {},
    {"type": "x"},
    {"x": {"y": [1]}},
    LOOP,
    {"$ref": "#/$defs/none"},
    {"anyOf": [LOOP]},
    {"allOf": [{"$ref": "#/$defs/p"}, {}], "$defs": {"p": {"$ref": "#/$defs/q"}, "q": {"$ref": "#/$defs/p"}}},
    {"enum": []},
    {"not": {}},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"type": "string", "pattern": "a(?=b)"},
    {"type": "string", "pattern": "(("},
    {"type": "string", "format": "x", "minLength": 5, "maxLength": 3},
)
# Words of the engine's code. A client reads what to change, in words of the API that it speaks.
INNER = re.compile(
    r"has no attribute|\bvllm\b|xgrammar|llguidance|\.cc:|\.py\b|pydantic|Traceback|EngineCore|NoneType"
    r"|validation error|Internal|unexpected keyword|subscriptable|KeyError|argument of type|list index"
    r"|For further information"
    r"|object is not|must be str, not|Param\b|Please file an issue|\b__\w+__|Error:|Request\b.*\bObject",
)


def places(value: Any) -> Iterator[tuple[str | int, ...]]:
    """Where a value has values, at any depth."""
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
    if value is LEFT_OUT:
        del holder[place[-1]]
    else:
        holder[place[-1]] = copy.deepcopy(value)
    return made


def changes(
    body: dict[str, Any], fields: list[str], chance: random.Random, share: float, pairs: int
) -> Iterator[dict[str, Any]]:
    """A share of: each place with each odd value, each field of the route beside the request; and `pairs` of two."""
    yield body
    found = list(places(body))
    for place in found:
        for value in ODD:
            if chance.random() < share:
                yield changed(body, place, value)
    for field in fields:
        if field not in body:
            for value in ODD[1:]:
                if chance.random() < share:
                    yield body | {field: value}
    for _ in range(pairs):
        once = changed(body, chance.choice(found), chance.choice(ODD))
        if once_found := list(places(once)):
            yield changed(once, chance.choice(once_found), chance.choice(ODD))


class Engine:
    """vLLM's server without a core, behind the gateway's checks."""

    def __init__(self, app: Any, model: str) -> None:
        import httpx

        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://engine"
        )
        self._model = model
        self.app = app
        self.tried = 0
        self.passed = 0

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[int, bytes] | None:
        """Status and body of the engine's answer, None if the gateway refuses."""
        from appliance.gateway.core.config import Limits
        from appliance.gateway.core.errors import HttpError
        from appliance.gateway.core.routes import resolve
        from appliance.gateway.requests.request_check import check_body

        text = orjson.dumps({"model": self._model} | SHORT_OF.get(path, {}) | body)
        route = resolve(b"POST", path.encode())
        self.tried += 1
        try:
            text = orjson.dumps(check_body(route, text, Limits()).data)
        except HttpError:
            return None
        self.passed += 1
        answer = await self._client.post(
            route.engine_path.decode(), content=text, headers={"content-type": "application/json"}
        )
        return answer.status_code, answer.content

    async def fault(self, path: str, body: dict[str, Any]) -> str | None:
        """What is wrong with the answer to this body, None if nothing is."""
        try:
            answer = await self.ask(path, body)
        except Exception as error:  # noqa: BLE001 - of the gateway's checks, which refuse with HttpError alone
            at = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__} at the gateway: {error} ({Path(at.filename).name}, {at.name})"
        return None if answer is None else said(*answer)


# What keeps answers short, where a route has it.
SHORT_OF = {
    "/v1/chat/completions": SHORT,
    "/v1/completions": SHORT,
    "/v1/responses": {"max_output_tokens": 3},
    "/v1/messages": SHORT,
}


def said(status: int, body: bytes) -> str | None:
    from appliance.gateway.core import errors

    if status < 400:
        failed = body.find(b'data: {"error"')
        if failed < 0:
            return None
        body = body[failed + 6 :].split(b"\n", 1)[0]
        code = orjson.loads(body)["error"].get("code")
        status = code if isinstance(code, int) else 500
    error = errors.from_upstream(status, body)
    if status >= 500 or INNER.search(error.message) or len(error.message) > 2500:
        return f"{status}: {error.message[:300]}"
    return None


async def endings(app: Any) -> list[str]:
    """Streams of every API end with vLLM's error object once their core has died; the gateway turns it into theirs."""
    import httpx

    found = []
    state = app.app.state
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://engine", timeout=20
    )
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [USER]},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": [USER], "max_tokens": 9},
    }
    for path, body in asked.items():
        state.core.dies = True
        answer = await client.post(path, json={"model": "starter", "stream": True} | body)
        state.revive()
        *before, last = [one for one in answer.text.split("\n\n") if one and one != "data: [DONE]"]
        if not (before and last.startswith('data: {"error"') and "EngineCore" in last):
            found.append(f"{path} ends with {last[:300]!r} when the core dies, after {len(before)} events")
    return found


# One of each place where a form stands.
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": [USER], "response_format": FORMAT}),
    ("/v1/chat/completions", {"messages": [USER], "structured_outputs": {"json": OTHER_SCHEMA}}),
    ("/v1/chat/completions", {"messages": [USER], "structured_outputs": {"regex": "[ab]{2}(c|d)+"}, "n": 2}),
    ("/v1/completions", {"prompt": ["a", "b"], "structured_outputs": {"choice": ["yes", "no"]}}),
    ("/v1/responses", {"input": "a", "text": {"format": FORMAT["json_schema"] | {"type": "json_schema"}}}),
    ("/v1/messages", {"messages": [USER], "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
)


async def unfollowed(engine: Engine) -> list[str]:
    """What is wrong with the answers to forms that cost too much to follow: 400, and in streams as their last event."""
    from serve.forms import grammars
    from serve.vllm.frontend import UNFOLLOWED

    found = []
    most_s, grammars.MOST_BEYOND_S = grammars.MOST_BEYOND_S, -1.0
    for path, body in FORMS:
        for stream in (False, True):
            answer = await engine.ask(path, body | {"stream": stream})
            if answer is None or (answer[0] != 400 and not stream):
                found.append(f"{path} {body}: expected 400 for a form that costs too much, not {answer}")
            elif UNFOLLOWED.encode() not in answer[1] or said(*answer) is not None:
                found.append(f"{path} {body}: its answer does not name the form: {answer[1][-400:]!r}")
    grammars.MOST_BEYOND_S = most_s
    return found


async def faults(root: Path, seed: int, share: float, pairs: int) -> list[str]:
    """One text for each kind of fault found. share: how many of the changes are tried; pairs: changes of two places at
    once, for each request."""
    from appliance.gateway.core.routes import resolve
    from appliance.gateway.requests.fields import FIELDS
    from tests.e2e import coreless_engine

    chance = random.Random(seed)
    found: dict[str, str] = {}
    engines = {
        task: Engine(await coreless_engine.application(coreless_engine.spec(root, task), seed), "starter")
        for task in ("generate", "embed")
    }
    found |= {ending: ending for ending in await endings(engines["generate"].app)}
    found |= {one: one for one in await unfollowed(engines["generate"])}
    for path, body in KNOWN:
        answer = await engines["generate"].ask(path, body)
        if answer is not None and (answer[0] != 400 or said(*answer) is not None):
            found[path + repr(body)] = f"{path} {orjson.dumps(body).decode()}: expected 400, not {answer}"
    for path, requests in REQUESTS.items():
        engine = engines["embed" if path == "/v1/embeddings" else "generate"]
        fields = sorted(FIELDS[resolve(b"POST", path.encode()).name])
        for body in requests:
            for one in changes(body, fields if body is requests[0] else [], chance, share, pairs):
                fault = await engine.fault(path, one)
                if fault is not None:
                    kind = re.sub(r"[0-9]+", "N", f"{path} {fault}"[:110])
                    found.setdefault(kind, f"{path} {fault} {orjson.dumps(one).decode()[:1500]}")
    for task, engine in engines.items():
        # 22 % of the embeddings' bodies pass, now that the gateway says itself which encodings there are.
        if engine.passed * 8 < engine.tried:
            found[task] = f"of {engine.tried} bodies only {engine.passed} passed the gateway: the scan looks at little"
    return list(found.values())


def main(lifeline: Lifeline, args: dict[str, Any]) -> int:
    """Reports `{"event": "fuzz", "faults": [...]}`."""
    logging.disable(logging.CRITICAL)
    lifeline.emit("fuzz", faults=asyncio.run(faults(Path(args["root"]), args["seed"], args["share"], args["pairs"])))
    return 0
