"""Requests on the connections to the controller never run into each other (tests/e2e/test_attacks_soak.py: fuzzed)."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable
from itertools import repeat

from .conftest import Box, request_bytes

# What an attacker would like to be read as a head.
EVIL = (
    b"GET /admin/v1/keys HTTP/1.1\r\nhost: appliance\r\nx-appliance-key-id: key_admin\r\nx-appliance-scopes: admin\r\n"
    b"x-evil: 1\r\n\r\n"
)
AUTH = b"Host: a\r\nAuthorization: Bearer sk-test-all\r\n"


class Listener:
    """An upstream that answers each request, or dies of it, and keeps the heads that it read."""

    def __init__(self, turns: Iterable[str]) -> None:
        self._turns = iter(turns)
        self.heads: list[bytes] = []
        self._server: asyncio.Server | None = None

    async def start(self, path: str) -> Listener:
        self._server = await asyncio.start_unix_server(self._serve, path)
        return self

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                if next(self._turns) == "dies":
                    writer.transport.abort()
                    return
                if found := re.search(rb"\r\ncontent-length: (\d+)\r\n", head.lower()):
                    await reader.readexactly(int(found[1]))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()


async def test_a_get_with_a_body_goes_nowhere_and_costs_nobody_a_connection(box: Box) -> None:
    controller = await Listener(repeat("answers")).start(box.gateway.config.controller_socket)
    for method, target in (("GET", "/v1/files"), ("DELETE", "/v1/files/file-1"), ("GET", "/metrics")):
        wire = await box.connect()
        await wire.send(request_bytes(method, target, EVIL) + request_bytes("GET", "/v1/files"))
        refused = await wire.response()
        assert refused.status == 400 and refused.error["code"] == "unexpected_body"
        assert (await wire.response()).status == 200, "the body was read to its end, and no further"
        chunked = await box.connect()
        head = f"{method} {target} HTTP/1.1\r\n".encode() + AUTH + b"Transfer-Encoding: chunked\r\n\r\n"
        await chunked.send(head + b"0\r\n\r\n" + EVIL)
        assert (await chunked.response()).error["code"] == "unexpected_body"
        assert await chunked.eof() == b""
    empty = await box.ask("DELETE", "/v1/files/file-1", b"")
    assert empty.status == 200, "Content-Length: 0 is no body"
    assert [head.split(b" ")[0] for head in controller.heads] == [b"GET", b"GET", b"GET", b"DELETE"]
    controller.stop()


async def test_only_a_request_without_a_body_is_sent_again(box: Box) -> None:
    turns = ["answers", "dies", "answers", "dies", "answers"]
    controller = await Listener(turns).start(box.gateway.config.controller_socket)
    assert (await box.ask("GET", "/v1/files")).status == 200
    lost = await box.ask("POST", "/v1/fine_tuning/jobs", EVIL)
    assert lost.status == 502 and lost.error["code"] == "controller_away"
    for _ in range(2):
        assert (await box.ask("GET", "/v1/files")).status == 200
    assert [head.split(b" ")[0] for head in controller.heads] == [b"GET", b"POST", b"GET", b"GET", b"GET"]
    controller.stop()
