"""Few connections of whom nothing is known are held at a time, and who means it comes in between them."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl

import pytest

from appliance.nodes.certificate_authority import Authority
from runtime.network.newcomers import Newcomers, Serve, talk

MOST = 8


def newcomers(serve: Serve, context: ssl.SSLContext | None) -> Newcomers:
    meet = talk(serve, context=context, handshake_s=30.0, line_bytes=1 << 16)
    return Newcomers(meet, most=MOST, grace_s=0.05)


@pytest.fixture(params=[False, True], ids=["plain", "TLS"])
async def served(request, tmp_path):
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

    server = newcomers(serve, ours)
    where = await server.listen("127.0.0.1", 0)
    yield where, theirs
    await server.stop()


async def at_most(count: int) -> None:
    """Returns once this process has so few descriptors."""
    async with asyncio.timeout(60):
        while len(os.listdir("/proc/self/fd")) > count:
            await asyncio.sleep(0.005)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def said(where, theirs, word: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*where, ssl=theirs)
        writer.write(word + b"\n")
        assert await reader.readline() == word.upper() + b"\n"
    return reader, writer


async def test_strangers_who_say_nothing_take_few_descriptors_and_keep_nobody_out(served):
    where, theirs = served
    staying = [await said(where, theirs, b"stay") for _ in range(MOST + 2)]  # who is known is not a newcomer any more
    before = descriptors()
    silent = [await asyncio.open_connection(*where) for _ in range(5 * MOST)]
    await at_most(before + len(silent) + MOST + 1)
    _, writer = await said(where, theirs, b"hello")
    for reader, other in staying:
        assert not reader.at_eof() and not other.is_closing()
    for other in [writer, *(one for _, one in [*silent, *staying])]:
        other.close()


async def test_who_is_answered_and_does_not_say_farewell_counts_until_it_is_gone(tmp_path):
    """TLS waits half a minute for it, which a stranger who asked for nonsense had as a descriptor, and as many as it
    liked."""
    context = Authority(tmp_path / "ca").prepare("n0", "127.0.0.1").server_context()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readline()).upper())
        writer.close()

    server = newcomers(serve, context)
    where = await server.listen("127.0.0.1", 0)
    before, rude = descriptors(), []
    for _ in range(4 * MOST):
        rude.append(await asyncio.to_thread(without_farewell, where))
    await at_most(before + len(rude) + MOST + 1)
    for one in rude:
        one.close()
    await server.stop()


def without_farewell(where) -> socket.socket:
    """Asks over TLS, reads the answer, and neither ends the TLS nor the connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    inside = context.wrap_bio(incoming, outgoing)
    connection = socket.create_connection(where)
    connection.settimeout(20)

    def do(what, *given):
        while True:
            try:
                done = what(*given)
                connection.sendall(outgoing.read())
                return done
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(65536))

    do(inside.do_handshake)
    do(inside.write, b"hello\n")
    assert do(inside.read, 100) == b"HELLO\n"
    return connection
