"""Bodies that would hurt an engine never reach one."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import resolve
from appliance.gateway.requests.request_check import check_body, check_length
from tests.front.request_samples import REQUESTS, changed, places

from .conftest import Box, chat

LIMITS = Limits()
CHAT = resolve(b"POST", b"/v1/chat/completions")
COMPLETIONS = resolve(b"POST", b"/v1/completions")
RESPONSES = resolve(b"POST", b"/v1/responses")
MESSAGES = resolve(b"POST", b"/v1/messages")
EMBEDDINGS = resolve(b"POST", b"/v1/embeddings")

HEAD = '{"model": "m", "messages": [{"role": "user", "content": "hi"}], '


def _image(url: Any) -> str:
    part = {"type": "image_url", "image_url": url if isinstance(url, dict) else {"url": url}}
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]}).decode()


BAD: dict[str, tuple[str, str | None]] = {
    "not JSON": ("{", None),
    "an array": ("[]", None),
    "200 deep": (HEAD + '"documents": ' + "[" * 200 + "]" * 200 + "}", None),
    "30-digit integer": (HEAD + '"seed": ' + "9" * 30 + "}", "seed"),
    "nested 1e999": (HEAD + '"logit_bias": {"1": 1e999}}', None),
    "temperature as text": (HEAD + '"temperature": "1"}', "temperature"),
    "n 0": (HEAD + '"n": 0}', "n"),
    "prompt_logprobs all": (HEAD + '"prompt_logprobs": -1}', "prompt_logprobs"),
    "seed without a next one": (HEAD + f'"seed": {(1 << 63) - 1}' + "}", "seed"),
    "max_completion_tokens 2^64": (HEAD + f'"max_completion_tokens": {1 << 64}' + "}", "max_completion_tokens"),
    "chat_template by escape": (HEAD + '"chat\\u005ftemplate": "{{ x }}"}', "chat_template"),
    "upper-case scheme": (_image("HTTP://a/"), "image_url"),
    "data URL that is not an image": (_image("data:text/html,x"), "image_url"),
    "short form without type": (
        '{"model":"m","messages":[{"role":"user","content":[{"image_url":"http://x"}]}]}',
        "messages[0].content[0]",
    ),
    "key spelt with an escape": (
        '{"model":"m","messages":[{"role":"user","content":[{"type":"x","image\\u005furl":"http://x"}]}]}',
        "image_url",
    ),
    "no model": ('{"messages": []}', "model"),
    "model is a number": ('{"model": 3, "messages": []}', "model"),
    "no messages": ('{"model": "m", "messages": []}', "messages"),
    "stream as text": (HEAD + '"stream": "true"}', "stream"),
}


async def test_bad_bodies_get_400_and_the_engine_never_hears_of_them(box: Box) -> None:
    wire = await box.connect()
    for body, param in BAD.values():
        data = body.encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-test-all\r\n"
        await wire.send(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        response = await wire.response()
        assert response.status == 400
        assert response.error["param"] == param
    assert box.engines["e0"].requests == []
    await wire.send(head.encode() + b"Content-Length: 57\r\n\r\n" + orjson.dumps(chat()))
    assert (await wire.response()).status == 200


def test_other_routes_have_their_own_inputs() -> None:
    def refused(route: Any, data: dict[str, Any]) -> str | None:
        with pytest.raises(HttpError) as caught:
            check_body(route, orjson.dumps({"model": "m", **data}), LIMITS)
        return caught.value.param

    assert refused(COMPLETIONS, {"prompt": None}) == "prompt"
    assert refused(COMPLETIONS, {"prompt": ["x"] * 257}) == "n"
    assert refused(COMPLETIONS, {"prompt": ["x"] * 10, "n": 30}) == "n"
    assert refused(COMPLETIONS, {"prompt": "x", "logprobs": 1_000_000}) == "logprobs"
    assert refused(EMBEDDINGS, {"input": ["x"] * 2049}) == "input"
    assert refused(EMBEDDINGS, {"input": []}) == "input"
    assert refused(RESPONSES, {"input": 3}) == "input"
    assert refused(RESPONSES, {"input": "x", "tools": [{"type": "mcp", "server_url": "http://x"}]}) == "tools[0]"
    source = {"type": "url", "url": "http://x"}
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    assert refused(MESSAGES, {"messages": [message], "max_tokens": 5}) == "source.url"


GOOD = [
    (CHAT, chat()),
    (CHAT, chat(stream=True, n=2, temperature=0, top_p=1, max_tokens=1, logprobs=True, top_logprobs=20, seed=-1)),
    (
        CHAT,
        chat(
            stream=None, temperature=None, n=None, max_completion_tokens=4096, chat_template_kwargs={"thinking": False}
        ),
    ),
    (CHAT, chat(user="see https://example.org/image_url and \\u0041", stop=["a"])),
    (CHAT, orjson.loads(_image("data:image/png;base64,iVBORw0KGgo="))),
    (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"image_url": {"type": "string"}}}}]),
    ),
    (COMPLETIONS, {"model": "m", "prompt": [1, 2, 3], "logprobs": 5}),
    (COMPLETIONS, {"model": "m", "prompt": [[1], [2]], "n": 2}),
    (EMBEDDINGS, {"model": "m", "input": ["x"] * 2048}),
    (RESPONSES, {"model": "m", "input": "x", "max_output_tokens": 10}),
    (MESSAGES, {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
]


@pytest.mark.parametrize(("route", "data"), GOOD)
def test_good_bodies_pass(route: Any, data: dict[str, Any]) -> None:
    checked = check_body(route, orjson.dumps(data), LIMITS)
    assert checked.model == "m" and checked.stream is bool(data.get("stream")) and checked.tokens > 0


@pytest.mark.parametrize("place", ["part", "part without data", "odd part", "inner", "embeddings", "responses"])
def test_no_part_names_what_an_engine_keeps_of_pictures(place: str) -> None:
    """vLLM caches a picture under its part's `uuid` for all owners."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}, "uuid": "badge"}
    if place == "part without data":
        part["image_url"] = None
    elif place == "odd part":
        part["type"] = "image_embeds"
    elif place == "inner":
        part = {"type": "tool_result", "tool_use_id": "t", "content": [part]}
    message = {"role": "user", "content": [part]}
    route, data = CHAT, {"messages": [message]}
    if place == "embeddings":
        route = EMBEDDINGS
    elif place == "responses":
        route, data = RESPONSES, {"input": [message]}
    with pytest.raises(HttpError) as caught:
        check_body(route, orjson.dumps({"model": "m", **data}), LIMITS)
    assert caught.value.code == "unsupported_parameter" and "`uuid`" in str(caught.value.message)


