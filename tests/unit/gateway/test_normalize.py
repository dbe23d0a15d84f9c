"""The gateway converts requests of clients into requests that engines understand."""

from typing import Any

import orjson
import pytest

from appliance.gateway.core.routes import Route
from appliance.gateway.requests.normalize import IGNORED_ITEMS, IGNORED_TOOLS, normalize_items

from .test_request_check import CHAT, MESSAGES, RESPONSES, check, refusal

Body = dict[str, Any]
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SHELF = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
FUNCTION: dict[Route, Body] = {
    CHAT: {"type": "function", "function": {"name": "shelf", "parameters": SHELF}},
    RESPONSES: {"type": "function", "name": "shelf", "parameters": SHELF},
    MESSAGES: {"name": "shelf", "input_schema": SHELF},
}
SERVERS_OWN: dict[Route, list[tuple[Body, str]]] = {
    CHAT: [({"type": "custom", "custom": {"name": "patch"}}, "custom:patch"), ({"type": "web_search"}, "web_search")],
    RESPONSES: [
        ({"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark"}}, "custom:patch"),
        ({"type": "web_search_preview"}, "web_search_preview"),
        ({"type": "mcp", "server_label": "store", "server_url": "https://x"}, "mcp:store"),
    ],
    MESSAGES: [
        ({"type": "web_search_20250305", "name": "web_search"}, "web_search_20250305:web_search"),
        ({"type": "bash_20250124", "name": "bash"}, "bash_20250124:bash"),
        ({"type": "mcp_toolset", "mcp_server_name": "s"}, "mcp_toolset"),
    ],
}
CASES = [(api, tool, name) for api, tools in SERVERS_OWN.items() for tool, name in tools]


def read(route: Route, **more: Any) -> Body:
    """Return the body that an engine would receive for this request."""
    return check(route, **more).data


# --- tools


@pytest.mark.parametrize(("api", "tool", "name"), CASES)
def test_tools_run_by_servers_are_dropped_or_rejected(api: Route, tool: Body, name: str) -> None:
    found = check(api, tools=[tool, FUNCTION[api]])
    assert found.data["tools"] == [FUNCTION[api]]
    assert list(found.ignored) == [(IGNORED_TOOLS, name.encode())]
    error = refusal(api, tools=[tool])
    assert (error.code, error.param) == ("unsupported_tool", "tools[0]") and f"'{name}'" in error.message


def test_namespace_tools_and_freeform_tools_are_kept() -> None:
    custom = {"type": "custom", "name": "x"}
    space = {"type": "namespace", "name": "store", "tools": [{"type": "function", "name": "bell"}, custom]}
    free = {"type": "custom", "name": "note", "format": {"type": "text"}}
    found = check(RESPONSES, tools=[space, free, {"type": "custom", "name": "memo"}])
    assert [tool["name"] for tool in found.data["tools"]] == ["store", "note", "memo"]
    assert found.data["tools"][0]["tools"] == [{"type": "function", "name": "bell", "parameters": NOTHING}]
    assert list(found.ignored) == [(IGNORED_TOOLS, b"store.custom:x")]
    error = refusal(RESPONSES, tools=[{**space, "tools": [custom]}])
    assert (error.code, error.param) == ("unsupported_tool", "tools[0]")


def test_empty_list_of_tools_is_removed() -> None:
    for api, more in (
        (CHAT, {"tools": [], "tool_choice": "auto"}),
        (RESPONSES, {"tools": [], "tool_choice": "none"}),
        (RESPONSES, {"tools": [{"type": "web_search"}], "tool_choice": "none"}),
        (MESSAGES, {"tools": []}),
        (MESSAGES, {"tools": [], "tool_choice": {"type": "auto"}}),
    ):
        assert not {"tools", "tool_choice"} & read(api, **more).keys()


