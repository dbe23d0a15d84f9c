"""Access control: routes, methods, keys, scopes, immediate revocation, and the box's private socket."""

import asyncio
import itertools
import json
import socket
import time

import httptools
import pytest

from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import plain_target, resolve
from weights.format.names import policy_name

from .conftest import KEY, Box, Response, Start, Wire, chat, digest, request_bytes, salted
from .upstreams import Reply, UpstreamRequest, answer_chat, chat_events, gives, hangs, sends

UNKNOWN = (
    "/ /v1 /collective_rpc /openapi.json /v1/files/../../admin/v1/keys /v1/files/%2e%2e/%2E%2E/admin/v1/keys"
    " /v1/models/x%2f..%2f..%2fadmin /v1/files/x%00y /V1/models http://other/v1/models /internal/responses"
    " /v1/responses/#/cancel"
).split()
WRONG = [("DELETE", "/v1/chat/completions"), ("POST", "/health"), ("GET", "/v1/responses"), ("OPTIONS", "/v1/models")]


async def test_unlisted_urls_and_methods_are_rejected(box: Box) -> None:
    for target in UNKNOWN:
        response = await box.ask("GET", target)
        assert (response.status, response.error["code"]) == (404, "unknown_url"), target
    for method, target in WRONG:
        response = await box.ask(method, target)
        assert (response.status, response.error["code"]) == (405, "method_not_supported"), target
        assert method not in response.headers["allow"]


def test_checked_path_equals_path_routed_by_controller() -> None:
    """The controller's parser cuts off a fragment, so a POST checked by the gateway could reach a shorter URL."""
    before = (b"/v1/models/a", b"/v1/files/f", b"/v1/responses/", b"/admin/v1/models/x", b"/v1/models")
    passed = 0
    for start, byte, end in itertools.product(
        before, range(256), (b"", b"b", b"/b", b"//b", b"/../b", b"@b", b":80/b")
    ):
        target = plain_target(b"%b%c%b/x" % (start, byte, end))
        path = target.partition(b"?")[0]
        try:
            resolve(b"GET", path)
        except HttpError:
            continue
        passed += 1
        assert httptools.parse_url(target).path == path
    assert passed > 1000


# controller/test_owners.py tests the scopes of all other routes.
async def test_scopes_limit_routes_of_a_key(box: Box) -> None:
    controller = await box.control(gives({"ok": True}))
    for name, method, target, allowed in (
        ("inference", "POST", "/v1/chat/completions", True),
        ("inference", "GET", "/v1/models", True),
        ("metrics", "GET", "/admin/v1/me", True),
        ("inference", "GET", "/admin/v1/me", True),
        ("admin", "POST", "/v1/chat/completions", True),
        ("admin", "GET", "/metrics", True),
        ("read", "GET", "/metrics", True),
        ("read", "GET", "/v1/models", True),
        ("metrics", "GET", "/metrics", True),
        ("inference", "GET", "/metrics", False),
        ("tuning", "POST", "/v1/chat/completions", False),
        ("read", "POST", "/v1/chat/completions", False),
    ):
        seen = len(controller.requests), len(box.engines["e0"].requests)
        response = await box.ask(method, target, chat() if method == "POST" else None, key=f"sk-test-{name}")
        assert response.status == (200 if allowed else 403), (name, target)
        if not allowed:
            assert response.error["code"] == "insufficient_permissions"
            assert seen == (len(controller.requests), len(box.engines["e0"].requests))


async def test_key_is_accepted_only_in_authorization_and_x_api_key(box: Box) -> None:
    await box.control(gives({"data": []}))
    for headers, code in (
        ("", "missing_api_key"),
        ("Authorization: Basic abc\r\n", "missing_api_key"),
        ("Authorization: Bearer \r\n", "missing_api_key"),
        ("Authorization: Bearer sk-test-al\r\n", "invalid_api_key"),
        ("Authorization: Bearer SK-TEST-ALL\r\n", "invalid_api_key"),
        ("x-api-key: sk-test-all\r\n", None),
        ("authorization: bearer  sk-test-all\r\n", None),
    ):
        for method, target in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/metrics")):
            body = chat() if method == "POST" else None
            response = await box.ask(method, target, body, key=None, headers=headers)
            assert response.status == (401 if code else 200), headers
            assert code is None or (response.error["code"] == code and "sk-test-al" not in response.error["message"])
    assert box.state.metrics.events["bad_key"] == 6


