"""Keeps the power limit of the GPUs of the box's own machine as [power] has it for the mode in force."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

from appliance.controller.devices import cordons
from appliance.controller.devices.mode import mode_in_force
from appliance.store.database import Database
from runtime.devices.kind import PowerControl, PowerRefused
from scheduler.core.inventory import Device

log = logging.getLogger(__name__)

LOOK_EVERY_S = 15.0


class PowerKeeper:
    """limits_w: watts of each device by mode; empty: the box sets no limit. A mode without one has the device's own.
    devices: those of the box's own machine. control: None where they have no limits."""

    def __init__(
        self,
        limits_w: Mapping[str, float],
        db: Database,
        serving_floor: int,
        devices: Collection[Device],
        control: PowerControl | None,
    ):
        self._limits_w, self._db, self._floor, self._devices = limits_w, db, serving_floor, devices
        self._control = control if limits_w else None
        self._limit_w: float | None = None
        self._refused: dict[str, str] = {}

    async def look(self) -> None:
        """Called every `LOOK_EVERY_S`: a device that was reset has lost its limit."""
        if self._control is None:
            return
        mode = mode_in_force(self._db, self._floor, time.time()).policy.kind
        self._limit_w = self._limits_w.get(mode)
        drained = cordons.drained(self._db)
        kept = {device.uuid: device.id for device in self._devices if device.uuid and device.id not in drained}
        refused = await asyncio.to_thread(_set, self._control, kept, self._limit_w)
        for device_id, why in refused.items() if refused != self._refused else ():
            log.error("its power limit cannot be set: %s", why, extra={"device": device_id})
        self._refused = refused

    def status(self) -> dict[str, Any]:
        """{"set": whether the box sets limits, "limit_w": None for the devices' own, "refused": why, by device}."""
        return {"set": self._control is not None, "limit_w": self._limit_w, "refused": dict(self._refused)}


def _set(control: PowerControl, devices: Mapping[str, str], limit_w: float | None) -> dict[str, str]:
    """Set the limit where it differs. Returns the refusals by device id."""
    refused = {}
    try:
        limits = control.limits()
    except PowerRefused as error:
        return dict.fromkeys(devices.values(), str(error))
    for uuid in devices.keys() & limits.keys():
        wanted_w = limits[uuid].default_w if limit_w is None else limit_w
        if wanted_w not in (None, limits[uuid].limit_w):
            try:
                control.set_limit(uuid, wanted_w)
            except PowerRefused as error:
                refused[devices[uuid]] = str(error)
    return refused
