"""Creates Unix sockets that only their owner may connect to, and checks that no other process uses a port."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path


def private_socket(path: str | Path) -> socket.socket:
    """A stream socket bound to `path`, of mode 0600 from the start: a later chmod would leave a gap. Raises OSError.

    It does not change the umask: that is the process's, and a folder that another thread made meanwhile could not be
    entered by anybody. Linux gives the file the mode that the socket has before it is bound.
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
    """Raises OSError if listening on (host, port) is impossible: it is taken, not this machine's, or not allowed.

    The check does not use SO_REUSEPORT: with it a port looks free if another process of the same user uses it too, and
    two boxes would get each other's requests. If a name has several addresses, one must be this machine's.
    """
    absent, usable = None, False
    for family, kind, number, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        try:
            with socket.socket(family, kind, number) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a lingering connection is not a listener
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
                usable = True
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            absent = error
    if absent is not None and not usable:
        raise absent
