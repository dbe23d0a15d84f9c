"""What somebody with a key for completions tries, against the real gateway process and the real control app: requests
tried, what got through (nothing may) and the slowest answer that an honest neighbour had to wait for, class by class.

`pytest -s -m soak tests/e2e/test_attacks_soak.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.attacks_support import (
    MARK,
    Attacked,
    Neighbour,
    Tally,
    chat_body,
    every_route,
    head,
    json_of,
    statuses,
    what_ann_has,
)
from tests.front.box import MODEL, running_front
from tests.front.clients import CHAT

SEED = int(os.environ.get("ATTACK_SEED", time.time()))
MIB = 1 << 20
PATIENCE_S, NOISE = 1.0, 3.0  # or so many times what a neighbour waits for while nobody attacks, on a busy machine
QUIET_S = 10.0
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def attacked() -> Iterator[Attacked]:
    limits = {"head_timeout_s": 3.0, "body_grace_s": 3.0, "keepalive_s": 5.0}
    with running_front(limits=limits, sweep_s=0.1) as front:
        one = Attacked(front)
        with Neighbour(front, one.honest) as neighbour:
            time.sleep(QUIET_S)
        one.quiet_s = neighbour.slowest_s
        yield one


@pytest.fixture(scope="module")
def routes(attacked) -> list[tuple[str, str]]:
    """Read before anybody is timed: the app is made for it on the loop that the canned engine answers on."""
    return every_route(attacked.front)


@pytest.fixture
def tally(request, attacked, capsys) -> Iterator[Tally]:
    """Of the test's class. In its end the front must be as well as before, and nothing have got through."""
    one = Tally(request.node.name.removeprefix("test_").partition("[")[0])
    with Neighbour(attacked.front, attacked.honest) as neighbour:
        yield one
    one.slowest_s, bound_s = neighbour.slowest_s, max(PATIENCE_S, NOISE * attacked.quiet_s)
    with capsys.disabled():
        print(
            f"\n{one.name:40s} {one.tried:6d} tried, {len(one.through)} got through, slowest neighbour "
            f"{one.slowest_s * 1000:.0f} ms of {neighbour.asked} (bound {bound_s * 1000:.0f} ms, slowest "
            f"while nobody attacks {attacked.quiet_s * 1000:.0f} ms); {dict(sorted(one.answers.items()))}",
            flush=True,
        )
    assert one.tried and not one.through, one.through[:20]
    assert not neighbour.failed, neighbour.failed[:3]
    assert one.slowest_s < bound_s
    assert not [status for status in one.answers if status >= 500 and status not in (501, 503, 507)], one.answers


# --- one byte, one request, one principal


