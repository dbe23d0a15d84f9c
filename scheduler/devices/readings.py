"""Reads the health of this node's devices, each kind in its own way; returns nothing for kinds without health data."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby

from runtime.devices.kind import Reading
from runtime.devices.kinds import kind_of
from scheduler.core.inventory import Device


class DeviceReadings:
    """Reads on demand."""

    def __init__(self, devices: tuple[Device, ...]):
        by_kind = groupby(sorted(devices, key=lambda device: device.kind), key=lambda device: device.kind)
        watches = (kind_of(name).watch({device.index: device.id for device in alike}) for name, alike in by_kind)
        self._watches = [watch for watch in watches if watch is not None]

    def read(self, let_go: Collection[str] = ()) -> tuple[Reading, ...]:
        """One reading per device that reports health but of those to let go, by id: nothing of them stays open. Takes
        milliseconds: call it off the event loop."""
        return tuple(reading for watch in self._watches for reading in watch(let_go))
