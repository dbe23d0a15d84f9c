"""Whether the box can have the endpoint's port."""

from __future__ import annotations

from runtime.network import check_free


def why_not(host: str, port: int) -> str:
    """Why this box cannot listen there and what to do; "" if it can."""
    try:
        check_free(host, port)
    except OSError as error:
        return (
            f"port {port} of {host!r} cannot be listened on: {error.strerror} (`ss -ltnp` names the process); choose "
            "another with --port or --host ([box] port, host)"
        )
    return ""