def test_smuggling(attacked, tally):
    """A second request hidden in the first: whoever it is read by, it is nobody's, and makes no key."""
    key, before = attacked.key(["inference", "fine_tuning"]), attacked.key_names()
    wanted = json.dumps({"name": "smuggled", "scopes": ["admin"]})
    hidden = (
        f"POST /admin/v1/keys HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(wanted)}\r\n\r\n{wanted}"
    ).encode()
    length, chunk = len(hidden), b"%x\r\n%b\r\n" % (len(hidden), hidden)
    tricks = {
        "length": ((f"Content-Length: {length}",), hidden),
        "chunks": (("Transfer-Encoding: chunked",), chunk + b"0\r\n\r\n"),
        "both, chunks end first": (
            (f"Content-Length: {length + 5}", "Transfer-Encoding: chunked"),
            b"0\r\n\r\n" + hidden,
        ),
        "both, the other way": (("Transfer-Encoding: chunked", "Content-Length: 4"), chunk + b"0\r\n\r\n"),
        "two lengths": (("Content-Length: 0", f"Content-Length: {length}"), hidden),
        "list of lengths": ((f"Content-Length: 0, {length}",), hidden),
        "signed length": ((f"Content-Length: +{length}",), hidden),
        "negative length": (("Content-Length: -1",), hidden),
        "hexadecimal length": ((f"Content-Length: 0x{length:x}",), hidden),
        "length with a space": (("Content-Length : 0",), hidden),
        "folded": (("X: a\r\n Transfer-Encoding: chunked",), hidden),
        "coding in capitals": (("Transfer-Encoding: CHUNKED",), b"0\r\n\r\n" + hidden),
        "unknown coding": (("Transfer-Encoding: xchunked",), b"0\r\n\r\n" + hidden),
        "two codings": (("Transfer-Encoding: chunked, identity",), b"0\r\n\r\n" + hidden),
        "coding twice": (("Transfer-Encoding: chunked", "Transfer-Encoding: identity"), b"0\r\n\r\n" + hidden),
        "tab before the coding": (("Transfer-Encoding:\tchunked",), b"0\r\n\r\n" + hidden),
        "vertical tab": (("Transfer-Encoding: \x0bchunked",), b"0\r\n\r\n" + hidden),
        "bare line feed": (("X: y\nTransfer-Encoding: chunked",), b"0\r\n\r\n" + hidden),
        "bare carriage return": (("X: y\rTransfer-Encoding: chunked",), b"0\r\n\r\n" + hidden),
        "zero byte": (("X: \x00",), hidden),
        "chunk of a hexadecimal prefix": (("Transfer-Encoding: chunked",), b"0x0\r\n\r\n" + hidden),
        "chunk with a sign": (("Transfer-Encoding: chunked",), b"+0\r\n\r\n" + hidden),
        "chunk of too many digits": (("Transfer-Encoding: chunked",), b"1" + b"0" * 16 + b"\r\n" + hidden),
        "chunk with line feeds": (("Transfer-Encoding: chunked",), b"0\n\n" + hidden),
        "chunk extension": (("Transfer-Encoding: chunked",), b"0;a=\r\n\r\n" + hidden),
        "trailers": (("Transfer-Encoding: chunked",), b"0\r\nX-Appliance-Scopes: admin\r\n\r\n" + hidden),
        "chunk longer than it says": (("Transfer-Encoding: chunked",), b"1\r\n" + hidden + b"\r\n0\r\n\r\n"),
        "continue": ((f"Content-Length: {length}", "Expect: 100-continue"), hidden),
        "upgrade": (
            ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"),
            hidden,
        ),
        "nothing said": ((), hidden),
    }
    targets = [
        (method, path)
        for path in (
            "/v1/files",
            "/v1/models",
            "/v1/fine_tuning/jobs",
            "/v1/responses/resp_1",
            CHAT,
            "/v1/batches",
            "/health",
            "/admin/v1/status",
        )
        for method in ("GET", "HEAD", "DELETE", "POST", "OPTIONS")
    ]
    for (method, path), (name, (lines, body)) in itertools.product(targets, tricks.items()):
        came = attacked.send(head(method, path, key, *lines) + body, half_close=True)
        for status in statuses(came) or [0]:
            tally.saw(status)
        if b'"key":"sk-' in came.replace(b" ", b"") or b"smuggled" in came:
            tally.got_through(f"{method} {path}, {name}: {came[:200]!r}")
    if made := attacked.key_names() - before:
        tally.got_through(f"keys were made: {made}")


def test_bodies_that_do_not_come(attacked, tally):
    """The next one on the gateway's connection to the controller must not be read as the rest of this."""
    key, another = attacked.key(["inference", "fine_tuning"]), attacked.key(["inference", "fine_tuning"])
    before, choice = attacked.key_names(), random.Random(SEED)
    wanted = b'{"name":"late","scopes":["admin"]}'
    hidden = b"POST /admin/v1/keys HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(wanted), wanted)
    paths = ("/v1/files", "/v1/fine_tuning/jobs", "/v1/batches", "/v1/uploads", "/v1/responses/resp_1/cancel", CHAT)
    with attacked.front.http(another) as other:
        for turn in range(240):
            path = paths[turn % len(paths)]
            promised = choice.choice((40, 400, 70_000))
            part = choice.choice((b"", b"{", hidden, b"x" * 39))
            with attacked.raw() as wire:
                wire.sendall(head("POST", path, key, "Content-Type: application/json", f"Content-Length: {promised}"))
                wire.sendall(part[: promised - 1])
                if turn % 3 == 0:
                    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, no goodbye
            seen = other.get("/v1/models") if turn % 2 else other.get("/v1/files", params={"limit": 1})
            if tally.saw(seen.status_code) != 200:
                tally.got_through(f"a neighbour was answered {seen.status_code} {seen.text[:100]} after {part!r}")
        # An answer that comes before the body is whole, and what follows on the same connection.
        for turn in range(40):
            came = attacked.send(
                head("POST", "/v1/files", "sk-appl-wrong", f"Content-Length: {len(hidden)}"), hidden, half_close=True
            )
            if any(tally.saw(status) < 400 for status in statuses(came)):
                tally.got_through(f"early answer, turn {turn}: {came[:200]!r}")
        time.sleep(6)  # the controller closes connections that were idle for five
        for _ in range(20):
            asked = head("GET", "/v1/files", key, f"Content-Length: {len(hidden)}") + hidden
            came = attacked.send(asked, half_close=True)
            for status in statuses(came) or [0]:
                tally.saw(status)
            tally.saw(other.get("/v1/models").status_code)
    if made := attacked.key_names() - before:
        tally.got_through(f"keys were made: {made}")