async def test_request_for_unknown_or_unsuitable_model_is_rejected_at_once(start_box: Start) -> None:
    box = await start_box(holds={"hold_s": 0.0}, engine=answer_chat)
    box.serve("embedder", "e0", task="embed")
    box.serve("plain", chats=False)  # this model has no chat template
    prompts = {"/v1/completions": {"prompt": "hi"}, "/v1/responses": {"input": "hi"}, "/v1/embeddings": {"input": "x"}}
    for path, model, code in (
        ("/v1/chat/completions", "nope", "model_not_found"),
        ("/v1/chat/completions", "embedder", "model_not_supported"),
        ("/v1/embeddings", "m", "model_not_supported"),
        ("/v1/chat/completions", "plain", "model_not_supported"),
        ("/v1/responses", "plain", "model_not_supported"),
        ("/v1/completions", "plain", "model_not_ready"),
    ):
        response = await box.ask("POST", path, prompts.get(path, chat()) | {"model": model})
        assert response.error["code"] == code and response.error["param"] in ("model", None)
    messages = await box.ask("POST", "/v1/messages", chat("plain", max_tokens=3))  # its error has Anthropic's shape
    assert messages.status == 400 and b"no chat template" in messages.body


async def test_model_of_another_owner_looks_unknown(box: Box) -> None:
    """The model's name and its versions' names answer 404, except to owners with access and to admins."""
    url, key = "/v1/chat/completions", "sk-test-inference"
    for name, owners in (("theirs", ["key_other"]), ("hers", ["key_other", "key_inference"])):
        box.serve(name, "e0")
        box.models[name]["owners"] = box.models.setdefault(f"{name}@v1", {**box.models[name]})["owners"] = owners
    box.apply()
    for suffix in ("", "@v1", "@v2"):
        for more in ({}, {"n": "many"}):  # the model is checked before the invalid `n`
            answer = await box.ask("POST", url, chat("theirs" + suffix, **more), key=key)
            nobodys = await box.ask("POST", url, chat("nobodys" + suffix), key=key)
            assert answer.status == 404 and answer.body == nobodys.body.replace(b"nobodys", b"theirs")
    told = await box.ask("POST", "/v1/embeddings", {"model": "theirs", "input": "x"}, key=key)
    assert told.error["code"] == "model_not_found", "not even what it could do is told"
    for name, asking in (("hers", key), ("hers@v1", key), ("theirs", KEY)):
        assert (await box.ask("POST", url, chat(name), key=asking)).status == 200
    assert (await box.ask("POST", url, chat("hers@v2"), key=key)).error["code"] == "model_version_not_served"
    box.limit(key, models=["m"])
    for name in ("hers", "hers@v2"):
        answer = await box.ask("POST", url, chat(name), key=key)
        assert answer.error["code"] == "model_not_found", "what its list leaves out is as little there"


async def test_health_lists_degraded_parts_and_requires_table(start_box: Start) -> None:
    box = await start_box()
    box.state.generation = -1
    response = await box.ask("POST", "/v1/chat/completions", chat())
    assert response.status == 503 and response.error["code"] == "starting" and "retry-after" in response.headers
    assert (await box.ask("GET", "/health")).status == 503
    box.state.generation = 0
    with box.state.background.guard("sweep: inner"):
        raise RuntimeError("a bug")
    box.state.box_troubles, box.state.controller_away = ["usage"], True
    answer = await box.ask("GET", "/health", key=None)
    assert answer.status == 200
    assert json.loads(answer.body) == {"status": "ok", "degraded": ["controller", "sweep", "usage"]}


MINE, OTHER = "sk-test-inference", "sk-test-all"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


