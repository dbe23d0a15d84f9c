"""Keeps the devices' limits as the power profile for the mode and the hour has them, through the power helper."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from appliance.controller.devices.mode import mode_in_force
from appliance.power.helper_client import HelperClient
from appliance.power.profiles import Profile
from appliance.power.settings import PowerSettings
from appliance.store.database import Database
from appliance.store.ids import new_id
from appliance.store.records import audit
from appliance.store.rows import AuditRow

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
AGAIN_S = 60.0
"""The same limits are sent again this often: a device that was reset has lost them."""


class PowerKeeper:
    """Keeps the power profile of the box's own machine. devices: UUID -> id, of those whose limits are to be kept.
    helper: None where none is configured; then nothing is ever set. local: the time on the box's clock."""

    def __init__(
        self,
        settings: PowerSettings,
        db: Database,
        serving_floor: int,
        devices: Callable[[], dict[str, str]],
        helper: HelperClient | None,
        clock: Callable[[], float] = time.time,
        local: Callable[[float], time.struct_time] = time.localtime,
    ):
        self._settings, self._db, self._floor, self._devices = settings, db, serving_floor, devices
        self._helper, self._clock, self._local = helper, clock, local
        self._set: tuple[Profile, frozenset[str]] | None = None
        self._held: frozenset[str] = frozenset()  # ids of the devices that it is in force on
        self._set_s, self._because = 0.0, ""
        self._refused: dict[str, str] = {}

    async def look(self) -> None:
        """Called every `LOOK_EVERY_S`. Raises HelperAway."""
        if self._helper is None:
            return
        now_s = self._clock()
        mode = mode_in_force(self._db, self._floor, now_s).policy.kind
        hour = self._local(now_s)
        profile, because = self._settings.wanted(mode, hour.tm_hour * 60 + hour.tm_min)
        devices = self._devices()
        wanted = profile, frozenset(devices)
        if wanted == self._set and now_s - self._set_s < AGAIN_S:
            self._because = because
            return
        limits = {"limit_w": profile.limit_w, "clock_mhz": profile.clock_mhz}
        given = {name: value for name, value in limits.items() if value is not None}
        before = None if self._set is None else self._set[0]
        self._set = None  # until the helper has answered, nothing is known
        refused = await self._helper.set(dict.fromkeys(devices, given) if given else {})
        self._set, self._set_s, self._because = wanted, now_s, because
        refusals = {devices[uuid]: why for uuid, why in refused.items() if uuid in devices}
        if refusals != self._refused:
            for device_id, why in refusals.items():
                log.error("the profile %s is not in force there: %s", profile.name, why, extra={"device": device_id})
        self._refused, self._held = refusals, frozenset(devices.values()) - refusals.keys()
        if before != profile and not (before is None and profile.is_off()):
            detail = {"because": because, **given, **({"refused": refusals} if refusals else {})}
            log.info("power profile %s, by %s", profile.name, because)
            audit.insert(
                self._db, AuditRow(new_id("audit_"), None, "power.profile", profile.name, "done", "", now_s, detail)
            )

    def status(self) -> dict[str, Any]:
        """{"helper": whether one is configured, "profile": the name of the one in force, None while none is known to
        be, "limit_w", "clock_mhz", "because", "refused": by device}."""
        newest = self._set
        profile = None if newest is None else newest[0]
        return {
            "helper": self._helper is not None,
            "profile": None if profile is None else profile.name,
            "limit_w": None if profile is None else profile.limit_w,
            "clock_mhz": None if profile is None else profile.clock_mhz,
            "because": self._because if profile is not None else "",
            "refused": dict(self._refused) if profile is not None else {},
        }

    def limits_of(self, device_id: str) -> str:
        """What the box holds this device to now, in words; "" if to nothing."""
        if self._set is None or device_id not in self._held:
            return ""
        profile = self._set[0]
        limits = ((profile.limit_w, "W"), (profile.clock_mhz, "MHz"))
        return " and ".join(f"{value:g} {unit}" for value, unit in limits if value is not None)

    def close(self) -> None:
        """The helper restores what was set."""
        if self._helper is not None:
            self._helper.close()
