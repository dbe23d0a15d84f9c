"""Connects the gateway to the bus: JSON lines over the controller's Unix socket, tables in, load reports out.

While the controller is unreachable the last table stays in force. After each (re)connection the controller sends a
whole table; the report that follows tells it which generation is applied.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
import orjson

from appliance.gateway.gateway import Gateway
from appliance.gateway.routing.table import Degraded, read_message
from appliance.gateway.state.reports import load_report

log = logging.getLogger("appliance.gateway")

LINE_BYTES = 64 * 1024 * 1024
BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
HEARTBEAT_S = 5.0


class BusClient:
    """Keeps one connection to the controller for as long as `run` runs."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._writer: asyncio.StreamWriter | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reported: set[str] = set()
        gateway.state.on_change = self.changed

    async def run(self) -> None:
        """Connect, read, reconnect; returns only when cancelled."""
        attempt = 0
        path = self._gateway.config.bus_socket
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES)
            except OSError as error:
                self._gateway.state.controller_away = True
                if attempt == 0:
                    log.info("bus: the controller is unreachable (%s), serving from the last table", error.strerror)
            else:
                attempt = 0
                self._writer, self._reported = writer, set()
                self._gateway.state.controller_away = False
                try:
                    await self._read(reader)
                except (OSError, ValueError, msgspec.MsgspecError) as error:
                    log.warning("bus: connection closed: %s", error)
                finally:
                    self._writer = None
                    self._gateway.state.controller_away = True
                    writer.close()
            await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])
            attempt += 1

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
        writer = self._writer
        if writer is None or writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > LINE_BYTES // 64:
            log.warning("bus: the controller does not read, reconnecting")
            writer.transport.abort()
            return
        writer.write(orjson.dumps(load_report(self._gateway.state, self._reported), option=orjson.OPT_APPEND_NEWLINE))
        rows = self._gateway.state.spending.take_sums()
        if rows:
            message = {"type": "usage", "gateway": self._gateway.config.name, "rows": rows}
            writer.write(orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE))
