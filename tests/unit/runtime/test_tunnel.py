"""Tunnels and copies between nodes, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import time

import pytest

from appliance.nodes.certificate_authority import Authority, Credentials
from runtime.errors import TunnelRefused
from runtime.network.tunnel import UNREACHED_HEAD, Shared, Tunnels, TunnelServer, fetch_directory

TOKEN = b"a token that both nodes have"
SHARED = Shared(TOKEN)


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
    server = TunnelServer("127.0.0.1", SHARED, sockets=(tmp_path / "run",), folders=(tmp_path / "store",))
    yield await server.start(), server, engine
    await server.stop()
    engine.close()


async def test_a_local_socket_comes_out_at_the_engine(there, tmp_path):
    address, *_ = there
    tunnels, local = Tunnels(SHARED), tmp_path / "here.sock"
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


async def test_no_tunnel_leads_to_what_an_engine_keeps_for_its_own_processes(there, tmp_path):
    """In a folder beside its socket: they trust who reaches it."""
    address, *_ = there
    (tmp_path / "run" / "engine.d").mkdir()
    reached = []
    inner = await asyncio.start_unix_server(lambda r, w: reached.append(w), str(tmp_path / "run" / "engine.d" / "core"))
    tunnels, local = Tunnels(SHARED), tmp_path / "here.sock"
    await tunnels.open(local, address, tmp_path / "run" / "engine.d" / "core")
    reader, _ = await asyncio.open_unix_connection(str(local))
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 10) == b""
    assert not reached
    await tunnels.close(local)
    inner.close()


async def test_an_engine_that_is_gone_breaks_the_connection(there, tmp_path):
    address, _, engine = there
    tunnels, local = Tunnels(SHARED), tmp_path / "here.sock"
    await tunnels.open(local, address, tmp_path / "run" / "nobody.sock")
    reader, writer = await asyncio.open_unix_connection(str(local))
    with pytest.raises(ConnectionError):
        writer.write(b"hello\n")
        if await reader.read() == b"":
            raise ConnectionResetError
    await tunnels.close(local)


async def test_who_asks_a_node_that_is_gone_is_told_that_nobody_was_reached(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = free.getsockname()
    tunnels, local = Tunnels(SHARED), tmp_path / "here.sock"
    await tunnels.open(local, nobody, tmp_path / "engine.sock", UNREACHED_HEAD)
    reader, writer = await asyncio.open_unix_connection(str(local))
    writer.write(b"x" * 4_000_000)  # more than the socket takes: it is read, so that the answer is
    await writer.drain()
    assert await reader.readexactly(len(UNREACHED_HEAD)) == UNREACHED_HEAD
    writer.close()
    await tunnels.close(local)


async def test_who_reads_from_an_engine_hears_that_its_tunnel_was_closed(there, tmp_path):
    """Its node is gone, and a machine without power sends no word of that."""
    address, *_ = there
    tunnels, local = Tunnels(SHARED), tmp_path / "here.sock"
    await tunnels.open(local, address, tmp_path / "run" / "engine.sock")
    reader, writer = await asyncio.open_unix_connection(str(local))
    writer.write(b"hello\n")
    assert await reader.readline() == b"HELLO\n"
    await tunnels.close(local)
    with pytest.raises(ConnectionError):
        if await asyncio.wait_for(reader.read(), 10) == b"":
            raise ConnectionResetError
    writer.close()


@pytest.mark.parametrize("silent", ["before it takes the connection", "after it"])
async def test_a_machine_that_says_nothing_is_waited_for_no_longer_than_a_moment(tmp_path, monkeypatch, silent):
    monkeypatch.setattr("runtime.network.tunnel.CALL_TIMEOUT_S", 0.05)

    async def no_answer(*_, **__):
        await asyncio.Event().wait()

    if silent == "before it takes the connection":
        monkeypatch.setattr(asyncio, "open_connection", no_answer)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with pytest.raises(TimeoutError):
            asking = fetch_directory(listening.getsockname(), SHARED, tmp_path, tmp_path / "copy")
            await asyncio.wait_for(asking, 10)
    assert not (tmp_path / "copy").exists()


async def test_both_ends_ask_the_kernel_to_end_a_connection_whose_other_machine_is_missing(there, tmp_path):
    address, *_ = there
    tunnels, local = Tunnels(SHARED), tmp_path / "here.sock"
    await tunnels.open(local, address, tmp_path / "run" / "engine.sock")
    reader, writer = await asyncio.open_unix_connection(str(local))
    writer.write(b"hello\n")
    assert await reader.readline() == b"HELLO\n"
    asked = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as one:
            if one.family == socket.AF_INET and address in (one.getpeername(), one.getsockname()):
                asked.append(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
                assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert asked == [7000, 7000]
    writer.close()
    await tunnels.close(local)


async def test_a_directory_arrives_byte_for_byte_and_counted(there, tmp_path):
    address, _, _ = there
    got = await fetch_directory(address, SHARED, tmp_path / "store" / "v1", tmp_path / "copy")
    assert got == 256 * 9000 + 532
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["empty", "weights", "zmanifest"]
    source, copy = tmp_path / "store" / "v1" / "weights", tmp_path / "copy" / "weights"
    assert copy.read_bytes() == source.read_bytes()
    assert (tmp_path / "copy" / "zmanifest").read_bytes() == b"z" * 532


async def test_only_the_files_named_are_copied(there, tmp_path):
    names = ("zmanifest", "absent", "../secret", "link")
    assert await fetch_directory(there[0], SHARED, tmp_path / "store" / "v1", tmp_path / "copy", names) == 532
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["zmanifest"]


@pytest.mark.parametrize("token, path", [(b"wrong", "store/v1"), (TOKEN, "run"), (TOKEN, "store/../secret")])
async def test_strangers_and_other_places_are_refused(there, tmp_path, token, path):
    with pytest.raises(TunnelRefused):
        await fetch_directory(there[0], Shared(token), tmp_path / path, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


async def test_the_token_never_travels(tmp_path):
    seen = []

    async def listen(reader, writer):
        writer.write(b"nonce\n")
        seen.append(await reader.readline())
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    with pytest.raises(TunnelRefused):
        await fetch_directory(server.sockets[0].getsockname()[:2], SHARED, tmp_path, tmp_path / "copy")
    assert TOKEN not in seen[0] and len(json.loads(seen[0])["proof"]) == 64
    server.close()


@pytest.mark.parametrize(
    "change",
    [
        {"path": "secret"},
        {"ask": "socket"},
        {"names": ["weights"]},
        {"nonce": "0" * 64},
        {"more": 1},
        {"proof": "0" * 64},
        {"proof": None},
        {"proof": "é"},
    ],
    ids=str,
)
async def test_a_greeting_that_somebody_changed_on_its_way_is_refused(there, tmp_path, change):
    reader, writer = await asyncio.open_connection(*there[0])
    nonce = (await reader.readline()).decode().strip()
    greeting = {"ask": "directory", "path": str(tmp_path / "store" / "v1"), "nonce": "1" * 64}
    greeting["proof"] = SHARED.proof("ask", greeting, nonce)
    writer.write(json.dumps({**greeting, **change}).encode() + b"\n")
    assert "the proof of the token is wrong" in json.loads(await reader.read())["error"]
    writer.close()


async def test_a_greeting_counts_once_and_a_servers_own_words_do_not_open_it(there, tmp_path):
    greeting, answers = {"ask": "directory", "path": str(tmp_path / "store" / "v1"), "nonce": "1" * 64}, []
    for who in ("ask", "ask", "answer"):
        reader, writer = await asyncio.open_connection(*there[0])
        nonce = (await reader.readline()).decode().strip()
        if who == "answer" or not answers:
            greeting["proof"] = SHARED.proof(who, greeting, nonce)
        writer.write(json.dumps(greeting).encode() + b"\n")
        answers.append(json.loads(await reader.readline()))
        writer.close()
    assert ["ok" in answer for answer in answers] == [True, False, False]


async def test_a_stranger_in_a_servers_place_is_not_believed(tmp_path):
    async def listen(reader, writer):
        writer.write(b"nonce\n")
        await reader.readline()
        writer.write(json.dumps({"ok": [["weights", 3]], "proof": "0" * 64}).encode() + b"\nbad")
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    with pytest.raises(TunnelRefused, match="does not know the token"):
        await fetch_directory(server.sockets[0].getsockname()[:2], SHARED, tmp_path, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    server.close()


@pytest.mark.parametrize("line", [b"[]\n", b"1\n", b"{}\n", b"null\n", b"\xff\n", b"x" * 9000 + b"\n", b""])
async def test_whatever_a_stranger_says_the_server_goes_on(there, tmp_path, line):
    reader, writer = await asyncio.open_connection(*there[0])
    await reader.readline()
    writer.write(line)
    writer.write_eof()
    await reader.read()
    writer.close()
    assert await fetch_directory(there[0], SHARED, tmp_path / "store" / "v1", tmp_path / "copy")


async def test_no_tunnel_on_a_network_without_certificates():
    with pytest.raises(TunnelRefused, match="no certificate"):
        await TunnelServer("192.0.2.1", SHARED, sockets=(), folders=()).start()


@pytest.fixture
def nodes(tmp_path):
    """What two nodes of a box and one of another share; all have got hold of the same token."""

    box, joined = Authority(tmp_path / "box"), Credentials(tmp_path / "joined")
    home = box.prepare("n0", "127.0.0.1")
    request = joined.new_request("n1", "127.0.0.1")
    joined.keep(home.files.authority.read_bytes(), box.sign(request, "n1", "127.0.0.1"))
    other = Authority(tmp_path / "other").prepare("n0", "127.0.0.1")
    return [Shared(TOKEN, credentials.files) for credentials in (home, joined, other)]


async def test_between_nodes_all_is_tls_and_each_side_shows_its_certificate(there, nodes, tmp_path, monkeypatch):
    home, joined, other = nodes
    server = TunnelServer("127.0.0.1", home, sockets=(tmp_path / "run",), folders=(tmp_path / "store",))
    address, source = await server.start(), tmp_path / "store" / "v1"
    assert await fetch_directory(address, joined, source, tmp_path / "copy") == 256 * 9000 + 532
    assert (tmp_path / "copy" / "weights").read_bytes() == (source / "weights").read_bytes()
    monkeypatch.setattr("runtime.network.tunnel.GREETING_TIMEOUT_S", 0.5)  # those who are at home may need longer
    for number, stranger in enumerate([other, Shared(TOKEN)]):
        with pytest.raises((TunnelRefused, OSError, TimeoutError)):
            await fetch_directory(address, stranger, source, tmp_path / f"stolen-{number}")
    without = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    without.check_hostname, without.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(OSError):  # the box asks for a certificate before it says a word
        reader, writer = await asyncio.open_connection(*address, ssl=without)
        if not await reader.readline():
            raise ConnectionResetError
    await server.stop()


async def test_in_a_tunnel_under_tls_each_end_sees_the_other_leave(nodes, tmp_path):
    home, joined, _ = nodes
    left = asyncio.Event()

    async def engine(reader, writer):
        writer.write((await reader.readline()).upper() * 50_000)
        if await reader.readline() == b"go\n":  # the engine leaves first: all that it said arrives
            writer.close()
        else:
            left.set()

    (tmp_path / "run").mkdir()
    serving = await asyncio.start_unix_server(engine, str(tmp_path / "run" / "engine.sock"))
    server, tunnels = TunnelServer("127.0.0.1", home, sockets=(tmp_path / "run",), folders=()), Tunnels(joined)
    await tunnels.open(tmp_path / "here.sock", await server.start(), tmp_path / "run" / "engine.sock")
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "here.sock"))
    writer.write(b"hello\ngo\n")
    assert await asyncio.wait_for(reader.read(), 10) == b"HELLO\n" * 50_000
    writer.close()
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "here.sock"))
    writer.write(b"hello\n")
    assert await reader.readline() == b"HELLO\n"
    writer.close()
    await asyncio.wait_for(left.wait(), 10)
    await tunnels.close(tmp_path / "here.sock")
    await server.stop()
    serving.close()


async def test_a_removed_node_gets_no_tunnel_and_may_have_one_again_with_a_later_certificate(there, nodes, tmp_path):
    home, joined, _ = nodes
    server = TunnelServer("127.0.0.1", home, sockets=(tmp_path / "run",), folders=(tmp_path / "store",))
    address, source = await server.start(), tmp_path / "store" / "v1"
    removed = home.certificate.removed
    removed.remove("n2")
    assert await fetch_directory(address, joined, source, tmp_path / "before"), "another node was"
    removed.remove("n1", time.time())
    with pytest.raises(TunnelRefused, match="removed from the box"):
        await fetch_directory(address, joined, source, tmp_path / "stolen")
    assert not (tmp_path / "stolen").exists() and removed.file.stat().st_mode & 0o777 == 0o600
    assert removed.out() == {"n1", "n2"}
    removed.give("n1")
    removed.joined_anew("n1")
    assert removed.out() == {"n2"}
    with pytest.raises(TunnelRefused, match="removed from the box"):
        await fetch_directory(address, joined, source, tmp_path / "stolen")
    removed.file.with_name("given.json").unlink()
    removed.remove("n1", time.time() - 60)  # long before this certificate was given out
    assert await fetch_directory(address, joined, source, tmp_path / "after")
    await server.stop()


async def test_what_a_node_has_open_ends_when_it_is_removed(there, nodes, tmp_path, monkeypatch):
    """Over a tunnel that it had opened before, it went on talking to an engine."""
    monkeypatch.setattr("runtime.network.tunnel.LOOK_S", 0.01)
    home, joined, _ = nodes
    server = TunnelServer("127.0.0.1", home, sockets=(tmp_path / "run",), folders=())
    tunnels, local = Tunnels(joined), tmp_path / "local.sock"
    await tunnels.open(local, await server.start(), tmp_path / "run" / "engine.sock")
    reader, writer = await asyncio.open_unix_connection(local)
    home.certificate.removed.remove("n2")
    writer.write(b"one\n")
    assert await reader.readline() == b"ONE\n", "another node was"
    home.certificate.removed.remove("n1", time.time())
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()
    await tunnels.close(local)
    await server.stop()


async def test_a_list_of_removed_nodes_that_cannot_be_read_lets_nobody_in(there, nodes, tmp_path):
    home, joined, _ = nodes
    server = TunnelServer("127.0.0.1", home, sockets=(), folders=(tmp_path / "store",))
    home.certificate.removed.file.write_text("torn {")
    with pytest.raises(TunnelRefused):
        await fetch_directory(await server.start(), joined, tmp_path / "store" / "v1", tmp_path / "copy")
    await server.stop()