def test_headers_that_name_somebody_else(attacked, tally):
    """Who asks is what the gateway says, whatever else stands in the request."""
    key = attacked.key(["inference", "fine_tuning"])
    before = attacked.key_names()
    names = (
        "X-Appliance-Key-Id",
        "X-Appliance-Scopes",
        "X-Appliance-Key-Name",
        "X-Appliance-Owner",
        "X-Forwarded-User",
        "X-Real-Ip",
        "Remote-User",
        "X-Original-Url",
        "X-Rewrite-Url",
        "X-Http-Method-Override",
    )
    spellings = [f"{name}: {{}}" for name in names] + ["x_appliance_scopes: {}", "X-APPLIANCE-SCOPES: {}"]
    hops = ((), ("Connection: X-Appliance-Key-Id, X-Appliance-Scopes",), ("Connection: close, Authorization",))
    for spelling, value in itertools.product(spellings, ("admin", "inference,fine_tuning,admin", "", "/admin/v1/keys")):
        for more in hops:
            for method, path in (("GET", "/admin/v1/keys"), ("POST", "/admin/v1/keys"), ("GET", "/admin/v1/status")):
                body = b'{"name":"spoofed","scopes":["admin"]}' if method == "POST" else b""
                lengths = (f"Content-Length: {len(body)}",) if body else ()
                came = attacked.send(
                    head(method, path, key, spelling.format(value), *lengths, *more) + body, half_close=True
                )
                if any(tally.saw(status) < 400 for status in statuses(came) or [400]):
                    tally.got_through(f"{method} {path} with {spelling.format(value)}: {came[:200]!r}")
    twice = head("GET", "/admin/v1/keys", key, f"Authorization: Bearer {attacked.front.key}")
    if any(tally.saw(status) < 400 for status in statuses(attacked.send(twice, half_close=True))):
        tally.got_through("two identities, the better one won")
    if made := attacked.key_names() - before:
        tally.got_through(f"keys were made: {made}")


# --- what belongs to whom