@pytest.mark.parametrize("schema", [None, {}, {"type": "object"}])
def test_tools_without_parameters_get_empty_object_schema(schema: Any) -> None:
    bell = {"name": "bell", "parameters": schema}
    for body in (read(CHAT, tools=[{"type": "function", "function": bell}]), read(CHAT, functions=[bell])):
        assert body["tools"][0]["function"]["parameters"] == NOTHING
    assert read(RESPONSES, tools=[{"type": "function", **bell}])["tools"][0]["parameters"] == NOTHING


def test_allowed_tools_drop_all_other_tools() -> None:
    other = {"type": "function", "function": {"name": "bell", "parameters": SHELF}}
    chosen = {"mode": "required", "tools": [{"type": "function", "function": {"name": "bell"}}]}
    tools = [FUNCTION[CHAT], other]
    body = read(CHAT, tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": chosen})
    (kept,) = body["tools"]
    assert kept["function"]["name"] == "bell" and body["tool_choice"] == "required"
    shelf = {"type": "function", "name": "shelf"}
    both = {"type": "allowed_tools", "mode": "auto", "tools": [shelf, {"type": "shell"}]}
    body = read(RESPONSES, tools=[FUNCTION[RESPONSES], {"type": "shell"}], tool_choice=both)
    assert body["tools"] == [FUNCTION[RESPONSES]] and body["tool_choice"] == "auto"
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "nope"}]}
    assert refusal(RESPONSES, tools=[FUNCTION[RESPONSES]], tool_choice=allowed).param == "tool_choice"


def test_schema_of_tools_is_enforced_only_for_required_calls() -> None:
    shelf = {"type": "function", "name": "shelf"}
    for api, choice, enforced in (
        (CHAT, "required", True),
        (CHAT, {"type": "function", "function": {"name": "shelf"}}, True),
        (RESPONSES, shelf, True),
        (MESSAGES, {"type": "any"}, True),
        (MESSAGES, {"type": "tool", "name": "shelf"}, True),
        (CHAT, "auto", False),
        (RESPONSES, "auto", False),
        (MESSAGES, {"type": "auto"}, False),
    ):
        (tool,) = read(api, tools=[FUNCTION[api]], tool_choice=choice)["tools"]
        assert tool.get("function", tool).get("strict", False) is enforced


# --- history of /v1/responses


def items(*given: Body) -> tuple[list[Body], list[str]]:
    left_out: list[str] = []
    return normalize_items(list(given), left_out), left_out


def test_items_assistant_message_joins_all_text_parts() -> None:
    parts = [{"type": "output_text", "text": "One. "}, {"type": "refusal", "refusal": "No."}]
    (made,), left_out = items({"type": "message", "role": "assistant", "content": parts})
    assert made == {"role": "assistant", "content": "One. No."} and not left_out