@pytest.mark.parametrize(
    ("route", "more", "fits"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 2000}]}, False),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 1000}]}, True),
        (COMPLETIONS, {"prompt": "x" * 2000}, False),
        (COMPLETIONS, {"prompt": "x" * 20_000, "truncate_prompt_tokens": 5}, True),
        (COMPLETIONS, {"prompt": [[7] * 500] * 5}, True),
        (EMBEDDINGS, {"input": ["x" * 1000, "x" * 2000]}, False),
        (RESPONSES, {"input": "x" * 2000, "truncation": "auto"}, True),
    ],
)
def test_a_prompt_that_cannot_fit_into_the_context_is_refused(route: Any, more: dict[str, Any], fits: bool) -> None:
    checked = check_body(route, orjson.dumps({"model": "m", **more}), LIMITS)
    if fits:
        check_length(checked, 100)
        return
    with pytest.raises(HttpError) as caught:
        check_length(checked, 100)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_call_with_a_url_among_its_arguments_is_not_remote_media() -> None:
    use = {"type": "tool_use", "id": "c", "name": "show", "input": {"image_url": "https://example.org/a.png"}}
    data = {"model": "m", "max_tokens": 5, "messages": [{"role": "assistant", "content": [use]}]}
    check_body(MESSAGES, orjson.dumps(data), LIMITS)


@pytest.mark.parametrize("route", [path for path in REQUESTS if resolve(b"POST", path.encode())])
def test_a_value_of_any_kind_at_any_place_is_refused_or_passed(route: str) -> None:
    found = resolve(b"POST", route.encode())
    for body in (*REQUESTS[route], {"messages": [{"role": "user", "content": "a"}]}):
        for place in places(body):
            for odd in (None, True, 0, -1.5, 1 << 70, "", "\x00", [], [[]], {}, {"a": []}):
                try:
                    check_body(found, json.dumps({"model": "m", **changed(body, place, odd)}).encode(), LIMITS)
                except HttpError as error:
                    assert error.status == 400
                except (TypeError, ValueError) as error:
                    pytest.fail(f"{place} = {odd!r}: {error!r}")


@pytest.mark.parametrize("name", ["chat_template", "max_length", "padding", "return_tensors", "tokenize", "truncation"])
def test_arguments_of_rendering_do_not_come_as_variables_of_a_template(name: str) -> None:
    with pytest.raises(HttpError) as caught:
        check_body(CHAT, (HEAD + f'"chat_template_kwargs": {{"{name}": true}}}}').encode(), LIMITS)
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("value", ['{"a": 1}', "[1]", "131073", "-131073"])
def test_a_templates_variables_are_plain_and_small(value: str) -> None:
    with pytest.raises(HttpError) as caught:
        check_body(CHAT, (HEAD + f'"chat_template_kwargs": {{"thinking_budget": {value}}}}}').encode(), LIMITS)
    assert caught.value.param == "chat_template_kwargs"