def test_what_belongs_to_others(attacked, routes, tally):
    """ben names ann's things in every route that can name something; nothing of hers comes back or changes."""
    every = ["inference", "fine_tuning"]
    ann, second, ben = attacked.key(every), attacked.key(every), attacked.key(every, owner="ben")
    hers = what_ann_has(attacked.front, ann)
    with attacked.front.http(second) as http:  # a person's other key sees what the first one made
        assert http.get(f"/v1/files/{hers['file_id'][0]}").status_code == 200
    ids = [one for found in hers.values() for one in found]
    queries = ({}, {"limit": 100}, {"after": ids[0]}, {"after": ids[-1]}, {"purpose": "fine-tune"}, {"owner": "a"})
    absent = {one: one[:-4] + "zzzz" for one in ids}
    with attacked.front.http(ben) as http:
        for method, template in routes:
            names = [part[1:-1] for part in template.split("/") if part.startswith("{")]
            for given in ids if names else [""]:
                path, nobody = template, template
                for name in names:
                    path = path.replace("{" + name + "}", given)
                    nobody = nobody.replace("{" + name + "}", absent[given])
                if method == "GET" and not names:
                    answers = [(http.get(path, params=query), query.get("after")) for query in queries]
                else:
                    answers = [(http.request(method, path, json=None if method in ("GET", "DELETE") else {}), given)]
                for answer, said in answers:  # an error may repeat what ben said himself
                    tally.saw(answer.status_code)
                    if MARK in answer.text or any(one in answer.text for one in ids if one != said):
                        tally.got_through(f"{method} {path} told of hers: {answer.text[:200]}")
                if names and method == "GET" and template.startswith("/v1/"):
                    twin = http.get(nobody)
                    same = answer.text.replace(given, "ID") == twin.text.replace(absent[given], "ID")
                    if tally.saw(twin.status_code) != answer.status_code or not same:
                        tally.got_through(f"{path} is told from nothing: {answer.text[:120]} {twin.text[:120]}")
                if names and answer.status_code < 300:
                    tally.got_through(f"{method} {path} was answered {answer.status_code}")
        named = [
            ("/v1/fine_tuning/jobs", {"model": MODEL, "training_file": hers["file_id"][0]}),
            ("/v1/fine_tuning/jobs", {"model": MODEL, "training_file": "f", "validation_file": hers["file_id"][0]}),
            ("/v1/batches", {"input_file_id": hers["file_id"][1], "endpoint": CHAT, "completion_window": "24h"}),
            ("/v1/responses", {"model": MODEL, "input": "go on", "previous_response_id": hers["response_id"][0]}),
            (f"/v1/uploads/{hers['upload_id'][0]}/complete", {"part_ids": []}),
            (f"/v1/fine_tuning/jobs/{hers['job_id'][0]}/cancel", {}),
            (f"/v1/batches/{hers['batch_id'][0]}/cancel", {}),
        ]
        for path, body in named:
            answer = http.post(path, json=body)
            if tally.saw(answer.status_code) not in (400, 403, 404) or MARK in answer.text:
                tally.got_through(f"POST {path} was answered {answer.status_code} {answer.text[:150]}")
            else:
                json_of(answer)
    with attacked.front.http(ann) as http:
        places = {"file_id": "files", "batch_id": "batches", "job_id": "fine_tuning/jobs", "response_id": "responses"}
        for path in (f"/v1/{place}/{one}" for name, place in places.items() for one in hers[name]):
            mine = http.get(path)
            if mine.status_code != 200 or mine.json().get("status") == "cancelled":
                tally.got_through(f"{path} is not as she left it: {mine.text[:150]}")


def test_scopes(attacked, routes, tally):
    """No key does what its scopes do not say, whatever the route and the method."""
    before = attacked.key_names()
    may = {
        "inference": ("/v1/batches", "/v1/responses", "/v1/chat/completions", "/v1/models"),
        "fine_tuning": (*("/v1/files", "/v1/uploads", "/v1/fine_tuning", "/v1/evals", "/v1/models"),),
        "read": ("/v1/models",),
        "metrics": (),
    }
    for scope, allowed in may.items():
        try:
            key = attacked.key([scope])
        except AssertionError:  # a front from before that scope
            tally.got_through(f"there is no scope {scope!r}")
            continue
        with attacked.front.http(key) as http:
            for method, template in routes:
                path = "/".join("x" if part.startswith("{") else part for part in template.split("/"))
                answer = http.request(method, path, json=None if method in ("GET", "DELETE") else {})
                refused = tally.saw(answer.status_code) in (401, 403)
                if scope == "read" and method == "GET" and path.startswith(("/admin/v1", "/v1/fine_tuning/jobs")):
                    continue  # what it may read is a test of its own; that it changes nothing is below
                if (method, path) == ("GET", "/admin/v1/me"):
                    continue  # what the key is itself
                if path.startswith(("/admin/v1/sessions", "/admin/v1/oidc")):
                    continue  # its owner's logins, and how one begins (tests/unit/controller/test_owners.py)
                if (scope, method, path) == ("metrics", "GET", "/admin/v1/metrics"):
                    continue  # a part of /metrics
                if (scope, method, path) == ("fine_tuning", "POST", "/admin/v1/plan"):
                    continue  # who may submit a job may ask what it would take
                if scope in ("inference", "fine_tuning") and (method, path) == ("GET", "/admin/v1/usage"):
                    continue  # its owner's own, and nobody else's (tests/unit/controller/test_owners.py)
                if not path.startswith(allowed or ("-",)) and not refused and answer.status_code != 404:
                    tally.got_through(f"{scope}: {method} {path} was answered {answer.status_code}")
                if path.startswith("/admin/v1") and method != "GET" and not refused:
                    tally.got_through(f"{scope}: {method} {path} was answered {answer.status_code}")
            for wanted in (["admin"], ["inference", "admin"]):
                answer = http.post("/admin/v1/keys", json={"name": "escalated", "scopes": wanted})
                if tally.saw(answer.status_code) not in (401, 403):
                    tally.got_through(f"{scope} made a key for {wanted}")
            if scope not in ("metrics", "read") and tally.saw(http.get("/metrics").status_code) == 200:
                tally.got_through(f"{scope} reads metrics")
    if made := attacked.key_names() & {"escalated"}:
        tally.got_through(f"keys were made: {made - before}")


