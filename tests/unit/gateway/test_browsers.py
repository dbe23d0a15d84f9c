"""Requests of browsers (page, login, cross-origin requests) and unusual requests (HEAD, extra slashes)."""

import asyncio
import json
import time

import pytest

from appliance.ui.site import CONTENT_SECURITY, site

from .conftest import Box, Start, chat, digest, request_bytes
from .upstreams import Reply, UpstreamRequest, answer_chat, gives, hangs

PAGE = "https://chat.example.org"
FROM_PAGE = f"Origin: {PAGE}\r\n"
PREFLIGHT = FROM_PAGE + (
    "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization, x-stainless-os\r\n"
)


@pytest.mark.parametrize("target", ["/v1/chat/completions", "/nowhere"])
async def test_preflight_from_allowed_origin_needs_no_key(start_box: Start, target: str) -> None:
    box = await start_box(cors_origins=[PAGE])
    answer = await box.ask("OPTIONS", target, key=None, headers=PREFLIGHT)
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == PAGE and "Origin" in answer.headers["vary"]
    assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("origins", [[], ["https://other.example.org"]])
async def test_other_origin_gets_no_cors_headers(start_box: Start, origins: list[str]) -> None:
    box = await start_box(cors_origins=origins, engine=answer_chat)
    preflight = await box.ask("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
    assert preflight.status == 405 and "access-control-allow-origin" not in preflight.headers
    answer = await box.ask("POST", "/v1/chat/completions", chat(), headers=FROM_PAGE)
    assert answer.status == 200 and "access-control-allow-origin" not in answer.headers


async def test_allowed_origin_reads_answers_streams_and_errors(start_box: Start) -> None:
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


async def test_head_is_answered_like_get_without_body(box: Box) -> None:
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
        assert json.loads((await wire.response()).body)["data"] == []  # no body of the answer to HEAD comes first
    assert {request.method for request in controller.requests} == {"GET"}


async def test_extra_slashes_reach_the_same_routes(box: Box) -> None:
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
async def test_page_is_served_without_key_and_table(start_box: Start, target: str) -> None:
    box = await start_box()
    box.state.generation = -1
    answer = await box.ask("GET", target, key=None)
    assert answer.status == 200
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY.decode()
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["content-type"].startswith("text/javascript" if target == SCRIPT else "text/html")
    assert ("immutable" in answer.headers["cache-control"]) == (target == SCRIPT)
    assert "set-cookie" not in answer.headers


async def test_other_paths_below_page_are_unknown(box: Box) -> None:
    beside = SCRIPT.replace("app.js", "../site.py")
    for target in ("/ui/app.js", "/uix", "/ui/../admin/v1/status", "/ui/..%2f..%2fsite.py", beside):
        answer = await box.ask("GET", target, key=None)
        assert answer.status == 404 and answer.error["code"] == "unknown_url"


async def test_root_url_redirects_only_browsers(start_box: Start) -> None:
    box = await start_box()
    told = await box.ask("GET", "/", key=None, headers="Accept: text/html,application/xhtml+xml,*/*;q=0.8\r\n")
    assert told.status == 303 and told.headers["location"] == "/ui" and told.headers["vary"] == "accept"
    for accept in ("*/*", "application/json"):
        answer = await box.ask("GET", "/", key=None, headers=f"Accept: {accept}\r\n")
        assert answer.status == 404 and answer.error["code"] == "unknown_url", accept


KEY, LOGIN = "sk-test-read", "session_a"
COOKIE, HALF = "c" * 43, "p" * 43
SENT = f"Cookie: other=1; {LOGIN}={COOKIE}\r\n"
TOLD = f"X-Appliance-Page: {LOGIN}.{HALF}\r\n"
SAME = "Sec-Fetch-Site: same-origin\r\n"
BY_PAGE = SENT + TOLD + SAME


def begin(box: Box, key: str = KEY, *, for_s: float = 60.0) -> None:
    """Add a login of this key to the table, valid for `for_s` seconds."""
    box.limit(key, sessions={digest(f"{COOKIE}.{HALF}"): {"id": LOGIN, "until_s": time.time() + for_s}})


LISTS = gives({"object": "list", "data": []})


@pytest.fixture
async def read_box(start_box: Start) -> Box:
    box = await start_box()
    await box.control(LISTS)
    begin(box)
    return box


async def test_login_has_the_scopes_of_its_key(read_box: Box) -> None:
    answer = await read_box.ask("GET", "/admin/v1/status", key=None, headers=BY_PAGE)
    assert answer.status == 200
    seen = read_box.controller.requests[0].headers
    assert seen["x-appliance-key-id"] == "key_read" and seen["x-appliance-scopes"] == "read"
    assert seen["x-appliance-session"] == LOGIN
    assert not {"cookie", "x-appliance-page"} & set(seen)


# Requests that other pages make a browser send. A browser sends the cookie to every port of the host.
FORGED = {
    "a form of another site": ("POST", SENT + "Sec-Fetch-Site: cross-site\r\nOrigin: https://evil.example\r\n"),
    "a form of another port": ("POST", SENT + "Sec-Fetch-Site: same-site\r\nOrigin: http://box:99\r\n"),
    "a link": ("GET", SENT + "Sec-Fetch-Site: none\r\nSec-Fetch-Mode: navigate\r\n"),
    "a link of the page's own origin": ("GET", SENT + SAME + "Sec-Fetch-Mode: navigate\r\n"),
    "the page's header, guessed": ("GET", SENT + SAME + f"X-Appliance-Page: {LOGIN}.{'q' * 43}\r\n"),
    "the page's header without the cookie": ("GET", TOLD + SAME),
    "another's cookie": ("GET", TOLD + SAME + f"Cookie: {LOGIN}={'x' * 43}\r\n"),
    "both halves, from another site": ("GET", SENT + TOLD + "Sec-Fetch-Site: cross-site\r\n"),
    "both halves, from another port": ("GET", SENT + TOLD + "Sec-Fetch-Site: same-site\r\n"),
    "both halves, of another origin": ("POST", SENT + TOLD + "Origin: http://box:99\r\n"),
    "a change that nobody says whence": ("POST", SENT + TOLD),
    "the token as a key": ("GET", f"Authorization: Bearer {COOKIE}.{HALF}\r\n"),
    "a key that is none, beside a login": ("GET", BY_PAGE + "Authorization: Bearer nobody\r\n"),
    "an empty key beside a login": ("GET", BY_PAGE + "Authorization: Bearer\r\n"),
}


@pytest.mark.parametrize(("method", "headers"), FORGED.values(), ids=list(FORGED))
@pytest.mark.parametrize("target", ["/admin/v1/keys", "/v1/chat/completions"])
async def test_forged_requests_cannot_use_a_login(start_box: Start, method: str, headers: str, target: str) -> None:
    box = await start_box()
    controller, engine = await box.control(LISTS), await box.engine("e0")
    box.serve("m", "e0")
    begin(box, "sk-test-all")
    if target.endswith("completions"):
        method = "POST"
    body = chat() if method == "POST" else None
    answer = await box.ask(method, target, body, key=None, headers=headers)
    assert answer.status in (401, 403), answer.error
    assert not controller.requests and not engine.requests
    assert "access-control-allow-origin" not in answer.headers


async def test_page_with_login_may_send_posts(read_box: Box) -> None:
    begin(read_box, "sk-test-admin")
    for headers in (SAME, "Origin: http://box\r\n", SAME + "Origin: http://box\r\n"):
        answer = await read_box.ask("POST", "/admin/v1/mode", {}, key=None, headers=SENT + TOLD + headers)
        assert answer.status == 200
    assert (await read_box.ask("GET", "/admin/v1/keys", key=None, headers=SENT + TOLD)).status == 200


async def test_login_ends_at_expiry_and_with_its_key(read_box: Box) -> None:
    for for_s, limits, status in ((-1, {}, 401), (60, {}, 200), (60, {"expires_s": 1000.0}, 401)):
        read_box.limit(KEY, **limits)
        begin(read_box, for_s=for_s)
        assert (await read_box.ask("GET", "/admin/v1/status", key=None, headers=BY_PAGE)).status == status
    read_box.revoke(KEY)
    answer = await read_box.ask("GET", "/admin/v1/status", key=None, headers=BY_PAGE)
    assert answer.status == 401 and answer.error["code"] == "session_ended"


@pytest.mark.parametrize("whose", ["login", "key", "another's login"])
async def test_ended_login_aborts_its_open_requests(start_box: Start, whose: str) -> None:
    box = await start_box()
    controller = await box.control(hangs)
    begin(box)
    wire = await box.send("GET", "/admin/v1/status", key=None, headers=BY_PAGE)
    await box.until(lambda: bool(controller.requests))
    if whose == "another's login":
        box.limit("sk-test-all", sessions={"a" * 64: {"id": "session_b", "until_s": time.time() + 60}})
        assert box.state.metrics.events["revoked_in_flight"] == 0
    if whose == "key":
        box.revoke(KEY)
    else:
        box.limit(KEY, sessions={})
    assert (await wire.response()).status == 401
    assert box.state.metrics.events["revoked_in_flight"] == 1


async def test_logout_is_answered_although_it_ends_its_login(start_box: Start) -> None:
    box = await start_box()

    async def ends(request: UpstreamRequest, reply: Reply) -> None:
        box.limit(KEY, sessions={})
        await reply.json({"deleted": True}, headers=f"x-appliance-cookie: {LOGIN}=; Max-Age=0\r\n")

    await box.control(ends)
    begin(box)
    wire = await box.send("DELETE", f"/admin/v1/sessions/{LOGIN}", key=None, headers=BY_PAGE)
    head = (await wire.reader.readuntil(b"\r\n\r\n")).decode()
    assert head.startswith("HTTP/1.1 200 ") and head.count(f"set-cookie: {LOGIN}=; Max-Age=0;") == 2


async def test_login_cookie_is_set_for_both_api_paths(start_box: Start) -> None:
    box = await start_box()
    cookie = f"x-appliance-cookie: {LOGIN}={COOKIE}; Max-Age=60\r\nset-cookie: a=b\r\n"
    await box.control(gives({"id": LOGIN}, headers=cookie))
    wire = await box.send("POST", "/admin/v1/sessions", {})
    head = (await wire.reader.readuntil(b"\r\n\r\n")).decode()
    lines = [line for line in head.split("\r\n") if "ookie" in line]
    assert lines == [
        f"set-cookie: {LOGIN}={COOKIE}; Max-Age=60; HttpOnly; SameSite=Strict; Path={path}"
        for path in ("/admin/v1", "/v1")
    ]


async def test_oidc_routes_need_no_key_and_use_gateway_identity(start_box: Start) -> None:
    box = await start_box()
    controller = await box.control(LISTS)
    forged = SAME + "X-Appliance-Key-Id: key_admin\r\nX-Appliance-Scopes: admin\r\n"
    for method, target in (("GET", ""), ("POST", "/begin"), ("POST", "/finish")):
        body = {"code": "c"} if method == "POST" else None
        answer = await box.ask(method, f"/admin/v1/oidc{target}", body, key=None, headers=forged)
        assert answer.status == 200
    for seen in controller.requests:
        assert seen.headers["x-appliance-key-id"] == seen.headers["x-appliance-scopes"] == "gateway"
    assert controller.requests[-1].body == b'{"code": "c"}'
    wire, asked = await box.connect(), request_bytes("POST", "/admin/v1/oidc/begin", {}, key=None, headers=SAME)
    connections = controller.connections
    await wire.send(asked[:-1])
    await box.until(lambda: bool(box.state.exchanges))
    await asyncio.sleep(0.05)
    assert controller.connections == connections, "a body that drips holds none of them"
    await wire.send(asked[-1:])
    assert (await wire.response()).status == 200


async def test_routes_near_oidc_need_a_key(read_box: Box) -> None:
    for method, target in (
        ("POST", "/admin/v1/oidc"),
        ("DELETE", "/admin/v1/oidc/begin"),
        ("GET", "/admin/v1/oidcx"),
        ("GET", "/admin/v1/keys"),
        ("POST", "/admin/v1/sessions"),
    ):
        body = {} if method == "POST" else None
        assert (await read_box.ask(method, target, body, key=None, headers=SAME)).status in (401, 405)
    assert not read_box.controller.requests


@pytest.mark.parametrize("headers", ["", "Origin: https://evil.example\r\n", "Sec-Fetch-Site: none\r\n"])
async def test_oidc_from_other_page_is_rejected(read_box: Box, headers: str) -> None:
    for end in ("begin", "finish"):
        answer = await read_box.ask("POST", f"/admin/v1/oidc/{end}", {}, key=None, headers=headers)
        assert answer.status == 403 and answer.error["code"] == "cross_site_request"
    assert not read_box.controller.requests