def _head(target: str = "/v1/chat/completions", key: str = MINE, length: int = 1000) -> bytes:
    return (
        f"POST {target} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def _ended(wire: Wire) -> None:
    response = await wire.response()
    assert response.status == 401 and response.error["code"] == "invalid_api_key"
    assert response.headers["connection"] == "close"
    assert await wire.eof() == b""


@pytest.mark.parametrize("how", ["revoked", "rotated", "expired"])
async def test_revoked_key_aborts_partly_received_request(box: Box, how: str) -> None:
    wire = await box.connect()
    await wire.send(_head() + BODY)
    await box.until(lambda: box.state.buffered_bytes == len(BODY))
    box.revoke(OTHER)
    assert box.state.buffered_bytes == len(BODY), "another's key is not this one"
    if how == "rotated":
        _rotate(box, MINE)
    elif how == "expired":
        box.limit(MINE, expires_s=1000.0)
    else:
        box.revoke(MINE)
    await _ended(wire)
    assert box.state.buffered_bytes == 0 and box.engines["e0"].requests == []
    assert box.state.metrics.events["revoked_in_flight"] == 1


async def test_revoked_key_drops_pipelined_requests(box: Box) -> None:
    """Two requests of the key, the second received in part, wait on a connection behind a stream."""
    box.engines["e0"].script = sends(chat_events("a", done=False)[0], ends=False)
    wire = await box.send("POST", "/v1/chat/completions", chat(stream=True), key=MINE)
    await box.until(lambda: len(box.engines["e0"].requests) == 1)
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat(), key=MINE) + _head() + BODY)
    await box.until(lambda: any(connection.pipeline for connection in box.state.connections))
    box.revoke(MINE)
    assert (await wire.head())[0] == 200
    rest = await wire.eof()
    assert b"invalid_api_key" in rest and b"HTTP/1.1 200" not in rest
    assert len(box.engines["e0"].requests) == 1 and box.state.buffered_bytes == 0


async def test_revoked_key_aborts_held_request(box: Box) -> None:
    box.serve("m", "e0:draining")
    wire = await box.send("POST", "/v1/chat/completions", chat(), key=MINE)
    await box.until(lambda: box.state.holds.models()["m"] == 1)
    box.revoke(MINE)
    await _ended(wire)
    assert box.state.holds.models()["m"] == 0


async def test_revoked_key_aborts_pending_control_request(box: Box) -> None:
    controller = await box.control(hangs)
    wire = await box.send("GET", "/v1/files", key="sk-test-tuning")
    await box.until(lambda: bool(controller.requests))
    box.revoke("sk-test-tuning")
    await _ended(wire)
    await asyncio.wait_for(controller.lost.wait(), 60)


def _rotate(box: Box, key: str) -> None:
    box.keys[digest("new")] = box.keys[digest(key)]
    box.revoke(key)


async def test_rotation_of_own_key_returns_new_secret(box: Box) -> None:
    """The request that rotates its own key is not aborted: a sole administrator would lose the new secret."""
    asked, rotated = asyncio.Event(), asyncio.Event()

    async def rotate(request: UpstreamRequest, reply: Reply) -> None:
        asked.set()
        await rotated.wait()
        await reply.json({"key": "new"})

    await box.control(rotate)
    wire, dripping = await box.connect(), await box.connect()
    await wire.send(request_bytes("POST", "/admin/v1/keys/all/rotate", key=OTHER))
    await dripping.send(_head("/admin/v1/keys/all/rotate", OTHER) + b"{")
    await asyncio.wait_for(asked.wait(), 60)
    await box.until(lambda: len(box.state.exchanges) == 2)
    _rotate(box, OTHER)
    await _ended(dripping)  # whoever still has the old secret must not learn the new secret
    rotated.set()
    answer = await wire.response()
    assert answer.status == 200 and b'"new"' in answer.body


async def test_expired_key_is_rejected(box: Box) -> None:
    """An expired key is rejected, both while its row is in the table and after the row is removed."""
    row = dict(box.keys[digest(MINE)])
    for changed, status in (
        (row | {"expires_s": time.time() + 60}, 200),
        (row | {"expires_s": time.time() - 1}, 401),
        ({"id": "key_gone", "expires_s": time.time() - 90 * 86_400}, 401),
    ):
        box.keys[digest(MINE)] = changed
        box.apply()
        response = await box.ask("POST", "/v1/chat/completions", chat(), key=MINE)
        assert response.status == status
        assert status == 200 or (response.error["code"] == "invalid_api_key" and "expired" in response.error["message"])


URL = "/v1/chat/completions"
BATCH = "X-Appliance-Class: batch\r\n"


async def ask_privately(box: Box, listener: socket.socket, headers: str, **fields: str) -> Response:
    wire = Wire(*await asyncio.open_unix_connection(listener.getsockname()))
    box.wires.append(wire)
    await wire.send(request_bytes("POST", URL, chat(**fields), key=None, headers=headers))
    return await wire.response()


