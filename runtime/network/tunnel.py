"""Connects nodes: tunnels from a Unix socket here to one on another node, and copies of directories.

Each node has one TCP port, open on one address. On a network both sides show certificates of the box's authority (TLS);
without certificates a tunnel server listens on loopback only. Inside the connection, the client gets a nonce and must
answer with a proof under a key derived from the token that the nodes share. The token itself is never sent.

A greeting is one line of JSON, `{"ask": "socket" | "directory", "path": ..., "nonce": hex, "proof": hex}`. The answer
is one line, `{"ok": ..., "proof": hex}` or `{"error": text}`. A proof covers the content of its line, both nonces, and
the sender's role, which prevents replay of an old line or of the other side's line. After the answer:
- "socket": both ends are joined byte by byte;
- "directory": the files follow in the order of the answer, `{"ok": [[name, bytes], ...]}`; with `"names": [...]` in the
  greeting, only those of them that exist.

What a node has open ends when it is removed from the box.

The server serves only directories below its configured ones, and sockets that are configured or lie in a configured
folder, not deeper: there engines keep those of their own processes. It follows no symbolic link out of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from runtime.background_tasks import BackgroundTasks
from runtime.errors import TunnelRefused
from runtime.network.newcomers import Newcomers, talk
from runtime.network.removed_nodes import RemovedNodes
from runtime.network.sockets import private_socket

GREETING_BYTES = 4096
GREETING_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 5.0
"""How long a client waits for a connection and the answer to its greeting."""
CHUNK_BYTES = 1 << 20
LOOK_S = 1.0
"""How often a tunnel server looks whether nodes were removed whose connections it carries."""
UNREACHED = b"x-appliance-unreached"
UNREACHED_HEAD = b"HTTP/1.1 502 Bad Gateway\r\n%b: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % UNREACHED
"""What a tunnel to an HTTP server answers while it does not get there: no byte of the request has reached anybody."""
MISSED_AFTER_S = 3, 1, 4
"""Silence of the other machine's kernel after which it is asked whether it is there, how often, and how many times in
vain. A machine that lost its power or its wire says nothing: without this a stream that only reads waits for ever."""


@dataclass(frozen=True, slots=True)
class NodeCertificate:
    """The PEM files with which a node authenticates itself and verifies other nodes."""

    authority: Path
    certificate: Path
    key: Path

    @property
    def removed(self) -> RemovedNodes:
        return RemovedNodes(self.authority.parent / "removed.json")

    @classmethod
    def below(cls, folder: Path) -> NodeCertificate:
        return cls(folder / "ca.pem", folder / "node.pem", folder / "node.key")

    def context(self, purpose: int) -> ssl.SSLContext:
        """`purpose`: ssl.PROTOCOL_TLS_SERVER or _CLIENT. Both check the other side's certificate; a client also checks
        that it is for the address it connected to."""
        context = ssl.SSLContext(purpose)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.authority)
        context.load_cert_chain(self.certificate, self.key)
        return context


@dataclass(frozen=True)
class Shared:
    """What the nodes of a box share: a token and, on a network, certificates."""

    token: bytes
    certificate: NodeCertificate | None = None

    def proof(self, who: str, said: Mapping[str, Any], *nonces: str) -> str:
        key = hmac.new(self.token, b"appliance relay 1", hashlib.sha256).digest()
        fields = {name: value for name, value in said.items() if name != "proof"}
        return hmac.new(key, json.dumps([who, *nonces, fields], sort_keys=True).encode(), hashlib.sha256).hexdigest()

    def client_context(self) -> ssl.SSLContext | None:
        return None if self.certificate is None else self.certificate.context(ssl.PROTOCOL_TLS_CLIENT)


class TunnelServer:
    """Serves this node's port. Tunnels may end at `sockets` (or in these folders); clients may copy directories below
    `folders`."""

    def __init__(self, address: str, shared: Shared, *, sockets: tuple[Path, ...], folders: tuple[Path, ...]):
        self._address, self._shared, self._sockets, self._folders = address, shared, sockets, folders
        self._newcomers: Newcomers | None = None
        self._at = ("", 0)
        self._certificates: dict[asyncio.Task[Any], Mapping[str, Any]] = {}  # of connections that were let in
        self._background = BackgroundTasks()
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int]:
        """Returns address and port, the same on every call. Raises TunnelRefused off loopback without certificates."""
        if self._newcomers is None:
            certificate = self._shared.certificate
            if certificate is None and not ipaddress.ip_address(self._address).is_loopback:
                raise TunnelRefused(f"no tunnel server at {self._address}: this node has no certificate of the box")
            context = None if certificate is None else certificate.context(ssl.PROTOCOL_TLS_SERVER)
            newcomers = Newcomers(
                talk(self._serve, context=context, handshake_s=GREETING_TIMEOUT_S, line_bytes=GREETING_BYTES)
            )
            self._at = await newcomers.listen(self._address, 0)
            self._newcomers = newcomers
            if certificate is not None:
                looks = partial(self._look_for_removals, certificate.removed)
                self._looking = self._background.keep("connections of removed nodes", looks)
        return self._at

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._newcomers is not None:
            await self._newcomers.stop()

    async def _look_for_removals(self, removed: RemovedNodes) -> None:
        seen = None
        while True:
            if (changed := removed.changed()) != seen:
                for task, certificate in list(self._certificates.items()):
                    if removed.has(certificate):
                        task.cancel()
                seen = changed
            await asyncio.sleep(LOOK_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            _end_if_missed(writer)
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                nonce = secrets.token_hex(32)
                writer.write(f"{nonce}\n".encode())
                greeting = json.loads(await reader.readline())
                if not isinstance(greeting, dict):
                    raise TunnelRefused("a greeting is an object")
                proof = self._shared.proof("ask", greeting, nonce)
                if not hmac.compare_digest(str(greeting.get("proof")).encode(), proof.encode()):
                    raise TunnelRefused("the proof of the token is wrong")
            certificate, connection = self._shared.certificate, writer.get_extra_info("ssl_object")
            if certificate is not None:
                if certificate.removed.has(shown := connection.getpeercert()):
                    raise TunnelRefused("this node was removed from the box")
                self._certificates[task] = shown
            if self._newcomers is not None:
                self._newcomers.is_known()
            path, nonces = Path(str(greeting["path"])), (nonce, str(greeting["nonce"]))
            if greeting["ask"] == "socket":
                await self._tunnel(_directly_in(path, self._sockets), reader, writer, nonces)
            elif greeting["ask"] == "directory":
                await self._send_directory(_inside(path, self._folders), greeting.get("names"), writer, nonces)
            else:
                raise TunnelRefused(f"unknown request {greeting['ask']!r}")
        except (TunnelRefused, OSError, ValueError, KeyError, RecursionError, TimeoutError) as error:
            if not writer.is_closing():
                writer.write(_line({"error": f"{type(error).__name__}: {error}"}))
        finally:
            self._certificates.pop(task, None)
            writer.close()

    def _ok(self, value: Any, nonces: tuple[str, str]) -> bytes:
        return _line({"ok": value, "proof": self._shared.proof("answer", {"ok": value}, *nonces)})

    async def _tunnel(
        self, path: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, nonces: tuple[str, str]
    ) -> None:
        there = await asyncio.open_unix_connection(str(path))
        writer.write(self._ok(True, nonces))
        await _join((reader, writer), there)

    async def _send_directory(
        self, path: Path, names: list[str] | None, writer: asyncio.StreamWriter, nonces: tuple[str, str]
    ) -> None:
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.is_symlink())
        wanted = [file for file in files if names is None or file.name in names]
        with contextlib.ExitStack() as opened:
            # Open all files first: sealing a manifest meanwhile replaces it with another file of another size.
            sources = [opened.enter_context(open(file, "rb")) for file in wanted]
            sizes = [os.fstat(source.fileno()).st_size for source in sources]
            listed = [[file.name, size] for file, size in zip(wanted, sizes, strict=True)]
            writer.write(self._ok(listed, nonces))
            for source, size in zip(sources, sizes, strict=True):
                # Not loop.sendfile: uvloop, on which Ray runs its actors, has none.
                left = size
                while left and (chunk := await asyncio.to_thread(source.read, min(CHUNK_BYTES, left))):
                    writer.write(chunk)
                    await writer.drain()
                    left -= len(chunk)


class Tunnels:
    """Local Unix sockets whose connections lead to sockets of other nodes."""

    def __init__(self, shared: Shared):
        self._shared = shared
        self._servers: dict[str, asyncio.Server] = {}
        self._carried: dict[str, set[asyncio.StreamWriter]] = {}

    async def open(self, local: Path, address: tuple[str, int], remote: Path, unreached: bytes = b"") -> None:
        """Make `local` lead to `remote` on the node whose tunnel server listens at `address`; replaces an older
        tunnel. unreached: answered to whoever connects while `remote` cannot be reached; without it the connection just
        breaks."""
        await self.close(local)
        carried = self._carried[str(local)] = set()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            carried.add(writer)
            try:
                _, far_reader, far_writer = await _ask(address, self._shared, "socket", remote)
                await _join((reader, writer), (far_reader, far_writer))
            except (TunnelRefused, OSError, TimeoutError):
                if unreached:
                    await _say_unreached(reader, writer, unreached)
                writer.transport.abort()
            finally:
                carried.discard(writer)
                writer.close()

        self._servers[str(local)] = await asyncio.start_unix_server(carry, sock=private_socket(local))

    async def close(self, local: Path) -> None:
        """Ends its connections too: whoever reads from one hears that there is no engine any more."""
        server = self._servers.pop(str(local), None)
        if server is not None:
            server.close()
        for writer in self._carried.pop(str(local), set()):
            writer.transport.abort()
        local.unlink(missing_ok=True)


async def fetch_directory(
    address: tuple[str, int], shared: Shared, remote: Path, target: Path, names: Sequence[str] | None = None
) -> int:
    """Copy the files of another node's directory, or those of `names` that it has, into the new directory `target`;
    returns the bytes received.

    Raises TunnelRefused when the other node refuses or the connection ends early.
    """
    more = {} if names is None else {"names": list(names)}
    sizes, reader, writer = await _ask(address, shared, "directory", remote, more)
    target.mkdir(mode=0o700, parents=True)
    total = 0
    try:
        for name, size in sizes:
            if Path(name).name != name or name in (".", ".."):
                raise TunnelRefused(f"invalid file name {name!r}")
            with open(target / name, "xb") as file:
                left = size
                while left:
                    chunk = await reader.read(min(CHUNK_BYTES, left))
                    if not chunk:
                        raise TunnelRefused(f"the connection ended {left} bytes before the end of {name}")
                    await asyncio.to_thread(file.write, chunk)
                    left -= len(chunk)
            total += size
    finally:
        writer.close()
    return total


async def _ask(
    address: tuple[str, int], shared: Shared, ask: str, path: Path, more: Mapping[str, Any] | None = None
) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(CALL_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(*address, limit=CHUNK_BYTES, ssl=shared.client_context())
    try:
        _end_if_missed(writer)
        async with asyncio.timeout(CALL_TIMEOUT_S):
            nonce, ours = (await reader.readline()).decode().strip(), secrets.token_hex(32)
            greeting = {"ask": ask, "path": str(path), "nonce": ours, **(more or {})}
            writer.write(_line({**greeting, "proof": shared.proof("ask", greeting, nonce)}))
            line = await reader.readline()
        answer = json.loads(line) if line else {"error": "it hung up"}
        proof = shared.proof("answer", answer, nonce, ours)
        if "ok" in answer and not hmac.compare_digest(str(answer.get("proof")).encode(), proof.encode()):
            answer = {"error": "it does not know the token"}
        if "ok" not in answer:
            raise TunnelRefused(
                f"the tunnel server at {address[0]}:{address[1]} refused {ask} {path}: {answer.get('error')}"
            )
    except BaseException:
        writer.close()
        raise
    return answer["ok"], reader, writer


def _end_if_missed(writer: asyncio.StreamWriter) -> None:
    """The connection ends when the other machine has been missing for some seconds, whoever waits for whom. A process
    there that is merely stopped is not missing: its kernel answers."""
    its = writer.get_extra_info("socket")
    idle_s, every_s, times = MISSED_AFTER_S
    its.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    its.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    its.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    its.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, times)
    its.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (idle_s + every_s * times) * 1000)


async def _join(
    here: tuple[asyncio.StreamReader, asyncio.StreamWriter], there: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> None:
    """Copy bytes both ways until both sides have ended; if one breaks, close both."""
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_pour(here[0], there[1]))
            both.create_task(_pour(there[0], here[1]))
    except* OSError:
        for _, writer in (here, there):
            writer.transport.abort()
    finally:
        there[1].close()
        here[1].close()


async def _say_unreached(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes) -> None:
    """Reads what comes until the other side has the answer: a write that fails would keep it from reading."""
    writer.write(answer)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CALL_TIMEOUT_S):
            while await reader.read(65536):
                pass


async def _pour(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while chunk := await source.read(65536):
        sink.write(chunk)
        await sink.drain()
    if sink.can_write_eof():
        sink.write_eof()
    else:
        sink.close()  # TLS has no half-close. In HTTP/1.1 a side that has stopped sending reads no more either.


def _inside(path: Path, folders: tuple[Path, ...]) -> Path:
    resolved = path.resolve()
    if not any(resolved.is_relative_to(folder.resolve()) for folder in folders):
        raise TunnelRefused(f"{path} is not below {', '.join(map(str, folders))}")
    return resolved


def _directly_in(path: Path, places: tuple[Path, ...]) -> Path:
    resolved = path.resolve()
    if not {resolved, resolved.parent} & {place.resolve() for place in places}:
        raise TunnelRefused(f"{path} is not one of {', '.join(map(str, places))}, nor in one of them")
    return resolved


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
