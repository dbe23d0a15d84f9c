"""Attacks on the real gateway process and the real control app, while a neighbour keeps sending requests: hidden
requests, incomplete bodies and costly bodies.

`pytest -s -m soak tests/e2e/test_attacks_soak.py` prints the number of attacks and the neighbour's slowest answer.
"""

import contextlib
import itertools
import json
import os
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.front.box import MODEL, Front, running_front
from tests.front.clients import CHAT, Neighbours

SEED = int(os.environ.get("ATTACK_SEED", time.time()))
MIB = 1 << 20
READ_S = 3.0
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    limits = {"head_timeout_s": 3.0, "body_grace_s": 3.0, "keepalive_s": 5.0}
    with running_front(limits=limits, sweep_s=0.1) as running:
        yield running


@pytest.fixture(scope="module")
def key(front: Front) -> str:
    """A key with the scopes for inference and fine-tuning."""
    with front.http() as http:
        made = http.post("/admin/v1/keys", json={"name": "attacker", "scopes": ["inference", "fine_tuning"]})
    return made.raise_for_status().json()["key"]


@pytest.fixture
def statuses_seen(front: Front, key: str) -> Iterator[list[int]]:
    """Collects statuses of answers to an attack, then checks: no new key, server error or harmed neighbour."""
    seen: list[int] = []
    before = key_names(front)
    with Neighbours(front) as neighbours:
        yield seen
    print(f"\n{len(seen)} attacks; slowest of {neighbours.asked} neighbour answers {neighbours.slowest_s:.2f} s")
    assert seen and not [status for status in seen if status >= 500 and status not in (501, 503, 507)]
    assert not neighbours.failed and key_names(front) == before


def key_names(front: Front) -> set[str]:
    with front.http() as http:
        return {key["name"] for key in http.get("/admin/v1/keys").raise_for_status().json()["data"]}


def send(front: Front, *pieces: bytes) -> bytes:
    """Send these bytes and half-close; return the answer."""
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", front.port), timeout=READ_S) as wire:
        for piece in pieces:
            wire.sendall(piece)
        wire.shutdown(socket.SHUT_WR)
        while data := wire.recv(1 << 16):
            answer += data
    return answer


def statuses(answer: bytes) -> list[int]:
    """Statuses of all answers on one connection; 0 without an answer."""
    lines = [line[9:12] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    return [int(line) for line in lines if line.isdigit()] or [0]


def head(method: str, path: str, key: str, *lines: str) -> bytes:
    fields = (f"{method} {path} HTTP/1.1", "Host: a", f"Authorization: Bearer {key}", *lines)
    return ("\r\n".join(fields) + "\r\n\r\n").encode("latin-1")


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def test_hidden_request_gets_no_answer(front: Front, key: str, statuses_seen: list[int]) -> None:
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
    paths = ("/v1/files", "/v1/responses/resp_1", CHAT, "/admin/v1/status")
    targets = list(itertools.product(("GET", "DELETE", "POST"), paths))
    for (method, path), (name, (lines, body)) in itertools.product(targets, tricks.items()):
        answer = send(front, head(method, path, key, *lines) + body)
        statuses_seen += statuses(answer)
        assert b'"key":"sk-' not in answer.replace(b" ", b"") and b"smuggled" not in answer, (method, path, name)


def test_incomplete_body_is_not_completed_by_next_request(front: Front, key: str, statuses_seen: list[int]) -> None:
    """The gateway reuses its connections to the controller."""
    choice, wanted = random.Random(SEED), b'{"name":"late","scopes":["admin"]}'
    hidden = b"POST /admin/v1/keys HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(wanted), wanted)
    paths = ("/v1/files", "/v1/fine_tuning/jobs", "/v1/batches", "/v1/uploads", "/v1/responses/resp_1/cancel", CHAT)
    with front.http() as other:
        for turn in range(240):
            promised, part = choice.choice((40, 400, 70_000)), choice.choice((b"", b"{", hidden, b"x" * 39))
            with socket.create_connection(("127.0.0.1", front.port), timeout=READ_S) as wire:
                lines = ("Content-Type: application/json", f"Content-Length: {promised}")
                wire.sendall(head("POST", paths[turn % len(paths)], key, *lines) + part[: promised - 1])
                if turn % 3 == 0:
                    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close with a reset
            answer = other.get("/v1/models") if turn % 2 else other.get("/v1/files", params={"limit": 1})
            statuses_seen.append(answer.status_code)
            assert answer.status_code == 200, (turn, part, answer.text)
    for _ in range(40):  # refused before the body is complete
        answer = send(front, head("POST", "/v1/files", "sk-appl-wrong", f"Content-Length: {len(hidden)}"), hidden)
        statuses_seen += statuses(answer)
        assert not any(200 <= status < 400 for status in statuses(answer)), answer


@pytest.fixture(scope="module")
def costly_bodies() -> dict[str, bytes]:
    """Bodies of up to 8 MiB; made here, because it takes seconds."""
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


def test_costly_body_is_refused_or_answered(
    costly_bodies: dict[str, bytes], front: Front, key: str, statuses_seen: list[int]
) -> None:
    refused = {"empty arrays", "empty objects", "depth", "depth of objects", "bad words", "biases", "stops", "tools"}
    refused |= {"choices", "grammar", "deep schema", "wide schema"}
    with front.http(key) as http:
        for name, body in costly_bodies.items():
            for path in (CHAT, "/v1/responses", "/v1/messages", "/v1/fine_tuning/jobs"):
                answer = http.post(path, content=body, headers={"content-type": "application/json"})
                statuses_seen.append(answer.status_code)
                if path == "/v1/fine_tuning/jobs" or (path == CHAT and name in refused):
                    assert 400 <= answer.status_code < 500, (path, name)
