"""Whole requests of every route, and changes of them in one place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

IMAGE = "data:image/png;base64,iVBORw0KGgo="
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 1, "pattern": "a+"}, "b": {"$ref": "#/$defs/c"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"c": {"anyOf": [{"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 3}, {}]}},
}
USER = {"role": "user", "content": "a"}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
ITEM_TOOL = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CLAUDE_TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}

REQUESTS: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": (
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "t"}], "name": "ann"},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]},
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "r"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning": "b"},
                USER,
            ],
            "tools": [CHAT_TOOL, {"type": "function", "function": {"name": "g"}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
        },
        {"messages": [USER], "response_format": FORMAT, "tools": [CHAT_TOOL], "tool_choice": "required"},
        {"messages": [USER], "structured_outputs": {"json": SCHEMA}},
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
            "min_tokens": 1,
            "frequency_penalty": 0.1,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": False},
            "chat_template_kwargs": {"enable_thinking": False},
            "documents": [{"title": "t", "text": "u"}],
            "reasoning_effort": "low",
            "metadata": {"a": "b"},
            "prompt_logprobs": 1,
            "truncate_prompt_tokens": 5,
            "cache_salt": "s",
        },
    ),
    "/v1/completions": (
        {"prompt": "a", "n": 2, "best_of": 2, "echo": True, "logprobs": 1, "suffix": "", "seed": 1},
        {"prompt": ["a", "b"], "response_format": FORMAT, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": [[15, 16], [17]], "structured_outputs": {"json": SCHEMA}, "stop": "x", "logit_bias": {"5": 1}},
    ),
    "/v1/responses": (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1"},
                {"type": "function_call_output", "call_id": "c", "output": "o"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
            ],
            "instructions": "i",
            "tools": [ITEM_TOOL],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        },
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
        {
            "input": "a",
            "structured_outputs": {"json": SCHEMA},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
            "prompt": {"id": "p"},
            "context_management": [{"type": "compaction", "compact_threshold": 5}],
            "stream_options": {"include_obfuscation": False},
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
                        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]},
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
                        },
                    ],
                },
            ],
            "system": [{"type": "text", "text": "s"}],
            "tools": [CLAUDE_TOOL],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "metadata": {"user_id": "u"},
            "stop_sequences": ["x"],
        },
        {"messages": [USER], "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}},
        {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 1024}, "system": "s"},
        {"messages": [USER], "output_format": {"type": "json_schema", "schema": SCHEMA}},
    ),
    "/v1/embeddings": (
        {"input": ["a", "b"], "encoding_format": "base64", "truncate_prompt_tokens": 5, "dimensions": None},
        {"input": [[15, 16]], "add_special_tokens": False, "embed_dtype": "float32", "endianness": "native"},
        {"messages": [USER], "add_generation_prompt": False, "chat_template_kwargs": {"a": "b"}},
    ),
}
REQUESTS["/v1/responses/input_tokens"] = REQUESTS["/v1/responses"][:1]
REQUESTS["/v1/messages/count_tokens"] = REQUESTS["/v1/messages"][:2]


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
    holder[place[-1]] = value
    return made
