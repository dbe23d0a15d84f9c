"""Requests in the forms that clients send become those that engines read."""

from __future__ import annotations

import base64
import io
from typing import Any

import orjson
import pytest

from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import resolve
from appliance.gateway.requests.normalize import IGNORED_ITEMS, IGNORED_TOOLS, normalize_items
from appliance.gateway.requests.request_check import Checked, check_body

Body = dict[str, Any]
PATHS = {"chat": b"/v1/chat/completions", "responses": b"/v1/responses", "messages": b"/v1/messages"}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SHELF = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
FUNCTION: dict[str, Body] = {
    "chat": {"type": "function", "function": {"name": "shelf", "parameters": SHELF}},
    "responses": {"type": "function", "name": "shelf", "parameters": SHELF},
    "messages": {"name": "shelf", "input_schema": SHELF},
}
SERVERS_OWN: dict[str, list[tuple[Body, str]]] = {
    "chat": [({"type": "custom", "custom": {"name": "patch"}}, "custom:patch"), ({"type": "web_search"}, "web_search")],
    "responses": [
        ({"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark"}}, "custom:patch"),
        ({"type": "web_search_preview"}, "web_search_preview"),
        ({"type": "mcp", "server_label": "store", "server_url": "https://x"}, "mcp:store"),
    ],
    "messages": [
        ({"type": "web_search_20250305", "name": "web_search"}, "web_search_20250305:web_search"),
        ({"type": "bash_20250124", "name": "bash"}, "bash_20250124:bash"),
        ({"type": "mcp_toolset", "mcp_server_name": "s"}, "mcp_toolset"),
    ],
}
CASES = [(api, tool, name) for api, tools in SERVERS_OWN.items() for tool, name in tools]


