"""Creates Unix sockets that only their owner may connect to, and checks that no other process uses a port."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Sockets bound inside have mode 0600 from the start; a later chmod would leave a gap."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def check_free(host: str, port: int) -> None:
    """Raises OSError if listening on (host, port) is impossible: it is taken, not this machine's, or not allowed.

    The check does not use SO_REUSEPORT: with it a port looks free if another process of the same user uses it too, and
    two boxes would get each other's requests. If a name has several addresses, one must be this machine's.
    """
    absent, found = None, False
    for family, kind, number, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        try:
            with socket.socket(family, kind, number) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a lingering connection is not a listener
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
                found = True
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            absent = error
    if absent is not None and not found:
        raise absent
