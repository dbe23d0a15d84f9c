"""Between nodes: a tunnel from a Unix socket here to one there, and directories copied over.

One TCP port per node, opened on one address. Whoever connects gets a nonce and must answer with its HMAC under the
token that the nodes share, before anything it says is read; the token itself never travels. What travels is not
encrypted: the nodes' network must be as private as Ray's own traffic on it has to be.

A greeting is one line of JSON, `{"proof": hex, "ask": "socket" | "directory", "path": ...}`, answered by one line,
`{"ok": ...}` or `{"error": text}`. After it
- "socket": both ends are joined byte by byte;
- "directory": the files follow one after the other in the order of the answer, `{"ok": [[name, bytes], ...]}`; with
  `"names": [...]` in the greeting only those of them that are there.

Only paths below what was given to the server are served, without following symbolic links out of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import RelayRefused

GREETING_BYTES = 4096
GREETING_TIMEOUT_S = 10.0
CHUNK_BYTES = 1 << 20


class Relay:
    """This node's port. `sockets` (or folders of them) and `folders`: where tunnels may end, what may be copied."""

    def __init__(self, address: str, token: bytes, *, sockets: tuple[Path, ...], folders: tuple[Path, ...]):
        self._address, self._token, self._sockets, self._folders = address, token, sockets, folders
        self._server: asyncio.Server | None = None
        self.bytes_sent = 0

    async def start(self) -> tuple[str, int]:
        """Address and port; the same on every call."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, self._address, 0, limit=GREETING_BYTES)
        return self._server.sockets[0].getsockname()[:2]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                nonce = secrets.token_hex(32)
                writer.write(f"{nonce}\n".encode())
                greeting = json.loads(await reader.readline())
                if not hmac.compare_digest(str(greeting.get("proof")), _proof(self._token, nonce)):
                    raise RelayRefused("the proof of the token is wrong")
            path = Path(str(greeting["path"]))
            if greeting["ask"] == "socket":
                await self._tunnel(_inside(path, self._sockets), reader, writer)
            elif greeting["ask"] == "directory":
                await self._send_directory(_inside(path, self._folders), greeting.get("names"), writer)
            else:
                raise RelayRefused(f"unknown request {greeting['ask']!r}")
        except (RelayRefused, OSError, ValueError, KeyError, TimeoutError) as error:
            if not writer.is_closing():
                writer.write(_line({"error": f"{type(error).__name__}: {error}"}))
        finally:
            writer.close()

    async def _tunnel(self, path: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_unix_connection(str(path))
        writer.write(_line({"ok": True}))
        await _join((reader, writer), there)

    async def _send_directory(self, path: Path, names: list[str] | None, writer: asyncio.StreamWriter) -> None:
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.is_symlink())
        wanted = [file for file in files if names is None or file.name in names]
        with contextlib.ExitStack() as opened:
            # All at once: a manifest that is sealed meanwhile is another file, of another size.
            sources = [opened.enter_context(open(file, "rb")) for file in wanted]
            sizes = [os.fstat(source.fileno()).st_size for source in sources]
            writer.write(_line({"ok": [[file.name, size] for file, size in zip(wanted, sizes, strict=True)]}))
            for source, size in zip(sources, sizes, strict=True):
                # Not loop.sendfile: uvloop, on which Ray runs its actors, has none.
                left = size
                while left and (chunk := await asyncio.to_thread(source.read, min(CHUNK_BYTES, left))):
                    writer.write(chunk)
                    await writer.drain()
                    left -= len(chunk)
                self.bytes_sent += size - left


class Tunnels:
    """Local Unix sockets whose connections come out at sockets of other nodes."""

    def __init__(self, token: bytes):
        self._token = token
        self._servers: dict[str, asyncio.Server] = {}

    async def open(self, local: Path, address: tuple[str, int], remote: Path) -> None:
        """From now on `local` leads to `remote` on the node whose relay listens at `address`; replaces an older one."""
        await self.close(local)

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                _, *there = await _ask(address, self._token, "socket", remote)
                await _join((reader, writer), (there[0], there[1]))
            except (RelayRefused, OSError, TimeoutError):
                writer.transport.abort()  # as if the engine had died: the gateway knows what to do then
            finally:
                writer.close()

        self._servers[str(local)] = await asyncio.start_unix_server(carry, str(local))
        local.chmod(0o600)

    async def close(self, local: Path) -> None:
        server = self._servers.pop(str(local), None)
        if server is not None:
            server.close()
        local.unlink(missing_ok=True)


async def fetch_directory(
    address: tuple[str, int], token: bytes, remote: Path, target: Path, names: Sequence[str] | None = None
) -> int:
    """Copy the files of a directory of another node, or those of `names` that it has, into the new directory `target`;
    returns the bytes received.

    Raises RelayRefused when the other node refuses or the connection ends early.
    """
    more = {} if names is None else {"names": list(names)}
    sizes, reader, writer = await _ask(address, token, "directory", remote, more)
    target.mkdir(mode=0o700, parents=True)
    total = 0
    try:
        for name, size in sizes:
            if Path(name).name != name or name in (".", ".."):
                raise RelayRefused(f"a file is called {name!r}")
            with open(target / name, "xb") as file:
                left = size
                while left:
                    chunk = await reader.read(min(CHUNK_BYTES, left))
                    if not chunk:
                        raise RelayRefused(f"the connection ended {left} bytes before the end of {name}")
                    await asyncio.to_thread(file.write, chunk)
                    left -= len(chunk)
            total += size
    finally:
        writer.close()
    return total


async def _ask(
    address: tuple[str, int], token: bytes, ask: str, path: Path, more: Mapping[str, Any] | None = None
) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address, limit=CHUNK_BYTES)
    try:
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            nonce = (await reader.readline()).decode().strip()
            writer.write(_line({"proof": _proof(token, nonce), "ask": ask, "path": str(path), **(more or {})}))
            line = await reader.readline()
        answer = json.loads(line) if line else {"error": "it hung up"}
        if "ok" not in answer:
            raise RelayRefused(f"the relay at {address[0]}:{address[1]} refused {ask} {path}: {answer.get('error')}")
    except BaseException:
        writer.close()
        raise
    return answer["ok"], reader, writer


async def _join(
    here: tuple[asyncio.StreamReader, asyncio.StreamWriter], there: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> None:
    """Bytes both ways until both sides have ended; one that breaks takes the other along."""
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


async def _pour(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while chunk := await source.read(65536):
        sink.write(chunk)
        await sink.drain()
    if sink.can_write_eof():
        sink.write_eof()


def _inside(path: Path, folders: tuple[Path, ...]) -> Path:
    resolved = path.resolve()
    if not any(resolved.is_relative_to(folder.resolve()) for folder in folders):
        raise RelayRefused(f"{path} is not below {', '.join(map(str, folders))}")
    return resolved


def _proof(token: bytes, nonce: str) -> str:
    return hmac.new(token, nonce.encode(), hashlib.sha256).hexdigest()


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