async def test_private_request_is_charged_to_named_key(box: Box, listener: socket.socket) -> None:
    answer = await ask_privately(box, listener, f"X-Appliance-Key-Id: key_inference\r\n{BATCH}")
    assert answer.status == 200
    (row,) = box.state.spending.take_sums()
    assert (row["key"], row["requests"]) == ("key_inference", 1)
    assert salted(b"{}", "key_inference")[1:-1] in box.engines["e0"].requests[0].body


async def test_private_request_has_permissions_of_named_key(box: Box, listener: socket.socket) -> None:
    for headers, status in (
        ("X-Appliance-Key-Id: key_tuning\r\n", 403),
        ("X-Appliance-Key-Id: key_unknown\r\n", 401),
        ("X-Appliance-Key-Id: key_all\r\nX-Appliance-Key-Id: key_inference\r\n", 401),
        ("X-Appliance-Key-Id: \r\n", 200),
        ("", 200),
    ):
        assert (await ask_privately(box, listener, headers + BATCH)).status == status


async def test_private_request_is_aborted_only_if_its_named_key_ends(box: Box, listener: socket.socket) -> None:
    began, end = asyncio.Semaphore(0), asyncio.Event()

    async def waits(request: UpstreamRequest, reply: Reply) -> None:
        began.release()
        await end.wait()
        await answer_chat(request, reply)

    box.engines["e0"].script = waits
    asking = [
        asyncio.create_task(ask_privately(box, listener, f"X-Appliance-Key-Id: {name}\r\n{BATCH}"))
        for name in ("key_all", "")
    ]
    for _ in asking:
        await began.acquire()
    box.limit(secret="f" * 64)
    await asyncio.sleep(0)
    assert not asking[0].done(), "a key that is rotated goes on"
    box.keys.clear()
    box.apply()
    assert (await asking[0]).status == 401
    end.set()
    assert (await asking[1]).status == 200


@pytest.mark.parametrize("key", [None, "sk-test-tuning"])
async def test_public_request_with_key_id_header_is_rejected(start_box: Start, key: str | None) -> None:
    box = await start_box(engine=answer_chat)
    for name in ("X-Appliance-Key-Id", "x_appliance_key_id", "X-Appliance-Key-ID"):
        for value in ("key_all", ""):
            answer = await box.ask("POST", URL, chat(), key=key, headers=f"{name}: {value}\r\n{BATCH}")
            assert answer.status == (401 if key is None else 403)


@pytest.fixture
def policy(box: Box) -> str:
    """Add a model in training, served by the engines of `m`; return its name."""
    return train(box)


def train(box: Box) -> str:
    name = policy_name("ftjob-1")
    box.serve(name, "e0", host="m", trained_from="m", owners=[])
    return name


async def test_private_request_to_policy_version_charges_base_model(
    box: Box, listener: socket.socket, policy: str
) -> None:
    headers = f"X-Appliance-Key-Id: key_inference\r\n{BATCH}"
    answer = await ask_privately(box, listener, headers, model=f"{policy}@step-3.ab")
    assert answer.status == 200 and box.engines["e0"].requests[0].json["model"] == f"{policy}@step-3.ab"
    (row,) = box.state.spending.take_sums()
    assert (row["key"], row["model"], row["requests"]) == ("key_inference", "m", 1)
    box.limit("sk-test-inference", models=["other"])
    assert (await ask_privately(box, listener, headers, model=f"{policy}@step-3.ab")).status == 404


async def test_private_request_to_policy_may_exceed_silence_limit(start_box: Start, listener: socket.socket) -> None:
    async def slow(request: UpstreamRequest, reply: Reply) -> None:
        await asyncio.sleep(0.2)
        await answer_chat(request, reply)

    box = await start_box(private=listener, limits={"upstream_silence_s": 0.05}, engine=slow)
    name = train(box)
    assert (await ask_privately(box, listener, BATCH, model=f"{name}@step-3.ab")).status == 200
    assert (await ask_privately(box, listener, BATCH)).status == 504


@pytest.mark.parametrize("version", ["", "@step-3.ab"])
@pytest.mark.parametrize("key", ["sk-test-admin", "sk-test-all"])
async def test_public_request_to_policy_is_not_found(box: Box, policy: str, key: str, version: str) -> None:
    assert (await box.ask("POST", URL, chat(model=policy + version), key=key)).status == 404
