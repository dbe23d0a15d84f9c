"""The endpoint's port: whether this box can have it, and whether this box is the one that answers there."""

from __future__ import annotations

import errno
import json
import socket

import psutil

from runtime.network.sockets import check_free


def why_not(host: str, port: int) -> str:
    """Why this box cannot listen there and what to do; "" if it can."""
    try:
        check_free(host, port)
    except socket.gaierror as error:
        return f"[box] host {host!r} is not an address: {error.strerror}; give one of this machine's"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            taken = f"port {port} of {host} is in use by {_holder(port)}"
            return f"{taken}; end that or choose another with --port ([box] port)"
        if error.errno == errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this machine; give another with --host ([box] host)"
        if error.errno == errno.EACCES:
            refused = f"this user may not listen on port {port}"
            return f"{refused}; choose one above 1023 with --port, or give the service CAP_NET_BIND_SERVICE"
        return f"port {port} of {host} cannot be listened on: {error.strerror}"
    return ""


def is_ours(answer: bytes, boot: str) -> bool:
    """Whether this answer of /health comes from the gateway that was started with `boot`."""
    try:
        found = json.loads(answer)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("boot") == boot


def _holder(port: int) -> str:
    """The process that listens there. The kernel names another user's process only to root."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                command = ""
            return f"PID {connection.pid}" + (f" ({command[:80]})" if command else "")
    return "another user's process"
