"""Sockets of the box: private Unix sockets, free ports, and TLS between the machines of a box.

Both sides of a connection between machines present the certificate that Ray uses. Ray's environment variables hold its
paths; if other machines may join the box, every process has these variables.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from pathlib import Path
from typing import Any

KEEPALIVE_S = 3, 1, 4
"""TCP keepalive: idle seconds before the first probe, seconds between probes, and number of probes. A machine without
power or network sends nothing, so a stream that only reads would wait for ever."""


def private_socket(path: str | Path) -> socket.socket:
    """A stream socket bound to `path`, of mode 0600 from the start: a later chmod would leave a gap. Raises OSError.

    It does not change the umask, which is process-wide: a folder that another thread creates meanwhile would be
    unusable. Linux gives the file the mode that the socket has before bind.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
    except BaseException:
        listener.close()
        raise
    return listener


def check_free(host: str, port: int) -> None:
    """Raise OSError if this process cannot listen on (host, port): taken, not this machine's, or not allowed.

    The check does not use SO_REUSEPORT: with it a port looks free while another process of the same user uses it, and
    two boxes would get each other's requests. If a name has several addresses, one must be this machine's.
    """
    absent, usable = None, False
    for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
        try:
            socket.create_server(address, family=family).close()
            usable = True
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            absent = error
    if absent is not None and not usable:
        raise absent


def mutual_tls(purpose: int) -> ssl.SSLContext:
    """A context for `ssl.PROTOCOL_TLS_SERVER` or `_CLIENT`. Raises KeyError if other machines cannot join the box."""
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    return context


async def serve_machines(server: Any, host: str) -> str:
    """Make a started uvicorn server also serve the other machines, at `host`; returns the URL."""

    def protocol() -> asyncio.Protocol:
        return server.config.http_protocol_class(server.config, server.server_state, server.lifespan.state)

    context = mutual_tls(ssl.PROTOCOL_TLS_SERVER)
    listening = await asyncio.get_running_loop().create_server(protocol, host, 0, ssl=context)
    server.servers.append(listening)
    port = listening.sockets[0].getsockname()[1]
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """An unconnected socket that detects the loss of the other machine within seconds. `address`: a row of
    `getaddrinfo`."""
    family, kind, protocol, *_ = address
    watched = socket.socket(family, kind, protocol)
    idle_s, every_s, attempts = KEEPALIVE_S
    watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, attempts)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (idle_s + every_s * attempts) * 1000)
    return watched


def http_options(address: str) -> tuple[str, dict[str, Any]]:
    """Base URL and httpx transport options for an engine at a Unix socket or at https://HOST:PORT."""
    if address.startswith("/"):
        return "http://engine", {"uds": address, "verify": False}
    return address, {"verify": mutual_tls(ssl.PROTOCOL_TLS_CLIENT)}
