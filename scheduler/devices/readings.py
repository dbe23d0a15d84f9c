"""Reads the health of this node's devices, which are of one kind; returns nothing for kinds without health data."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from runtime.devices.kind import Reading
from runtime.devices.kinds import kind_of
from scheduler.core.inventory import Device

log = logging.getLogger(__name__)

PATIENCE_S = 0.8
"""How long a look waits for the drivers: shorter than the box waits for a node's answer."""


class DeviceReadings:
    """Reads on demand."""

    def __init__(self, devices: tuple[Device, ...]):
        self._watch = kind_of(devices[0].kind).watch({device.index: device.id for device in devices})
        self._reading: asyncio.Task[tuple[Reading, ...]] | None = None
        self._trouble = ""  # of the last look, to log each once

    async def look(self, let_go: Collection[str] = ()) -> tuple[Reading, ...]:
        """As `read`, beside the event loop and one at a time. Empty while a driver does not answer: a call about a GPU
        that hangs may never end, and each would keep a thread. What it tells too late is for the next look, because
        a driver tells an error once. Raises what the driver did, which is logged here: the box takes a node
        that raises for one that does not answer."""
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(self.read, let_go))
        reading = self._reading
        done, _ = await asyncio.wait({reading}, timeout=PATIENCE_S)
        if done and self._reading is reading:
            self._reading = None
        error = reading.exception() if done else TimeoutError(f"no answer for {PATIENCE_S} s")
        trouble = "" if error is None else f"{type(error).__name__}: {error}"
        if trouble and trouble != self._trouble:
            log.warning("a driver raised %s; this node's devices are not watched meanwhile", trouble)
        self._trouble = trouble
        return tuple(one for one in reading.result() if one.device_id not in let_go) if done else ()

    def read(self, let_go: Collection[str] = ()) -> tuple[Reading, ...]:
        """One reading per device that reports health but of those to let go, by id: nothing of them stays open. Takes
        milliseconds: call it off the event loop."""
        return () if self._watch is None else tuple(self._watch(let_go))