# --- what one client can take


@pytest.fixture(scope="module")
def bombs() -> dict[str, bytes]:
    """Made before anybody is timed: it takes this process seconds."""
    most = 8 * MIB - 4096
    ask = chat_body()[:-1]

    def filled(before: bytes, unit: bytes, after: bytes) -> bytes:
        return before + unit * ((most - len(before) - len(after)) // len(unit)) + after

    made = {
        "empty arrays": filled(ask + b',"x":[0', b",[]", b"]}"),
        "empty objects": filled(ask + b',"metadata":[0', b",{}", b"]}"),
        "depth": ask + b',"x":' + b"[" * (most // 2) + b"]" * (most // 2) + b"}",
        "depth of objects": ask + b',"x":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}",
        "numbers": filled(ask + b',"x":[1', b",1", b"]}"),
        "long numbers": ask + b',"x":' + b"9" * (most // 2) + b"}",
        "keys": b"".join([ask, *(b',"k%d":1' % n for n in range(500_000)), b"}"]),
        "one key again": filled(ask, b',"model":"a"', b"}"),
        "escapes": filled(ask + b',"x":"', b"\\u0041", b'"}'),
        "stops": filled(ask + b',"stop":["a"', b',"b"', b"]}"),
        "biases": b"".join([ask, b',"logit_bias":{"0":1', *(b',"%d":1' % n for n in range(1, 400_000)), b"}}"]),
        "messages": filled(
            b'{"model":"%b","messages":[{"role":"user","content":"a"}' % MODEL.encode(),
            b',{"role":"user","content":"a"}',
            b"]}",
        ),
        "tools": filled(
            ask + b',"tools":[{"type":"function","function":{"name":"a"}}',
            b',{"type":"function","function":{"name":"a"}}',
            b"]}",
        ),
        "bad words": filled(ask + b',"bad_words":["a"', b',"a"', b"]}"),
    }
    schema = {"type": "object"}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    deep = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    wide = {"type": "object", "properties": {f"p{n}": {"enum": [f"{n}-{m}" for m in range(40)]} for n in range(2000)}}
    made |= {
        "deep schema": chat_body(response_format=deep),
        "wide schema": chat_body(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": wide}}),
        **{
            f"regex {pattern[:12]}": chat_body(structured_outputs={"regex": pattern})
            for pattern in (
                "(a{1,1000}){1,1000}",
                "((a*)*)*b" * 500,
                "(" * 5000 + ")" * 5000,
                "[a-z]{100000}",
                "(.{0,255}){0,255}",
                "(a|b|c){1,99999}",
            )
        },
        "choices": chat_body(structured_outputs={"choice": [f"choice {n}" for n in range(100_000)]}),
        "grammar": chat_body(structured_outputs={"grammar": "root ::= " + "| ".join(f'"{n}"' for n in range(50_000))}),
    }
    return made


def test_bodies_that_cost_more_than_they_weigh(bombs, attacked, tally):
    """Eight MiB of anything are refused or answered without a neighbour waiting."""
    key = attacked.key(["inference"])
    must_refuse = {name for name in bombs if name.startswith(("choices", "grammar")) or "schema" in name}
    must_refuse |= {"empty arrays", "empty objects", "depth", "depth of objects"}
    must_refuse |= {"bad words", "biases", "stops", "tools"}
    with attacked.front.http(key) as http:
        for name, body in bombs.items():
            paths = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/responses/input_tokens")
            for path in paths if name not in must_refuse else (CHAT,):
                answer = http.post(path, content=body, headers={"content-type": "application/json"})
                tally.saw(answer.status_code)
                if path == CHAT and name in must_refuse and answer.status_code == 200:
                    tally.got_through(f"{name}: {len(body)} bytes went on to an engine")
    with attacked.front.http(attacked.key(["fine_tuning"])) as http:
        for path in ("/v1/fine_tuning/jobs", "/v1/uploads"):
            for name in ("empty arrays", "depth", "keys", "long numbers"):
                answer = http.post(path, content=bombs[name], headers={"content-type": "application/json"})
                if tally.saw(answer.status_code) < 400:
                    tally.got_through(f"{path} took {name}")


def test_slow_clients(attacked, tally):
    """Heads and bodies that come a byte at a time are cut off, each within seconds."""
    key, wires = attacked.key(["inference", "fine_tuning"]), []
    starts = [
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\n",
        head("POST", CHAT, key, "Content-Length: 5000"),
        head("POST", "/v1/files", key, "Content-Length: 500000"),
        head("POST", CHAT, key, "Transfer-Encoding: chunked") + b"1\r\n{\r\n",
        b"",
    ]
    began_s = time.monotonic()
    try:
        for turn in range(200):
            wire = socket.create_connection(("127.0.0.1", attacked.front.port), timeout=1)
            wire.sendall(starts[turn % len(starts)])
            wires.append(wire)
        living = list(wires)
        while living and time.monotonic() - began_s < 30:
            time.sleep(0.5)
            for wire in list(living):
                try:
                    wire.sendall(b"1")
                    wire.setblocking(False)
                    if wire.recv(1 << 16) == b"":
                        living.remove(wire)
                    wire.settimeout(1)
                except BlockingIOError:
                    wire.settimeout(1)
                except OSError:
                    living.remove(wire)
        for wire in wires:
            tally.saw(0 if wire not in living else 200)
        if living:
            tally.got_through(f"{len(living)} of {len(wires)} connections live on after half a minute of dripping")
    finally:
        for wire in wires:
            wire.close()


def test_revoked_keys(attacked, tally):
    """A key that is revoked ends what it has begun: bodies on their way, streams, what waits."""
    for turn in range(10):
        made = attacked.made_key(["inference", "fine_tuning"])
        key, body = made["key"], chat_body(stream=True, user="4000 0.01")
        with attacked.raw(5) as dripping, attacked.raw(5) as streaming, attacked.raw(5) as uploading:
            dripping.sendall(head("POST", CHAT, key, f"Content-Length: {len(body)}") + body[:10])
            uploading.sendall(
                head(
                    "POST", "/v1/files", key, "Content-Length: 100000", "Content-Type: multipart/form-data; boundary=b"
                )
                + b"--b\r\n"
            )
            streaming.sendall(head("POST", CHAT, key, f"Content-Length: {len(body)}") + body)
            assert b"200 OK" in streaming.recv(1 << 16)
            with attacked.front.http() as http:
                assert http.delete(f"/admin/v1/keys/{made['id']}").status_code == 200
            for name, wire, rest in (
                ("stream", streaming, b""),
                ("body", dripping, body[10:]),
                ("upload", uploading, b"x" * 1000),
            ):
                came = b""
                try:
                    wire.sendall(rest)
                    while data := wire.recv(1 << 16):
                        came += data
                except TimeoutError:
                    tally.got_through(f"turn {turn}: the {name} of a revoked key lives on")
                except OSError:
                    pass  # a reset ends it as well
                tally.saw(next(iter(statuses(came)), 0))
                if name != "stream" and b"200 OK" in came:
                    tally.got_through(f"turn {turn}: the {name} of a revoked key was answered")
        with attacked.front.http(key) as http:
            taken = tally.saw(http.get("/v1/models").status_code) != 401
        if taken:
            tally.got_through(f"turn {turn}: a revoked key is taken")


def test_quotas(attacked, tally):
    """Who leaves early has used what was computed, and a rate is a rate over however many connections."""
    thrifty = attacked.made_key(["inference"], owner="thrifty", tokens_per_minute=60)
    body = chat_body(stream=True, user="200 0.005")
    answers = []
    for _ in range(60):  # leaves when the first words are there
        with attacked.raw() as wire:
            wire.sendall(head("POST", CHAT, thrifty["key"], f"Content-Length: {len(body)}") + body)
            came = wire.recv(4096)
            while came.startswith(b"HTTP/1.1 200") and came.count(b'"content"') < 3 and (more := wire.recv(4096)):
                came += more
        answers.append(tally.saw(next(iter(statuses(came)), 0)))
        time.sleep(0.05)
    if 429 not in answers:
        tally.got_through(f"60 streams left after three tokens each do not use up a quota of 60: {answers}")
    limited = attacked.key(["inference"], owner="limited", requests_per_minute=10)
    good = 0
    for _ in range(60):
        with attacked.front.http(limited) as http:
            good += tally.saw(http.post(CHAT, content=chat_body()).status_code) == 200
    if good > 14:
        tally.got_through(f"{good} of 60 requests of a key for 10 a minute were answered")


def test_files(attacked, tally):
    """Names that lead elsewhere, sizes that are not true, parts beyond what was announced."""
    key = attacked.key(["inference", "fine_tuning"], owner="filer")
    with attacked.front.http(key) as http:
        for name in (
            "../../../tmp/x.jsonl",
            "/etc/passwd",
            "a\x00b.jsonl",
            "a\r\nX: y",
            "." * 300,
            "x" * 5000,
            "",
            "..",
            "-rf",
            "a/b",
            "a\\b",
            "con",
            "\u202etxt.lnosj",
            "<script>.jsonl",
            "%2e%2e%2fx",
        ):
            line = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
            try:
                answer = http.post("/v1/files", files={"file": (name, line.encode())}, data={"purpose": "fine-tune"})
            except (httpx.HTTPError, ValueError):
                continue
            tally.saw(answer.status_code)
            stored = answer.json().get("filename", "") if answer.status_code == 200 else ""
            if "/" in stored or "\x00" in stored or "\n" in stored:
                tally.got_through(f"a file is called {stored!r}")
        upload = http.post(
            "/v1/uploads",
            json={"purpose": "fine-tune", "filename": "a.jsonl", "bytes": 1, "mime_type": "application/jsonl"},
        ).json()
        taken = 0
        for _ in range(8):
            answer = http.post(f"/v1/uploads/{upload['id']}/parts", files={"data": ("part", b"x" * MIB)})
            taken += tally.saw(answer.status_code) == 200
        if taken:
            tally.got_through(f"an upload that was announced with 1 byte took {taken} MiB")
        boundaries = (b"", b"a" * 5000, b"\x00", b'"', b"a\r\nX: y")
        for boundary, content in itertools.product(boundaries, (b"", b"--", b"--a\r\n" * 50_000)):
            kind = f"Content-Type: multipart/form-data; boundary={boundary.decode('latin-1')}"
            lines = (f"Content-Length: {len(content)}", kind)
            came = attacked.send(head("POST", "/v1/files", key, *lines) + content, half_close=True)
            if any(tally.saw(status) < 400 for status in statuses(came)):
                tally.got_through(f"multipart with the boundary {boundary[:20]!r}")
    assert not Path("/tmp/x.jsonl").exists()


# --- others on this machine


def test_sockets_and_files_of_the_box(attacked, routes, tally):
    """Nothing is open to other users; on the gateways' socket somebody without identity is nobody."""
    for path in (attacked.front.folder, *attacked.front.folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISSOCK(mode) or path.suffix == ".db" or path == attacked.front.folder:
            tally.saw(200)
            if mode & 0o077 and path.parent.lstat().st_mode & 0o077:
                tally.got_through(f"{path.name} has mode {mode & 0o777:o}")
    for path in [attacked.front.folder / "c.sock"]:  # the gateways', of which each knows a token
        for method, target in routes:
            if "{" in target:
                continue
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://box", timeout=10) as http:
                answer = http.request(method, target, json=None if method in ("GET", "DELETE") else {})
            if tally.saw(answer.status_code) != 401:
                tally.got_through(f"{method} {target} without identity was answered {answer.status_code}")
