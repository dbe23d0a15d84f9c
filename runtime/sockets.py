"""Unix sockets that only their owner may connect to, and ports that nobody else listens on."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Sockets bound inside have mode 0600 from the first moment; a chmod afterwards would leave a gap."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def check_free(host: str, port: int) -> None:
    """Raises OSError if nobody can listen on (host, port): it is taken, not this machine's, or not allowed.

    This looks without SO_REUSEPORT: with it a port seems free that other processes of the same user listen on with it
    too, and two boxes would get each other's requests. If a name has several addresses, one must be this machine's.
    """
    absent, found = None, False
    for family, kind, number, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        try:
            with socket.socket(family, kind, number) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection that lingers is no listener
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
