"""One byte, one request, one principal: what the controller and the engines read as heads are heads that the gateway
wrote, whatever clients send and whenever the other end answers, stalls, closes or dies.

The upstreams here keep to the framing that they are promised, as uvicorn does: whoever owes them a byte has the next
request read as that byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Box, Start, Wire, chat, request_bytes
from .upstreams import chat_answer

TOKEN = "s3cret" * 8
# What an attacker would like to be read as a head; without the token it could not be more than this.
EVIL = (
    b"GET /admin/v1/keys HTTP/1.1\r\nhost: appliance\r\nx-appliance-key-id: key_admin\r\nx-appliance-scopes: admin\r\n"
    b"x-evil: 1\r\n\r\n"
)
KEY = "sk-test-all"
AUTH = f"Host: a\r\nAuthorization: Bearer {KEY}\r\n".encode()


class Listener:
    """An upstream that reads what it is promised and behaves, request by request, as `behave` says."""

    def __init__(self, behave: Callable[[], str], body: bytes = b'{"object":"list","data":[]}') -> None:
        self._behave = behave
        self._answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
            len(body),
            body,
        )
        self.heads: list[bytes] = []
        self.garbage: list[bytes] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self, path: str) -> Listener:
        Path(path).unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path)
        return self

    def stop(self) -> None:
        """As a restart does: nothing listens, and every connection is gone."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except asyncio.IncompleteReadError as error:
            self.garbage.append(error.partial)  # a body that broke off, or bytes that are not a head
        except (ConnectionError, asyncio.LimitOverrunError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        how = self._behave()
        if how == "dies":
            writer.transport.abort()
            return False
        if how == "early":
            writer.write(self._answer)
        lowered = head.lower()
        if found := re.search(rb"\r\ncontent-length: (\d+)\r\n", lowered):
            await reader.readexactly(int(found[1]))
        elif b"\r\ntransfer-encoding: chunked\r\n" in lowered:
            while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
                await reader.readexactly(size + 2)
            await reader.readexactly(2)
        if how == "in pieces":
            for piece in (self._answer[:9], self._answer[9:40], self._answer[40:-1], self._answer[-1:]):
                writer.write(piece)
                await asyncio.sleep(0)
        elif how != "early":
            writer.write(self._answer)
        # It had announced to keep the connection, and was idle for too long.
        return how != "closes"


def _written_by_the_gateway(head: bytes) -> bool:
    lines = head[:-4].split(b"\r\n")
    names = [line.partition(b": ")[0].lower() for line in lines[1:]]
    values = dict(line.partition(b": ")[::2] for line in lines[1:])
    if lines[0].startswith(b"POST /v1/chat/completions ") or b"Host: engine" in lines:
        return lines[1] == b"Host: engine" and names.count(b"x-request-id") == 1 and b"x-evil" not in names
    once = all(names.count(name) == 1 for name in (b"x-appliance-gateway", b"x-appliance-key-id", b"x-request-id"))
    return once and values[b"x-appliance-gateway"] == TOKEN.encode() and values[b"x-appliance-key-id"] == b"key_all"


def _attacks(rng: random.Random) -> list[bytes]:
    """What one client sends on one connection, in pieces."""
    length = len(EVIL)
    cut = rng.randrange(length)
    get, post = b"GET /v1/files HTTP/1.1\r\n" + AUTH, b"POST /v1/fine_tuning/jobs HTTP/1.1\r\n" + AUTH
    delete = b"DELETE /v1/files/file-1 HTTP/1.1\r\n" + AUTH
    upload = b"POST /v1/files HTTP/1.1\r\n" + AUTH
    framed = b"%x\r\n%b\r\n" % (length, EVIL)
    return rng.choice(
        [
            [get + b"\r\n"],
            [get + b"\r\n" + get + b"\r\n" + delete + b"\r\n"],
            [get + b"Content-Length: %d\r\n\r\n" % length + EVIL],
            [get + b"Content-Length: %d\r\n\r\n" % length, EVIL],
            [get + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"],
            [delete + b"Content-Length: %d\r\n\r\n" % length + EVIL],
            [delete + b"Content-Length: %d\r\n\r\n" % length, EVIL[:cut], EVIL[cut:]],
            [post + b"Content-Length: %d\r\n\r\n" % length + EVIL],
            [post + b"Content-Length: %d\r\n\r\n" % length, EVIL[:cut], EVIL[cut:] + get + b"\r\n"],
            [post + b"Content-Length: %d\r\n\r\n" % length + EVIL[:cut]],
            [upload + b"Content-Length: %d\r\n\r\n" % (length + 7) + EVIL],
            [upload + b"Content-Length: %d\r\n\r\n" % (3 * length), EVIL, EVIL, EVIL],
            [upload + b"Transfer-Encoding: chunked\r\n\r\n", framed, framed + b"0\r\n\r\n" + get + b"\r\n"],
            [upload + b"Transfer-Encoding: chunked\r\n\r\n" + framed[:cut]],
            [upload + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"zz\r\n"],
            [upload + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\nX-Appliance-Gateway: x\r\n\r\n"],
            [upload + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + EVIL],
            [upload + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + EVIL],
            [upload + b"Transfer_Encoding: chunked\r\nContent-Length: 0\r\n\r\n" + EVIL],
            [upload + b"Content-Length: 0\r\nContent_Length: %d\r\n\r\n" % length + EVIL],
            [upload + b"Connection: Content-Length\r\nContent-Length: %d\r\n\r\n" % length + EVIL],
            [post + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % length, EVIL],
            [b"POST /v1/files?x=%0d%0a HTTP/1.1\r\n" + AUTH + b"Content-Length: %d\r\n\r\n" % length + EVIL],
            [b"POST /v1/files HTTP/1.0\r\n" + AUTH + b"Content-Length: %d\r\n\r\n" % length + EVIL + get + b"\r\n"],
            [request_bytes("POST", "/v1/chat/completions", chat(user=EVIL.decode()), key=KEY)],
            [request_bytes("POST", "/v1/chat/completions", chat(), key=KEY) * 2 + EVIL],
            [request_bytes("POST", "/v1/responses", {"model": "m", "input": EVIL.decode(), "background": True})],
            [request_bytes("POST", "/v1/responses", {"model": "m", "input": "a", "previous_response_id": "resp_1"})],
        ]
    )


async def _drain(wire: Wire) -> None:
    """Read what is answered, until nothing more comes or the connection ends."""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(0.004):
            while await wire.reader.read(65536):
                pass


BEHAVIOURS = ("answers", "early", "early", "early", "in pieces", "closes", "dies")


@pytest.mark.parametrize("seed", range(5))
async def test_heads_are_heads_that_the_gateway_wrote(start_box: Start, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    (tmp_path / "token").write_text(TOKEN)
    box = await start_box(
        token_path=str(tmp_path / "token"),
        sweep_s=0.05,
        holds={"hold_s": 1.0},
        limits={"controller_wait_s": 1.0, "upstream_silence_s": 1.0},
    )
    controller_path, engine_path = box.gateway.config.controller_socket, str(box.folder / "e0.sock")
    controller = await Listener(lambda: rng.choice(BEHAVIOURS)).start(controller_path)
    engine = await Listener(lambda: rng.choice(BEHAVIOURS), json.dumps(chat_answer()).encode()).start(engine_path)
    everyone = [controller, engine]
    box.serve("m", "e0")
    for _ in range(60):
        wire = await box.connect()
        victim = await box.connect()
        for piece in _attacks(rng):
            wire.writer.write(piece)
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        if rng.random() < 0.7:
            await _drain(wire)
        if rng.random() < 0.6:
            wire.close()
        # A connection in disorder shows itself in the next requests on it.
        for _ in range(2):
            await victim.send(request_bytes("GET", "/v1/files", key=KEY))
            assert (await victim.response()).status in (200, 502), "it waits for what another request owes"
        if rng.random() < 0.05:
            controller.stop()
            controller = await Listener(lambda: rng.choice(BEHAVIOURS)).start(controller_path)
            everyone.append(controller)
    heads = [head for listener in everyone for head in listener.heads]
    assert len(heads) > 40
    assert [head for head in heads if not _written_by_the_gateway(head)] == []
    for listener in everyone:
        listener.stop()


async def test_a_get_with_a_body_goes_nowhere_and_costs_nobody_a_connection(box: Box) -> None:
    controller = await Listener(lambda: "answers").start(box.gateway.config.controller_socket)
    for method, target in (("GET", "/v1/files"), ("DELETE", "/v1/files/file-1"), ("GET", "/metrics")):
        wire = await box.connect()
        await wire.send(request_bytes(method, target, EVIL) + request_bytes("GET", "/v1/files"))
        refused = await wire.response()
        assert refused.status == 400 and refused.error["code"] == "unexpected_body"
        assert method in refused.error["message"]
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


async def test_a_request_whose_body_was_passed_on_is_never_sent_again(box: Box) -> None:
    """Its connection was closed for idleness at that moment; the head alone came again, and ate the next request."""
    turns = iter(["answers", "dies", "answers"])
    controller = await Listener(lambda: next(turns)).start(box.gateway.config.controller_socket)
    assert (await box.ask("GET", "/v1/files")).status == 200
    lost = await box.ask("POST", "/v1/fine_tuning/jobs", EVIL)
    assert lost.status == 502 and lost.error["code"] == "controller_away"
    assert (await box.ask("GET", "/v1/files")).status == 200
    assert [head.split(b" ")[0] for head in controller.heads] == [b"GET", b"POST", b"GET"]
    controller.stop()


async def test_a_get_is_sent_again_on_another_connection(box: Box) -> None:
    turns = iter(["answers", "dies", "answers"])
    controller = await Listener(lambda: next(turns)).start(box.gateway.config.controller_socket)
    assert (await box.ask("GET", "/v1/files")).status == 200
    assert (await box.ask("GET", "/v1/files")).status == 200
    assert len(controller.heads) == 3
    controller.stop()