def checked(api: str, **more: Any) -> Checked:
    body: Body = {"model": "m"}
    if api == "responses":
        body |= {"input": "Hi"}
    else:
        body |= {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    return check_body(resolve(b"POST", PATHS[api]), orjson.dumps(body | more), Limits())


def read(api: str, **more: Any) -> Body:
    """The body that an engine gets."""
    return checked(api, **more).data


def refused(api: str, **more: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        checked(api, **more)
    assert caught.value.status == 400
    return caught.value


# --- tools


@pytest.mark.parametrize(("api", "tool", "name"), CASES)
def test_tool_of_another_server_beside_a_function_is_left_out_and_named(api: str, tool: Body, name: str) -> None:
    found = checked(api, tools=[tool, FUNCTION[api]])
    assert found.data["tools"] == [FUNCTION[api]]
    assert list(found.ignored) == [(IGNORED_TOOLS, name.encode())]


@pytest.mark.parametrize(("api", "tool", "name"), CASES)
def test_tool_of_another_server_alone_is_refused_by_name(api: str, tool: Body, name: str) -> None:
    error = refused(api, tools=[tool])
    assert (error.code, error.param) == ("unsupported_tool", "tools[0]") and f"'{name}'" in error.message


def test_tools_left_out_whole_with_choice_none_are_no_tools() -> None:
    body = read("responses", tools=[{"type": "web_search"}], tool_choice="none")
    assert "tools" not in body and "tool_choice" not in body


@pytest.mark.parametrize(
    ("api", "tool", "choice"),
    [
        ("responses", {"type": "web_search"}, {"type": "web_search"}),
        ("responses", {"type": "web_search"}, {"type": "web_search_preview"}),
        ("messages", {"type": "bash_20250124", "name": "bash"}, {"type": "tool", "name": "bash"}),
    ],
)
def test_choice_of_a_tool_that_is_left_out_is_refused(api: str, tool: Body, choice: Body) -> None:
    error = refused(api, tools=[FUNCTION[api], tool], tool_choice=choice)
    assert (error.code, error.param) == ("unsupported_tool", "tool_choice")


def test_functions_of_a_namespace_and_free_custom_tools_stay() -> None:
    inner = {"type": "function", "name": "price", "parameters": {"type": "object", "properties": {}}}
    space = {"type": "namespace", "name": "store", "tools": [inner, {"type": "custom", "name": "x"}]}
    free = {"type": "custom", "name": "note", "format": {"type": "text"}}
    found = checked("responses", tools=[space, free, {"type": "custom", "name": "memo"}])
    kept = found.data["tools"]
    assert [tool["name"] for tool in kept] == ["store", "note", "memo"]
    assert kept[0]["tools"] == [inner | {"parameters": NOTHING}]
    assert list(found.ignored) == [(IGNORED_TOOLS, b"store.custom:x")]


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("more", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
def test_empty_list_of_tools_is_none(api: str, more: Body) -> None:
    if api == "messages" and more:
        more = {"tool_choice": {"type": more["tool_choice"]}}
    body = read(api, tools=[], **more)
    assert "tools" not in body and "tool_choice" not in body


@pytest.mark.parametrize("schema", [None, {}, {"type": "object"}])
def test_tool_without_parameters_takes_an_empty_object(schema: Any) -> None:
    body = read("chat", tools=[{"type": "function", "function": {"name": "bell", "parameters": schema}}])
    assert body["tools"][0]["function"]["parameters"] == NOTHING
    body = read("responses", tools=[{"type": "function", "name": "bell", "parameters": schema}])
    assert body["tools"][0]["parameters"] == NOTHING
    body = read("chat", functions=[{"name": "bell", "parameters": schema}])
    assert body["tools"][0]["function"]["parameters"] == NOTHING


def test_allowed_tools_are_the_only_ones() -> None:
    other = {"type": "function", "function": {"name": "bell", "parameters": SHELF}}
    chosen = {"mode": "required", "tools": [{"type": "function", "function": {"name": "bell"}}]}
    tools = [FUNCTION["chat"], other]
    body = read("chat", tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": chosen})
    (kept,) = body["tools"]
    assert kept["function"]["name"] == "bell" and body["tool_choice"] == "required"
    shelf = {"type": "function", "name": "shelf"}
    both = {"type": "allowed_tools", "mode": "auto", "tools": [shelf, {"type": "shell"}]}
    body = read("responses", tools=[FUNCTION["responses"], {"type": "shell"}], tool_choice=both)
    assert body["tools"] == [FUNCTION["responses"]] and body["tool_choice"] == "auto"
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "nope"}]}
    assert refused("responses", tools=[FUNCTION["responses"]], tool_choice=allowed).param == "tool_choice"


DEMANDS: list[tuple[str, Any]] = [
    ("chat", "required"),
    ("chat", {"type": "function", "function": {"name": "shelf"}}),
    ("responses", {"type": "function", "name": "shelf"}),
    ("messages", {"type": "any"}),
    ("messages", {"type": "tool", "name": "shelf"}),
]


@pytest.mark.parametrize(("api", "choice"), DEMANDS)
def test_demanded_call_has_its_schema_enforced(api: str, choice: Any) -> None:
    (tool,) = read(api, tools=[FUNCTION[api]], tool_choice=choice)["tools"]
    assert tool.get("function", tool)["strict"] is True


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_call_that_a_model_is_free_to_make_is_not_enforced(api: str) -> None:
    choice = {"type": "auto"} if api == "messages" else "auto"
    assert checked(api, tools=[FUNCTION[api]], tool_choice=choice).data["tools"] == [FUNCTION[api]]


# --- history of /v1/responses


def items(*given: Body) -> tuple[list[Body], list[str]]:
    left_out: list[str] = []
    return normalize_items(list(given), left_out), left_out


def test_earlier_answer_without_id_and_status_has_all_of_its_texts() -> None:
    parts = [{"type": "output_text", "text": "One. "}, {"type": "refusal", "refusal": "No."}]
    (made,), left_out = items({"type": "message", "role": "assistant", "content": parts})
    assert made == {"role": "assistant", "content": "One. No."} and not left_out


def test_thought_is_read_from_its_content_or_summary_and_named_if_encrypted() -> None:
    summary = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
    made, left_out = items(
        {"type": "reasoning", "summary": summary, "encrypted_content": "gAAA"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
    )
    assert [item["content"] for item in made] == [[{"type": "reasoning_text", "text": "a\n\nb"}]]
    assert "encrypted_content" not in made[0] and left_out == ["reasoning"]


@pytest.mark.parametrize("kind", ["item_reference", "compaction_trigger"])
def test_item_that_asks_for_what_no_engine_does_is_refused_by_place(kind: str) -> None:
    error = refused("responses", input=[{"role": "user", "content": "Hi"}, {"type": kind, "id": "msg_1"}])
    assert (error.code, error.param) == ("unsupported_item", "input[1]")


def test_items_left_out_are_named_in_a_header() -> None:
    call = {"type": "web_search_call", "id": "w1", "action": {"type": "search", "query": "x"}}
    found = checked("responses", input=[{"role": "user", "content": "Hi"}, call, call])
    assert list(found.ignored) == [(IGNORED_ITEMS, b"web_search_call")]


# --- fields


def test_fields_of_clients_that_engines_do_not_know_are_not_passed_on() -> None:
    included = ["web_search_call.action.sources", "reasoning.encrypted_content"]
    body = read("responses", client_metadata={"x-codex-installation-id": "0"}, include=included)
    assert body == {"model": "m", "input": "Hi", "include": ["reasoning.encrypted_content"]}


def test_top_p_zero_is_greedy() -> None:
    body = read("chat", top_p=0, temperature=0.8)
    assert (body["temperature"], body["top_p"]) == (0, 1)


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object", "schema": SHELF}},
        {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": SHELF}}},
        {"response_format": {"type": "json_schema", "schema": SHELF}},
    ],
)
def test_schema_beside_json_object_is_the_format(more: Body) -> None:
    wanted = read("chat", **more)["response_format"]
    assert wanted["type"] == "json_schema" and wanted["json_schema"]["schema"] == SHELF
    wanted = {**more["response_format"], "type": "json_object"}
    form = read("responses", text={"format": wanted, "verbosity": "low"})["text"]
    assert form["format"]["type"] == "json_schema" and form["format"]["schema"] == SHELF and form["verbosity"] == "low"


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_older_names_of_forms_are_understood(api: str) -> None:
    assert read(api, guided_json=SHELF)["structured_outputs"] == {"json": SHELF}
    assert read(api, guided_choice=["a", "b"])["structured_outputs"] == {"choice": ["a", "b"]}


# --- Anthropic's blocks


def test_documents_and_search_results_become_texts() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    result = {"type": "search_result", "source": "https://x", "title": "W", "content": [{"type": "text", "text": "R"}]}
    body = read("messages", messages=[{"role": "user", "content": [document, result]}])
    assert body["messages"][0]["content"] == [
        {"type": "text", "text": "T\nD"},
        {"type": "text", "text": "W\nhttps://x\nR"},
    ]


def test_blocks_of_servers_own_tools_are_left_out_and_named() -> None:
    answer = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "A"},
    ]
    found = checked("messages", messages=[{"role": "assistant", "content": answer}])
    assert found.data["messages"] == [{"role": "assistant", "content": [answer[2]]}]
    assert list(found.ignored) == [(IGNORED_ITEMS, b"server_tool_use, web_search_tool_result")]


