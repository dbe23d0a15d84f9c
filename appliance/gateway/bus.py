"""Connects the gateway to the bus: JSON lines over the controller's Unix socket, tables in, load reports out.

While the controller is unreachable the last table stays in force. After each (re)connection the controller sends a
whole table; the report that follows tells it which generation is applied. Usage is sent again on each connection until
the controller has counted it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import orjson

from appliance.gateway.gateway import Gateway
from appliance.gateway.routing.table import Degraded, read_message
from appliance.gateway.server.reports import load_report

log = logging.getLogger("appliance.gateway")

LINE_BYTES = 64 * 1024 * 1024
RECONNECT_S = 0.2
HEARTBEAT_S = 5.0
COUNTED = b'{"type":"counted"}\n'
"""The controller's answer to a usage message."""


class BusClient:
    """Keeps one connection to the controller for as long as `run` runs."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._writer: asyncio.StreamWriter | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Rows that the controller has not counted yet, and whether this connection has them.
        self._usage: list[dict[str, Any]] = []
        self._usage_sent = False
        gateway.state.on_change = self.changed

    async def run(self) -> None:
        """Connect, read, reconnect; returns only when cancelled."""
        state = self._gateway.state
        while True:
            try:
                path = self._gateway.config.bus_socket
                reader, self._writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES)
                self._usage_sent, state.controller_away = False, False
                await self._read(reader)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                if not state.controller_away:
                    log.warning("bus: the controller is away, serving from the last table: %s", error)
            finally:
                state.controller_away = True
                if self._writer is not None:
                    self._writer.close()
                    self._writer = None
            await asyncio.sleep(RECONNECT_S)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Apply tables until the connection ends. Raises ValueError on a line that is too long or not JSON."""
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    line = await reader.readline()
            except TimeoutError:
                self.send()
                continue
            if not line:
                return
            if line == COUNTED:
                self._usage = []
                continue
            try:
                # In a thread, because a table may have thousands of rows; until it is read the last one is in force.
                message = await asyncio.to_thread(read_message, line)
            except msgspec.ValidationError as error:
                log.error("bus: a message is refused, the last table stays in force: %s", error)
                continue
            if isinstance(message, Degraded):
                self._gateway.state.box_troubles = message.names
            else:
                self._gateway.apply(message)

    def changed(self, urgent: bool) -> None:
        """Schedule a report: now if urgent, else within the report interval."""
        if urgent:
            self.send()
        elif self._timer is None and self._writer is not None:
            self._timer = asyncio.get_running_loop().call_later(self._gateway.config.report_s, self.send)

    def send(self) -> None:
        """Send a report if the controller is connected and keeps up; the next report replaces a skipped one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        writer, state = self._writer, self._gateway.state
        if writer is None or writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > LINE_BYTES // 64:
            log.warning("bus: the controller does not read, reconnecting")
            writer.transport.abort()
            return
        writer.write(orjson.dumps(load_report(state), option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS))
        if not self._usage:
            self._usage, self._usage_sent = state.spending.take_sums(), False
        if self._usage and not self._usage_sent:
            message = {"type": "usage", "gateway": self._gateway.config.name, "rows": self._usage}
            writer.write(orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE))
            self._usage_sent = True
