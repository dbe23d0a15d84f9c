"""What browsers and careless base URLs ask: the page, cross-origin requests, HEAD, one slash too many."""

from __future__ import annotations

import json

import pytest

from appliance.ui.site import CONTENT_SECURITY, site

from .conftest import Box, Start, chat, request_bytes
from .upstreams import answer_chat, gives

PAGE = "https://chat.example.org"
FROM_PAGE = f"Origin: {PAGE}\r\n"
PREFLIGHT = FROM_PAGE + (
    "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization, x-stainless-os\r\n"
)


@pytest.mark.parametrize("target", ["/v1/chat/completions", "/nowhere"])
async def test_preflight_of_a_named_page_is_answered_without_a_key(start_box: Start, target: str) -> None:
    box = await start_box(cors_origins=[PAGE])
    answer = await box.ask("OPTIONS", target, key=None, headers=PREFLIGHT)
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == PAGE and "Origin" in answer.headers["vary"]
    assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("origins", [[], ["https://other.example.org"]])
async def test_page_that_is_not_named_learns_nothing(start_box: Start, origins: list[str]) -> None:
    box = await start_box(cors_origins=origins, engine=answer_chat)
    preflight = await box.ask("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
    assert preflight.status == 405 and "access-control-allow-origin" not in preflight.headers
    answer = await box.ask("POST", "/v1/chat/completions", chat(), headers=FROM_PAGE)
    assert answer.status == 200 and "access-control-allow-origin" not in answer.headers


async def test_a_page_reads_answers_streams_and_errors(start_box: Start) -> None:
    box = await start_box(cors_origins=[PAGE], engine=answer_chat)
    await box.control(gives({"data": []}))
    for answer in (
        await box.ask("POST", "/v1/chat/completions", chat(), headers=FROM_PAGE),
        await box.ask("POST", "/v1/chat/completions", chat(stream=True), headers=FROM_PAGE),
        await box.ask("POST", "/v1/chat/completions", chat(), key=None, headers=FROM_PAGE),
        await box.ask("POST", "/v1/messages", chat("nosuch"), headers=FROM_PAGE),
        await box.ask("GET", "/v1/files", headers=FROM_PAGE),
    ):
        assert answer.headers["access-control-allow-origin"] == PAGE, answer.raw
        assert answer.headers["access-control-expose-headers"] == "*"


async def test_head_is_a_get_without_its_body_and_needs_what_that_needs(box: Box) -> None:
    controller = await box.control(gives({"object": "list", "data": []}))
    wire = await box.connect()
    for target, key, expected in (
        ("/v1/models", "sk-test-all", 200),
        ("/v1/models", None, 401),
        ("/metrics", "sk-test-inference", 403),
        ("/no", None, 404),
    ):
        await wire.send(request_bytes("HEAD", target, key=key))
        status, headers, _ = await wire.head()
        assert status == expected and int(headers["content-length"]) > 0
        await wire.send(request_bytes("GET", "/v1/models"))
        assert json.loads((await wire.response()).body)["data"] == []  # no body lay in between
    assert {request.method for request in controller.requests} == {"GET"}


async def test_one_slash_too_many_reaches_the_same_routes(box: Box) -> None:
    controller = await box.control(gives({"data": []}))
    for target in ("/v1/chat/completions/", "//v1/chat/completions", "/v1//chat/completions"):
        assert (await box.ask("POST", target, chat())).status == 200
    assert (await box.ask("GET", "/v1//files/?limit=1")).status == 200
    assert [request.target for request in controller.requests] == ["/v1/files?limit=1"]
    assert (await box.ask("GET", "//v1/files/..//..//admin/v1/keys")).error["code"] == "unknown_url"
    assert (await box.ask("GET", "//admin//v1/keys")).status == 200
    assert controller.requests[-1].target == "/admin/v1/keys"


SCRIPT = next(path for path in site() if path.endswith(b"/app.js")).decode()


@pytest.mark.parametrize("target", ["/ui", "/ui/", "//ui", "/ui?x=1", SCRIPT])
async def test_the_page_is_sent_without_a_key_and_without_a_table(start_box: Start, target: str) -> None:
    box = await start_box()
    box.state.generation = -1
    answer = await box.ask("GET", target, key=None)
    assert answer.status == 200
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY.decode()
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["content-type"].startswith("text/javascript" if target == SCRIPT else "text/html")
    assert ("immutable" in answer.headers["cache-control"]) == (target == SCRIPT)
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "target",
    ["/ui/app.js", "/uix", "/ui/../admin/v1/status", "/ui/..%2f..%2fsite.py", SCRIPT.replace("app.js", "../site.py")],
)
async def test_nothing_else_is_below_it(start_box: Start, target: str) -> None:
    box = await start_box()
    answer = await box.ask("GET", target, key=None)
    assert answer.status == 404 and answer.error["code"] == "unknown_url"


async def test_bare_address_leads_browsers_to_the_page_and_is_unknown_to_programs(start_box: Start) -> None:
    box = await start_box()
    told = await box.ask("GET", "/", key=None, headers="Accept: text/html,application/xhtml+xml,*/*;q=0.8\r\n")
    assert told.status == 303 and told.headers["location"] == "/ui" and told.headers["vary"] == "accept"
    for accept in ("*/*", "application/json"):
        answer = await box.ask("GET", "/", key=None, headers=f"Accept: {accept}\r\n")
        assert answer.status == 404 and answer.error["code"] == "unknown_url", accept
