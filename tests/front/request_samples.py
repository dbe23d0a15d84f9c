"""Whole requests of every route, and changes of them in one place or two.

A value gives way to values of other kinds, to odd ones of its own kind, or is left out.
"""

from __future__ import annotations

import copy
import random
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
