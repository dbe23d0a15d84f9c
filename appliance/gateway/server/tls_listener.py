"""Takes TLS connections: each counts from its first packet, and few whose handshake is not complete are held, whatever
`max_connections` says."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, MutableMapping

from runtime.background_tasks import BackgroundTasks
from runtime.network.newcomers import Newcomers

log = logging.getLogger("appliance.gateway")


def newcomers_of(connections: int) -> int:
    """How many connections whose handshake is not complete are held beside this many whose handshake is."""
    return max(8, connections // 8)


def tls_listener(
    client: Callable[[], asyncio.Protocol],
    context: ssl.SSLContext,
    *,
    most: int,
    handshake_s: float,
    background: BackgroundTasks,
    events: MutableMapping[str, int],
) -> Newcomers:
    """client: makes the protocol of a connection whose handshake is complete. most: of those whose is not; beyond it
    the one that came first gives its place at once. handshake_s: how long each has. events: counters, by name."""

    async def meet(connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                client, connection, ssl=context, ssl_handshake_timeout=handshake_s
            )
        except OSError as error:  # no TLS, too slow, or gone; an SSLError is one
            events["tls_failed"] += 1
            log.debug("a TLS handshake failed: %s", error)

    def gave_place() -> None:
        events["connection_gave_place"] += 1

    return Newcomers(meet, most=most, grace_s=0.0, background=background, gave_place=gave_place)
