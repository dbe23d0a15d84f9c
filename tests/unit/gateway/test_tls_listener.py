"""Who connects to an endpoint with TLS and says nothing takes few descriptors, and keeps nobody out."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path

import pytest

from .certificates import self_signed
from .conftest import Box, Start, Wire, chat, request_bytes

MOST = 8


@pytest.fixture
async def secure(start_box: Start, tmp_path: Path) -> Box:
    return await secured(start_box, tmp_path)


async def secured(start_box: Start, tmp_path: Path, head_timeout_s: float = 60.0) -> Box:
    cert, key = self_signed(tmp_path)
    limits = {"max_connections": MOST, "head_timeout_s": head_timeout_s}
    box = await start_box(tls_cert_path=str(cert), tls_key_path=str(key), limits=limits)
    await box.engine("e0")
    box.serve("m", "e0")
    return box


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def connected(box: Box) -> Wire:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    wire = Wire(*await asyncio.wait_for(asyncio.open_connection("127.0.0.1", box.port, ssl=context), 60))
    box.wires.append(wire)
    return wire


async def test_strangers_who_begin_no_handshake_take_few_descriptors_and_keep_nobody_out(secure: Box) -> None:
    """17,000 of them had all that a gateway may have: the loop shows a connection only after its handshake."""
    mine = await connected(secure)
    before = descriptors()
    silent = [await asyncio.open_connection("127.0.0.1", secure.port) for _ in range(5 * MOST)]
    silent[-1][1].write(b"\x16\x03\x01\x02")  # the beginning of a handshake
    await secure.until(lambda: secure.state.metrics.events["connection_gave_place"] >= 4 * MOST)
    await secure.until(lambda: descriptors() - before <= len(silent) + MOST)
    for wire in (mine, await connected(secure)):
        await wire.send(request_bytes("POST", "/v1/chat/completions", chat()))
        assert (await wire.response()).status == 200
    for _, writer in silent:
        writer.close()


async def test_a_handshake_that_does_not_come_is_not_waited_for(start_box: Start, tmp_path: Path) -> None:
    secure = await secured(start_box, tmp_path, head_timeout_s=0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", secure.port)
    assert secure.gateway.secure is not None
    assert await asyncio.wait_for(reader.read(), 60) == b""
    await secure.until(lambda: len(secure.gateway.secure or ()) == 0)
    assert secure.state.metrics.events["tls_failed"] == 1
    writer.close()


async def test_plain_http_and_nonsense_end_their_own_connection(secure: Box) -> None:
    for said in (b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", os.urandom(300), b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", secure.port)
        writer.write(said)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 60)
        writer.close()
    wire = await connected(secure)
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat()))
    assert (await wire.response()).status == 200


async def test_what_comes_with_the_handshakes_end_is_not_lost(secure: Box) -> None:
    """A client writes its request with the last message of its handshake: one packet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    inside = context.wrap_bio(incoming, outgoing)
    reader, writer = await asyncio.open_connection("127.0.0.1", secure.port)
    while True:
        try:
            inside.do_handshake()
            break
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
            incoming.write(await asyncio.wait_for(reader.read(65536), 60))
    asked = request_bytes("POST", "/v1/chat/completions", chat())
    inside.write(asked)
    inside.write(asked)
    writer.write(outgoing.read())
    told = b""
    while told.count(b" 200 OK") < 2:
        incoming.write(await asyncio.wait_for(reader.read(65536), 60))
        try:
            while piece := inside.read(65536):
                told += piece
        except ssl.SSLWantReadError:
            continue
    writer.close()