def test_items_reasoning_keeps_summary_and_drops_encrypted() -> None:
    summary = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
    made, left_out = items(
        {"type": "reasoning", "summary": summary, "encrypted_content": "gAAA"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
    )
    assert [item["content"] for item in made] == [[{"type": "reasoning_text", "text": "a\n\nb"}]]
    assert "encrypted_content" not in made[0] and left_out == ["reasoning"]


def test_items_unsupported_are_reported_or_rejected_by_index() -> None:
    call = {"type": "web_search_call", "id": "w1", "action": {"type": "search", "query": "x"}}
    found = check(RESPONSES, input=[{"role": "user", "content": "Hi"}, call, call])
    assert list(found.ignored) == [(IGNORED_ITEMS, b"web_search_call")]
    for kind in ("item_reference", "compaction_trigger"):
        error = refusal(RESPONSES, input=[{"role": "user", "content": "Hi"}, {"type": kind, "id": "msg_1"}])
        assert (error.code, error.param) == ("unsupported_item", "input[1]")


# --- fields


def test_fields_unknown_to_engines_are_removed() -> None:
    included = ["web_search_call.action.sources", "reasoning.encrypted_content"]
    body = read(RESPONSES, client_metadata={"x-codex-installation-id": "0"}, include=included)
    assert body == {"model": "m", "input": "x", "include": ["reasoning.encrypted_content"]}
    greedy = read(CHAT, top_p=0, temperature=0.8)
    assert (greedy["temperature"], greedy["top_p"]) == (0, 1)


def test_format_reads_schema_from_each_field() -> None:
    for form in (
        {"type": "json_object", "schema": SHELF},
        {"type": "json_object", "json_schema": {"name": "a", "schema": SHELF}},
        {"type": "json_schema", "schema": SHELF},
    ):
        wanted = read(CHAT, response_format=form)["response_format"]
        assert wanted["type"] == "json_schema" and wanted["json_schema"]["schema"] == SHELF
        text = read(RESPONSES, text={"format": {**form, "type": "json_object"}, "verbosity": "low"})["text"]
        assert (text["format"]["type"], text["format"]["schema"]) == ("json_schema", SHELF)
        assert text["verbosity"] == "low"
    assert read(CHAT, guided_json=SHELF)["structured_outputs"] == {"json": SHELF}


# --- messages


def test_blocks_documents_become_text_and_server_tools_are_reported() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    result = {"type": "search_result", "source": "https://x", "title": "W", "content": [{"type": "text", "text": "R"}]}
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}
    asked = [{"role": "user", "content": [document, result]}, {"role": "assistant", "content": [search]}]
    found = check(MESSAGES, messages=asked)
    assert [block["text"] for block in found.data["messages"][0]["content"]] == ["T\nD", "W\nhttps://x\nR"]
    assert found.data["messages"][1]["content"] == [{"type": "text", "text": ""}]
    assert list(found.ignored) == [(IGNORED_ITEMS, b"server_tool_use")]
    document["source"] = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    error = refusal(MESSAGES, messages=asked)
    assert (error.code, error.param) == ("unsupported_document", "messages[0].content[0]")


@pytest.mark.parametrize("content", [{"x": 1}, ["a"]])
def test_messages_structured_tool_result_becomes_json_text(content: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "a", "content": content}
    body = read(CHAT, messages=[{"role": "assistant", "content": None, "tool_calls": [call]}, result])
    assert orjson.loads(body["messages"][1]["content"]) == content
    parts = result | {"content": [{"type": "text", "text": "b"}]}
    assert check(CHAT, messages=[parts]).data["messages"] == [parts]


# --- estimated tokens of a request, and the id of its conversation


def test_check_charges_same_tokens_for_images_of_any_byte_size() -> None:
    data = "A" * 400_000
    url, source = f"data:image/png;base64,{data}", {"type": "base64", "media_type": "image/png", "data": data}
    for api, part in (
        (CHAT, {"type": "image_url", "image_url": {"url": url}}),
        (MESSAGES, {"type": "image", "source": source}),
        (RESPONSES, {"type": "input_image", "image_url": url}),
    ):
        asked = {"input" if api is RESPONSES else "messages": [{"role": "user", "content": [part]}]}
        assert 1024 <= check(api, **asked).prompt_tokens < 1200


SYSTEM = {"role": "system", "content": "You help. " * 2000}


def turns(first: str, **more: Any) -> list[bytes]:
    """Return the conversation ids of a request with one message and of the same conversation two messages later."""
    start = [SYSTEM, {"role": "user", "content": first}]
    grown = [*start, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    return [check(CHAT, messages=messages, **more).conversation for messages in (start, grown)]


def test_check_conversation_id_depends_on_whole_first_question() -> None:
    long = "x" * 5000
    one, two = turns(f"{long} one"), turns(f"{long} two")
    assert one[0] == one[1] != two[0] == two[1]
    assert turns("Hi", user="a")[0] != turns("Hi", user="b")[0] == turns("Hi", user="b")[1]
