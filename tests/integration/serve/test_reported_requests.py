"""Requests from public reports of clients that other servers refused: the gateway accepts them, and vLLM reads them.

Each names its issue or pull request.
"""

from typing import Any

import orjson
import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts

from appliance.gateway.core.config import Limits
from appliance.gateway.core.routes import resolve
from appliance.gateway.requests.request_check import check_body

Body = dict[str, Any]
USER = {"role": "user", "content": "How many boxes?"}
SCHEMA = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
CHAT_TOOL = {"type": "function", "function": {"name": "shelf", "description": None, "parameters": SCHEMA}}
TOOL = {"type": "function", "name": "shelf", "parameters": SCHEMA, "strict": False}
CALL = {"type": "function", "function": {"name": "shelf", "arguments": '{"number": 3}'}}
BELL = {"type": "function", "name": "bell", "parameters": {"type": "object", "properties": {}}}


def after_call(call_id: str | None, content: Any, **more: Any) -> list[Body]:
    asked = {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, **CALL}], **more}
    return [USER, asked, {"role": "tool", "tool_call_id": call_id, "content": content}]


def block(kind: str, **more: Any) -> Body:
    return {"type": kind, **more}


CUSTOM = {"id": "c", "type": "custom", "custom": {"name": "p", "input": "x"}}
CHAT: dict[str, Body] = {
    "sigoden/aichat 1296: ids of calls are null": {"messages": after_call(None, "14"), "tools": [CHAT_TOOL]},
    "VirtusLab/llm-tools-mcp 51: description null": {"messages": [USER], "tools": [CHAT_TOOL]},
    "vllm 10015: refusal, function_call, audio null": {
        "messages": after_call("c", "14", refusal=None, function_call=None, audio=None, annotations=[]),
        "tools": [CHAT_TOOL],
    },
    "langchain-ai/openwiki 626: lists of parts in lists": {
        "messages": [{"role": "user", "content": [[{"type": "text", "text": "x"}]]}]
    },
    "vllm 39741: tools []": {"messages": [USER], "tools": [], "tool_choice": "auto"},
    "vllm 35438: schema outside json_schema": {
        "messages": [USER],
        "response_format": {"type": "json_schema", "schema": SCHEMA},
    },
    "dynamo 13789: tool without parameters": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "bell"}}],
        "tool_choice": "required",
    },
    "result of a tool is null": {"messages": after_call("c", None), "tools": [CHAT_TOOL]},
    "custom call in the history": {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [CUSTOM]},
            {"role": "tool", "tool_call_id": "c", "content": "ok"},
        ]
    },
}
SEARCH = block("web_search_call", id="w", status="completed", action={"type": "other"})
SCREEN = {"output": {"type": "computer_screenshot", "file_id": "f"}}
NAMESPACE = block("namespace", name="functions", description="d", tools=[BELL])
RESPONSES: dict[str, Body] = {
    "openai/codex 12669: items without id": {
        "input": [
            block("message", role="developer", content=[block("input_text", text="d")]),
            block("reasoning", summary=[], content=None, encrypted_content=None),
            block("function_call", name="shelf", arguments="{}", call_id="c"),
            block("function_call_output", call_id="c", output="14"),
            block("message", role="assistant", content=[block("output_text", text="14")]),
            USER,
        ],
        "tools": [TOOL],
        "client_metadata": {"x": "y"},
    },
    "token_proxy 307: additional_tools": {
        "input": [block("additional_tools", role="developer", tools=[NAMESPACE]), USER]
    },
    "openai/codex 6945: a search of another kind": {"input": [USER, SEARCH, USER]},
    "vllm 55974: computer_call_output, mcp_call": {
        "input": [
            USER,
            block("mcp_call", id="m", name="p", server_label="s", arguments="{}", output="5"),
            block("computer_call", id="k", call_id="k", action={"type": "screenshot"}, status="completed"),
            block("computer_call_output", call_id="k", **SCREEN),
            USER,
        ]
    },
    "vllm 48237: an answer without content": {"input": [USER, block("message", role="assistant", content=[]), USER]},
    "llama.cpp 20156: tools of OpenAI's server": {
        "input": "x",
        "tools": [TOOL, block("web_search"), block("local_shell"), block("custom", name="free")],
    },
    "encrypted thoughts of another server": {
        "input": [USER, block("reasoning", id="r", summary=[], encrypted_content="gAAA"), USER],
        "include": ["reasoning.encrypted_content", "web_search_call.results"],
    },
}
SEARCHED = [
    block("server_tool_use", id="s", name="web_search", input={"query": "q"}),
    block("web_search_tool_result", tool_use_id="s", content=[]),
    block("text", text="A"),
]
MESSAGES: dict[str, Body] = {
    "claude-code 53473: empty blocks of text": {
        "messages": [{"role": "user", "content": [block("text", text=""), block("text", text="x")]}]
    },
    "claude-code 77698: server tools beside the client's": {
        "messages": [USER],
        "tools": [
            {"name": "shelf", "input_schema": SCHEMA, "eager_input_streaming": True},
            block("web_search_20250305", name="web_search", max_uses=5),
        ],
    },
    "a conversation with another server's search": {
        "messages": [USER, {"role": "assistant", "content": SEARCHED}, USER]
    },
}


def read(path: bytes, body: Body) -> Body:
    """The request body that the gateway sends to an engine."""
    written = orjson.dumps({"model": "m", **body})
    return check_body(resolve(b"POST", path), written, Limits()).data


@pytest.mark.parametrize("name", CHAT)
def test_reported_chat_request_is_accepted(name: str) -> None:
    request = ChatCompletionRequest.model_validate(read(b"/v1/chat/completions", CHAT[name]))
    for message in request.messages:  # vLLM checks calls and parts on access
        assert all(call["type"] == "function" for call in message.get("tool_calls") or ())
        assert isinstance(message.get("content"), str | None) or all(isinstance(p, dict) for p in message["content"])
    assert request.to_sampling_params(24, {}).max_tokens == 24


@pytest.mark.parametrize("name", RESPONSES)
def test_reported_response_request_is_accepted(name: str) -> None:
    request = ResponsesRequest.model_validate(read(b"/v1/responses", RESPONSES[name]))
    messages = construct_input_messages(request_instructions=None, request_input=request.input)
    assert all(message["role"] in ("user", "assistant", "developer", "tool") for message in messages)
    tools = construct_tool_dicts(request.tools, request.tool_choice) or []
    assert len(tools) >= len(request.tools)


@pytest.mark.parametrize("name", MESSAGES)
def test_reported_anthropic_request_is_accepted(name: str) -> None:
    request = AnthropicMessagesRequest.model_validate(read(b"/v1/messages", {"max_tokens": 5, **MESSAGES[name]}))
    assert AnthropicServingMessages.to_chat_completion_request(request).messages
