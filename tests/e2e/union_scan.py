"""What the gateway lets through is never held against many of the engine's types, tried with vLLM's own request models.

Every field of every route, of a message, a part, an item, a tool and a form is given many values of kinds that may not
belong there. What the gateway refuses costs nothing; what it passes may have few mismatches, because the engine writes
each down on the loop that sends everybody's tokens (13 µs each). Attackers found this class three times by hand.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

MANY = 3000
MOST_ERRORS = 5000
KINDS: dict[str, Any] = {
    "numbers": [1] * MANY,
    "negative numbers": [-1] * MANY,
    "fractions": [1.5] * MANY,
    "a number, then texts": [1, *["a"] * MANY],
    "nulls": [None] * MANY,
    "texts": ["a"] * MANY,
    "lists": [[1.5]] * MANY,
    "objects": [{}] * MANY,
    "objects with a type": [{"type": "x", "id": 1, "content": [1]}] * MANY,
    "an object of numbers": {str(n): 1 for n in range(MANY)},
    "an object of lists": {str(n): [1] for n in range(MANY)},
}
MESSAGE = {"role": "user", "content": "a"}
BASES: dict[str, dict[str, Any]] = {
    "chat.completions": {"messages": [MESSAGE]},
    "completions": {"prompt": "a"},
    "responses": {"input": "a"},
    "messages": {"messages": [MESSAGE], "max_tokens": 1},
    "embeddings": {"input": "a"},
}
PATHS = {
    "chat.completions": b"/v1/chat/completions",
    "completions": b"/v1/completions",
    "responses": b"/v1/responses",
    "messages": b"/v1/messages",
    "embeddings": b"/v1/embeddings",
}
IN_MESSAGE = (
    "role",
    "content",
    "name",
    "tool_calls",
    "audio",
    "function_call",
    "refusal",
    "tools",
    "task",
    "annotations",
)
IN_PART = (
    "text",
    "image_url",
    "source",
    "input",
    "content",
    "tool_use_id",
    "name",
    "citations",
    "cache_control",
    "detail",
)
IN_ITEM = ("id", "status", "content", "summary", "output", "arguments", "tools", "results", "action", "logprobs")
IN_TOOL = (
    "name",
    "description",
    "parameters",
    "input_schema",
    "function",
    "filters",
    "allowed_tools",
    "tools",
    "headers",
)
IN_FORM = ("type", "triggers", "structures", "format", "json_schema", "name")
PART_TYPES = (
    "text",
    "image_url",
    "tool_use",
    "tool_result",
    "input_text",
    "output_text",
    "thinking",
    "refusal",
    "file",
)


def bodies(route: str, fields: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what it is, body)"""
    base = BASES[route]
    for kind, value in KINDS.items():
        for field in fields:
            yield f"{field} of {kind}", base | {field: value}
        few = value[: MANY // 10] if isinstance(value, list) else value
        holder = "input" if route == "responses" else "messages"
        if holder == "messages" and "messages" not in fields:
            continue
        for name in IN_MESSAGE if holder == "messages" else (*IN_ITEM, *IN_MESSAGE):
            yield f"{name} of a message: {kind}", base | {holder: [MESSAGE | {name: value}]}
            yield (
                f"{name} of messages: {kind}",
                base | {holder: [MESSAGE | {name: few[:2] if few is not value else 1}] * 1000},
            )
        for name in IN_PART:
            for part_type in PART_TYPES:
                part = {"type": part_type, "text": "a", name: value}
                yield f"{name} of a {part_type}: {kind}", base | {holder: [MESSAGE | {"content": [part]}]}
        if "tools" in fields:
            for name in IN_TOOL:
                tool = {"type": "function", "name": "f", "function": {"name": "f"}, "input_schema": {"type": "object"}}
                yield f"{name} of a tool: {kind}", base | {"tools": [tool | {name: value}]}
                yield (
                    f"{name} of a tool's function: {kind}",
                    base | {"tools": [tool | {"function": {"name": "f", name: value}}]},
                )
                yield (
                    f"{name} of a choice: {kind}",
                    base | {"tools": [tool], "tool_choice": {"type": "function", name: value}},
                )
        for form in ("response_format", "structured_outputs"):
            if form in fields:
                for name in IN_FORM:
                    yield f"{name} of {form}: {kind}", base | {form: {"type": "json_schema", name: value}}
        if "text" in fields:
            for name in IN_FORM:
                yield f"{name} of text: {kind}", base | {"text": {"format": {"type": "text", name: value}}}


def scan(every: int) -> Iterator[tuple[str, bool]]:
    """(what was tried, whether it held). every: one of so many bodies is tried."""
    from itertools import islice

    import orjson
    from pydantic import TypeAdapter, ValidationError
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.exceptions import VLLMError

    from appliance.gateway.core.config import Limits
    from appliance.gateway.core.errors import HttpError
    from appliance.gateway.core.routes import resolve
    from appliance.gateway.requests.fields import FIELDS
    from appliance.gateway.requests.request_check import check_body
    from serve.api import request_faults
    from serve.api.application import EmbeddingBody

    models = {
        "chat.completions": ChatCompletionRequest,
        "completions": CompletionRequest,
        "responses": ResponsesRequest,
        "messages": AnthropicMessagesRequest,
        "embeddings": EmbeddingBody,
    }
    tried, passed = 0, 0
    for route, model in models.items():
        adapter, path = TypeAdapter(model), resolve(b"POST", PATHS[route])
        for what, body in islice(bodies(route, sorted(FIELDS[route])), 0, None, every):
            tried += 1
            asked = orjson.dumps({"model": "m"} | body)
            try:
                read = check_body(path, asked, Limits()).data
            except HttpError:
                continue
            passed += 1
            try:
                adapter.validate_python(read)
            except ValidationError as error:
                if error.error_count() > MOST_ERRORS:
                    yield f"{route}: {what} passes the gateway and has {error.error_count()} mismatches", False
            except Exception as error:  # noqa: BLE001 - judged
                if not isinstance(request_faults.of_request(error), VLLMError):
                    yield f"{route}: {what} passes the gateway and is {error!r}", False
    tokens = {"model": "m", "input": [1] * 100_000}
    began_s = time.monotonic()
    TypeAdapter(EmbeddingBody).validate_python(tokens)
    yield "tokens are not read as messages, too", time.monotonic() - began_s < 1
    yield (
        f"of {tried} bodies {passed} passed the gateway: the scan looks at something",
        tried * every > 2000 and passed * every > 100,
    )
