"""Whether the box can have the endpoint's port."""

from __future__ import annotations

import errno

import psutil

from runtime.network.sockets import check_free


def why_not(host: str, port: int) -> str:
    """Why this box cannot listen there and what to do; "" if it can."""
    try:
        check_free(host, port)
    except OSError as error:
        holder = f" ({_holder(port)})" if error.errno == errno.EADDRINUSE else ""
        return (
            f"port {port} of {host!r} cannot be listened on: {error.strerror}{holder}; choose another with --port or "
            "--host ([box] port, host)"
        )
    return ""


def _holder(port: int) -> str:
    """The process that listens there. The kernel names another user's process only to root."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return f"by PID {connection.pid}"
    return "by another user's process"