def test_document_that_is_not_text_is_refused_by_place() -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    error = refused("messages", messages=[{"role": "user", "content": [{"type": "document", "source": source}]}])
    assert (error.code, error.param) == ("unsupported_document", "messages[0].content[0]")


@pytest.mark.parametrize("content", [{"x": 1}, ["a"]])
def test_result_that_is_data_becomes_its_json(content: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "a", "content": content}
    body = read("chat", messages=[{"role": "assistant", "content": None, "tool_calls": [call]}, result])
    assert orjson.loads(body["messages"][1]["content"]) == content
    parts = result | {"content": [{"type": "text", "text": "b"}]}
    assert checked("chat", messages=[parts]).data["messages"] == [parts]


# --- what a request counts, and whose conversation it is


def picture(width: int, height: int) -> str:
    from PIL import Image

    held = io.BytesIO()
    Image.effect_noise((width, height), 90).save(held, "PNG")
    return base64.b64encode(held.getvalue()).decode()


def test_image_counts_as_an_image_not_by_its_bytes() -> None:
    data = picture(560, 560)
    url = f"data:image/png;base64,{data}"
    chat = checked("chat", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    source = {"type": "base64", "media_type": "image/png", "data": data}
    message = checked("messages", messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])
    response = checked("responses", input=[{"role": "user", "content": [{"type": "input_image", "image_url": url}]}])
    for found in (chat, message, response):
        assert 1024 <= found.prompt_tokens < 1200 < len(data) // 4


SYSTEM = {"role": "system", "content": "You help. " * 2000}


def turns(first: str, **more: Any) -> list[bytes]:
    """The conversation of its first and of its third turn."""
    start = [SYSTEM, {"role": "user", "content": first}]
    grown = [*start, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    return [checked("chat", messages=messages, **more).conversation for messages in (start, grown)]


def test_conversation_stays_the_same_as_it_grows_and_differs_by_its_whole_first_question() -> None:
    long = "x" * 5000
    one, two = turns(f"{long} one"), turns(f"{long} two")
    assert one[0] == one[1] != two[0] == two[1]
    assert turns("Hi", user="a")[0] != turns("Hi", user="b")[0] == turns("Hi", user="b")[1]
