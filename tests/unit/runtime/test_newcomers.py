"""Few connections of whom nothing is known are held at a time, and who means it comes in between them."""

from __future__ import annotations

import asyncio
import os
import ssl

import pytest

from appliance.nodes.certificate_authority import Authority
from runtime import newcomers
from runtime.newcomers import Newcomers

MOST = 8


@pytest.fixture(params=[False, True], ids=["plain", "TLS"])
async def served(request, tmp_path, monkeypatch):
    monkeypatch.setattr(newcomers, "GRACE_S", 0.05)
    ours, theirs = None, None
    if request.param:
        ours = Authority(tmp_path / "ca").prepare("n0", "127.0.0.1").server_context()
        theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        theirs.check_hostname, theirs.verify_mode = False, ssl.CERT_NONE

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if line == b"stay\n":
            server.is_known()
        writer.write(line.upper())
        await reader.read()
        writer.close()

    server = Newcomers(serve, context=ours, handshake_s=30.0, line_bytes=1 << 16, most=MOST)
    where = await server.start("127.0.0.1", 0)
    yield where, theirs
    await server.stop()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def said(where, theirs, word: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*where, ssl=theirs)
        writer.write(word + b"\n")
        assert await reader.readline() == word.upper() + b"\n"
    return reader, writer


async def test_strangers_who_say_nothing_take_few_descriptors_and_keep_nobody_out(served):
    where, theirs = served
    staying = [await said(where, theirs, b"stay") for _ in range(MOST + 2)]  # who is known is no newcomer any more
    before = descriptors()
    silent = [await asyncio.open_connection(*where) for _ in range(5 * MOST)]
    await asyncio.sleep(0.02)
    assert descriptors() - before <= len(silent) + MOST + 1
    _, writer = await said(where, theirs, b"hello")
    for reader, other in staying:
        assert not reader.at_eof() and not other.is_closing()
    for other in [writer, *(one for _, one in [*silent, *staying])]:
        other.close()
