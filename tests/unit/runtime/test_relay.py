"""Tunnels and copies between nodes, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import json

import pytest

from runtime.errors import RelayRefused
from runtime.relay import Relay, Tunnels, fetch_directory

TOKEN = b"a token that both nodes have"


@pytest.fixture
async def there(tmp_path):
    """Another node: an engine that answers in capitals, and a version to copy."""
    (tmp_path / "run").mkdir()
    (tmp_path / "store" / "v1").mkdir(parents=True)
    (tmp_path / "store" / "v1" / "weights").write_bytes(bytes(range(256)) * 9000)
    (tmp_path / "store" / "v1" / "empty").write_bytes(b"")
    (tmp_path / "store" / "v1" / "zmanifest").write_bytes(b"z" * 532)
    (tmp_path / "secret").write_text("not below a folder that is served")
    (tmp_path / "store" / "v1" / "link").symlink_to(tmp_path / "secret")

    async def shout(reader, writer):
        while line := await reader.readline():
            writer.write(line.upper())
            await writer.drain()
        writer.close()

    engine = await asyncio.start_unix_server(shout, str(tmp_path / "run" / "engine.sock"))
    relay = Relay("127.0.0.1", TOKEN, sockets=(tmp_path / "run",), folders=(tmp_path / "store",))
    yield await relay.start(), relay, engine
    await relay.stop()
    engine.close()


async def test_a_local_socket_comes_out_at_the_engine(there, tmp_path):
    address, *_ = there
    tunnels, local = Tunnels(TOKEN), tmp_path / "here.sock"
    await tunnels.open(local, address, tmp_path / "run" / "engine.sock")
    assert local.stat().st_mode & 0o777 == 0o600
    for _ in range(2):
        reader, writer = await asyncio.open_unix_connection(str(local))
        writer.write(b"hello\n")
        assert await reader.readline() == b"HELLO\n"
        writer.write_eof()  # half closed: the engine sees the end, and its own end comes back
        assert await reader.read() == b""
        writer.close()
    await tunnels.close(local)
    assert not local.exists()


async def test_an_engine_that_is_gone_breaks_the_connection(there, tmp_path):
    address, _, engine = there
    tunnels, local = Tunnels(TOKEN), tmp_path / "here.sock"
    await tunnels.open(local, address, tmp_path / "run" / "nobody.sock")
    reader, writer = await asyncio.open_unix_connection(str(local))
    with pytest.raises(ConnectionError):
        writer.write(b"hello\n")
        if await reader.read() == b"":
            raise ConnectionResetError
    await tunnels.close(local)


async def test_a_directory_arrives_byte_for_byte_and_counted(there, tmp_path):
    address, relay, _ = there
    got = await fetch_directory(address, TOKEN, tmp_path / "store" / "v1", tmp_path / "copy")
    assert got == relay.bytes_sent == 256 * 9000 + 532
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["empty", "weights", "zmanifest"]
    source, copy = tmp_path / "store" / "v1" / "weights", tmp_path / "copy" / "weights"
    assert copy.read_bytes() == source.read_bytes()
    assert (tmp_path / "copy" / "zmanifest").read_bytes() == b"z" * 532


async def test_only_the_files_named_are_copied(there, tmp_path):
    names = ("zmanifest", "absent", "../secret", "link")
    assert await fetch_directory(there[0], TOKEN, tmp_path / "store" / "v1", tmp_path / "copy", names) == 532
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["zmanifest"]


@pytest.mark.parametrize("token, path", [(b"wrong", "store/v1"), (TOKEN, "run"), (TOKEN, "store/../secret")])
async def test_strangers_and_other_places_are_refused(there, tmp_path, token, path):
    with pytest.raises(RelayRefused):
        await fetch_directory(there[0], token, tmp_path / path, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


async def test_the_token_never_travels(tmp_path):
    seen = []

    async def listen(reader, writer):
        writer.write(b"nonce\n")
        seen.append(await reader.readline())
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    with pytest.raises(RelayRefused):
        await fetch_directory(server.sockets[0].getsockname()[:2], TOKEN, tmp_path, tmp_path / "copy")
    assert TOKEN not in seen[0] and len(json.loads(seen[0])["proof"]) == 64
    server.close()
