"""Takes one device at a time out of use, has it measured, and gives it back: the deep checks of the doctor.

A device is drained as `appliance gpu drain` does it, through the scheduler, but only if that costs no model an awake
engine (by night, none that is needed: `night_round`) and no job its turn; it goes back at once when requests begin to
be held meanwhile, when somebody puts it back, or when whoever asked has gone. Its first good measures become its
baseline. What a controller that died had taken is given back by the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from appliance.controller.devices import cordons
from appliance.controller.interfaces.errors import OperationFailed
from appliance.controller.interfaces.ports import DEVICE_FAILED, DeviceMeasure, DeviceStatus, SchedulerPort
from appliance.store.database import Database
from appliance.store.records import box
from runtime.background_tasks import RunningTasks
from runtime.devices.kinds import kind_of
from runtime.devices.published import published
from scheduler.devices.health import Fault
from scheduler.devices.rates import Measured, fault_of, judged, state_of
from scheduler.loop.spare import Spare

log = logging.getLogger(__name__)

RESULTS = "device_checks"
BASELINES = "device_baselines"
LOOK_EVERY_S = 0.2
QUIET_S = 300.0
"""How long nobody has asked a model before its last engine sleeps for a check that nobody waits for."""
BOX = "the box"
T = TypeVar("T")


class DeepChecks:
    """`held`: how many requests wait now because no engine of their model is awake. `on_verdict`: called with what was
    found of a device (None: it is sound), which cordons it or lets it back. `limits`: in words, what the box holds a
    device to (appliance.controller.devices.power); "" if to nothing."""

    def __init__(
        self,
        db: Database,
        scheduler: SchedulerPort,
        measure: DeviceMeasure,
        held: Callable[[], int],
        on_verdict: Callable[[str, Fault | None], None],
        drain_timeout_s: float,
        *,
        limits: Callable[[str], str] = lambda device_id: "",
        look_every_s: float = LOOK_EVERY_S,
    ):
        self._limits = limits
        self._db, self._scheduler, self._measure, self._held = db, scheduler, measure, held
        self._on_verdict, self._drain_timeout_s = on_verdict, drain_timeout_s
        self._look_every_s = look_every_s
        self._one = asyncio.Lock()
        self.tasks = RunningTasks()
        if left := box.get(db, cordons.CHECKED, {}):
            cordons.checks_are_over(db, tuple(left))

    def results(self) -> dict[str, dict[str, Any]]:
        return box.get(self._db, RESULTS, {})

    async def check(
        self, device_id: str, by: str, *, new_baseline: bool = False, asleep: dict[str, int] | None = None
    ) -> dict[str, Any]:
        """The result: {"device", "at_s", "state", "found": rows of `scheduler.devices.rates.Measured`, "rates"}.

        asleep: given, engines that nobody needs now may sleep for it, and it gets how many of which models were awake.
        Raises OperationFailed: `device_needed`, it cannot be spared now, or was wanted back; `not_measured`. Cancelled,
        it gives the device back first."""
        async with self._one:
            device = self._known(device_id)
            before = self._held()
            async with self._taken([device_id], by, asleep):
                await self._until_free(device_id, before)
                limits = self._limits(device_id)
                rates, wrong = await self._unless_wanted([device_id], before, self._alone(device))
                names = {measure: measure for measure in rates}
                shared_found: list[Measured] = []
                if not wrong:
                    others = self._free_beside(device)
                    shared, shared_found = await self._with_others(device, others, by, before)
                    rates = rates | shared
                    # Others may be joined to it by other links.
                    with_them = " and ".join(sorted(map(self._identity, others)))
                    names |= {measure: f"{measure}, with {with_them}" for measure in shared}
                if not wrong and self._limits(device_id) != limits:
                    raise OperationFailed(
                        f"the power profile of {device_id} changed while it was measured; ask again",
                        code="device_needed",
                    )
                # A sound device whose clock the box has bounded is slower than before, and than what is published.
                names = {measure: f"{name}, at {limits}" if limits else name for measure, name in names.items()}
                wanted = {} if limits else published(device["name"])
                # Before it goes back: a device that fails stays where it is.
                return self._kept(device, rates, names, wanted, wrong, shared_found, new_baseline)

    def before_return(self, device_id: str) -> None:
        """Check a cordoned device that is to be tried again; the verdict is told. Never raises."""
        self.tasks.add(asyncio.create_task(self._before_return(device_id), name=f"deep check of {device_id}"))

    async def _before_return(self, device_id: str) -> None:
        try:
            await self.check(device_id, BOX)
        except OperationFailed as error:
            # It was not measured, which says nothing about it: as before there were measures, it is tried.
            log.warning("no deep check before it returns: %s", error, extra={"device": device_id})
            self._on_verdict(device_id, None)

    def _known(self, device_id: str) -> DeviceStatus:
        for device in self._scheduler.status()["devices"]:
            if device["id"] == device_id:
                return device
        raise OperationFailed(f"{device_id} is not there", code="device_not_found")

    @asynccontextmanager
    async def _taken(self, device_ids: list[str], by: str, asleep: dict[str, int] | None = None) -> AsyncIterator[None]:
        """These devices are nobody's meanwhile. Those that were out of use already stay so afterwards."""
        fresh = [one for one in device_ids if one not in cordons.read(self._db).cordoned]
        spare = self._scheduler.spare(frozenset(fresh), None if asleep is None else QUIET_S) if fresh else Spare("")
        if spare.costs:
            raise OperationFailed(
                f"{' and '.join(device_ids)} cannot be spared now: {spare.costs}. Ask again when it is quiet, or take "
                "it out of use yourself (`appliance gpu drain`) and check it then",
                code="device_needed",
            )
        if asleep is not None:
            asleep |= {model: max(count, asleep.get(model, 0)) for model, count in spare.asleep.items()}
        cordons.check(self._db, fresh, by, time.time())
        self._scheduler.nudge(f"deep check of {', '.join(device_ids)}", by)
        try:
            yield
        finally:
            cordons.checks_are_over(self._db, fresh)
            self._scheduler.nudge(f"end of the deep check of {', '.join(device_ids)}", by)

    async def _until_free(self, device_id: str, held_before: int) -> None:
        """Returns when the scheduler knows that the device is out of use, and nobody holds it."""
        deadline_s = time.monotonic() + self._drain_timeout_s
        while True:
            device = self._known(device_id)
            if device["holder"] is None and device["health"] != "ok":
                return
            if time.monotonic() > deadline_s:
                raise OperationFailed(
                    f"{device_id} was not left within {self._drain_timeout_s:.0f} s by its "
                    f"{(device['holder'] or {'kind': 'holder'})['kind']}; it is back in use",
                    code="device_needed",
                )
            self._wanted_back([device_id], held_before)
            await asyncio.sleep(self._look_every_s)

    def _wanted_back(self, device_ids: list[str], held_before: int) -> None:
        if lost := [one for one in device_ids if one not in cordons.read(self._db).cordoned]:
            raise OperationFailed(f"{lost[0]} was put back into use during its check", code="device_needed")
        if self._held() > held_before:
            raise OperationFailed(
                f"requests wait for an engine: {' and '.join(device_ids)} went back into use before it was measured",
                code="device_needed",
            )

    async def _unless_wanted(self, device_ids: list[str], held_before: int, work: Awaitable[T]) -> T:
        """What the work returns; it is ended as soon as the devices are wanted back."""
        doing = asyncio.ensure_future(work)
        try:
            while not doing.done():
                await asyncio.wait({doing}, timeout=self._look_every_s)
                self._wanted_back(device_ids, held_before)
            return await doing
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    async def _alone(self, device: DeviceStatus) -> tuple[dict[str, float], list[str]]:
        try:
            return await self._measure.alone(device["id"])
        except OperationFailed as error:
            # Else the host was short of something, the device's node has gone, or others' programs hold its memory.
            if error.code == DEVICE_FAILED and not kind_of(device["kind"]).on_host:
                return {}, [f"it cannot be measured: {error}"]
            raise OperationFailed(str(error), code="not_measured") from error

    def _free_beside(self, device: DeviceStatus) -> list[str]:
        """Those that happen to be free, and can compute together with it."""
        status, cordoned = self._scheduler.status(), cordons.read(self._db).cordoned
        return [
            one["id"]
            for one in status["devices"]
            if one["node"] == device["node"]
            and one["kind"] == device["kind"]
            and one["holder"] is None
            and one["health"] == "ok"
            and one["id"] not in cordoned
        ]

    async def _with_others(
        self, device: DeviceStatus, free: list[str], by: str, held_before: int
    ) -> tuple[dict[str, float], list[Measured]]:
        """The rate of an all-reduce with those that are free, empty if there is none; what failed of it, which may be
        any of them."""
        if not free:
            return {}, []
        together = [device["id"], *free]
        try:
            async with self._taken(free, by):
                for one in free:
                    await self._until_free(one, held_before)
                work = self._measure.together(together)
                return await self._unless_wanted(together, held_before, work), []
        except OperationFailed as error:
            log.info("no all-reduce was measured: %s", error, extra={"device": device["id"]})
            if error.code == "device_needed":
                return {}, []
            return {}, [Measured("all-reduce", "warn", f"with {', '.join(free)}: {error}", "measured")]

    def _kept(
        self,
        device: DeviceStatus,
        rates: dict[str, float],
        names: dict[str, str],
        wanted: Mapping[str, float],
        wrong: list[str],
        shared_found: list[Measured],
        new_baseline: bool,
    ) -> dict[str, Any]:
        """Judge, keep, tell. names: what each measure's baseline is kept under. wanted: the least, whatever that is,
        unless a person took less for its baseline: a slot or power limit may leave no more."""
        device_id = device["id"]
        name = self._identity(device_id)
        known = box.get(self._db, BASELINES, {})
        kept = {} if new_baseline else known.get(name, {})
        baseline = {measure: kept[names[measure]] for measure in rates if names[measure] in kept}
        on_host = kind_of(device["kind"]).on_host
        wanted = {} if new_baseline else {m: least for m, least in wanted.items() if baseline.get(m, least) >= least}
        found = [*judged(rates, wrong, baseline, wanted, on_host=on_host), *shared_found]
        result = {
            "device": device_id,
            "at_s": time.time(),
            "state": state_of(found),
            "found": [asdict(one) for one in found],
            "rates": rates,
        }
        with self._db.transaction():
            if state_of(found) == "ok":
                box.put(
                    self._db,
                    BASELINES,
                    {**known, name: {names[measure]: rate for measure, rate in rates.items()} | kept},
                )
            box.put(self._db, RESULTS, {**box.get(self._db, RESULTS, {}), device_id: result})
        _tell(device_id, found)
        self._on_verdict(device_id, fault_of(found))
        return result

    def _identity(self, device_id: str) -> str:
        """What its baseline is kept under: the same device, whatever its index is."""
        return box.get(self._db, cordons.IDENTITIES, {}).get(device_id) or device_id


def _tell(device_id: str, found: list[Measured]) -> None:
    for one in found:
        if one.state != "ok":
            log.warning(
                "deep check: %s is %s, wanted %s", one.measure, one.found, one.wanted, extra={"device": device_id}
            )
