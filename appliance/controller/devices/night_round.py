"""The doctor's round of a night: every device is measured once, where that disturbs nobody.

Engines that no request needs sleep meanwhile where they are: those beside another one that serves, and the last one of
a model that nobody asked for some minutes. After each pass over the devices the scheduler wakes them again, where
nobody needs their devices then. A request that arrives earlier is held as for any model that sleeps, and its device
goes back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from appliance.controller.devices import cordons
from appliance.controller.devices.deep_checks import BOX, LOOK_EVERY_S, DeepChecks
from appliance.controller.interfaces.errors import OperationFailed
from appliance.controller.interfaces.ports import SchedulerPort
from appliance.store.database import Database
from appliance.store.records import box
from scheduler.core.workload import DeploymentView

log = logging.getLogger(__name__)

AWAKE_AGAIN = "models_to_wake"
AGAIN_S, ROUND_S, WAKE_S = 300.0, 4 * 3600.0, 300.0


class NightRound:
    """wake_s: for how long the scheduler is asked to wake what slept; it does not while jobs or requests take the
    devices."""

    def __init__(
        self,
        db: Database,
        scheduler: SchedulerPort,
        checks: DeepChecks,
        *,
        clock: Callable[[], float] = time.time,
        wake_s: float = WAKE_S,
        look_every_s: float = LOOK_EVERY_S,
    ):
        self._db, self._scheduler, self._checks = db, scheduler, checks
        self._clock, self._wake_s, self._look_every_s = clock, wake_s, look_every_s

    async def all_devices(self, again_s: float = AGAIN_S, round_s: float = ROUND_S) -> None:
        """Check every device, one after the other. One that cannot be spared is asked for again after `again_s`, for as
        long as `round_s`: an engine that answered just before would cost it the night."""
        left = [device["id"] for device in self._scheduler.status()["devices"]]
        ends_s = self._clock() + round_s
        while left := await self._pass(left):
            if self._clock() + again_s > ends_s:
                return
            await asyncio.sleep(again_s)

    async def _pass(self, device_ids: list[str]) -> list[str]:
        """Check these devices, then wake what slept for it. Returns those that could not be spared."""
        asleep = dict[str, int]()
        left = [device_id for device_id in device_ids if await self._is_needed(device_id, asleep)]
        if asleep:
            await self._wake(asleep)
        return left

    async def _is_needed(self, device_id: str, asleep: dict[str, int]) -> bool:
        """Check it. Whether that was refused because it cannot be spared now."""
        try:
            if device_id not in cordons.read(self._db).cordoned:
                await self._checks.check(device_id, BOX, asleep=asleep)
        except OperationFailed as error:
            log.info("no deep check: %s", error, extra={"device": device_id})
            return error.code == "device_needed"
        return False

    async def _wake(self, asleep: dict[str, int]) -> None:
        until_s = self._clock() + self._wake_s
        box.put(self._db, AWAKE_AGAIN, {"models": asleep, "until_s": until_s})
        self._scheduler.nudge("engines that slept for a deep check wake", BOX)
        while self._clock() < until_s:
            states = Counter(one["model"] for one in self._scheduler.status()["replicas"] if one["state"] == "open")
            if all(states[model] >= count for model, count in asleep.items()):
                break
            await asyncio.sleep(self._look_every_s)
        box.put(self._db, AWAKE_AGAIN, {})
        self._scheduler.nudge("the round of deep checks", BOX)


def with_awake_again(db: Database, deployments: Iterable[DeploymentView], now_s: float) -> Iterable[DeploymentView]:
    """The deployments, those that slept for a check with how many of their engines are to be awake again. What a
    controller that died had asked for ends by itself."""
    wish = box.get(db, AWAKE_AGAIN, {})
    counts = wish["models"] if wish and wish["until_s"] > now_s else {}
    return (replace(one, awake_again=counts[one.model]) if one.model in counts else one for one in deployments)


class Nightly:
    """Runs `check_all` once a day at a time of day of this machine's clock, "HH:MM". One that is missed is left out."""

    def __init__(self, at: str, check_all: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.time):
        self._hour, self._minute = (int(part) for part in at.split(":"))
        self._check_all, self._clock = check_all, clock
        self._next_s = self._after(clock())

    async def look(self) -> None:
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = self._after(now_s)
            await self._check_all()

    def _after(self, now_s: float) -> float:
        """The next time that the clock shows it, by local time, whatever daylight saving does."""
        day = time.localtime(now_s)
        for ahead in (0, 1, 2):
            at_s = time.mktime((day.tm_year, day.tm_mon, day.tm_mday + ahead, self._hour, self._minute, 0, 0, 0, -1))
            if at_s > now_s:
                return at_s
        raise AssertionError("a day has 25 hours at most")
