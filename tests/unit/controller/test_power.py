"""The power limit that the box keeps, and the energy of jobs."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.controller.devices.mode import write_mode
from appliance.controller.devices.power import EnergyMeter, PowerKeeper
from appliance.controller.interfaces.records import Mode
from appliance.store.objects import job_records, jobs
from appliance.store.records import usage
from appliance.store.rows import JobMetricRow
from runtime.devices.kind import PowerLimits, PowerRefused, Reading
from scheduler.core.inventory import Device
from tests.unit.controller.conftest import SCOPES, Control
from tests.unit.controller.test_admin import ask

NOON = 12 * 3600.0


class Driver:
    """The limits of two devices. refuses: to set any."""

    def __init__(self) -> None:
        self.limits_w = {"GPU-a": 700.0, "GPU-b": 700.0}
        self.refuses = False
        self.calls = 0

    def limits(self) -> dict[str, PowerLimits]:
        return {uuid: PowerLimits(limit_w, 700.0) for uuid, limit_w in self.limits_w.items()}

    def set_limit(self, uuid: str, limit_w: float) -> None:
        self.calls += 1
        if self.refuses:
            raise PowerRefused("only root may")
        self.limits_w[uuid] = limit_w


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def keeper(db, driver) -> PowerKeeper:
    return PowerKeeper({"serve": 450.0}, db, 0, [Device("n0/0", "n0", 0, uuid="GPU-a")], driver)


async def test_power_limit_follows_the_mode(db, keeper, driver):
    write_mode(db, Mode("serve"), 1.0)
    await keeper.look()
    await keeper.look()
    assert driver.limits_w == {"GPU-a": 450.0, "GPU-b": 700.0} and driver.calls == 1, "b is not the box's to limit"
    assert keeper.status() == {"set": True, "limit_w": 450.0, "refused": {}}
    write_mode(db, Mode("train"), 2.0)
    await keeper.look()
    assert driver.limits_w["GPU-a"] == 700.0 and keeper.status()["limit_w"] is None


async def test_power_limit_that_the_driver_refuses_is_shown_and_tried_again(db, keeper, driver):
    write_mode(db, Mode("serve"), 1.0)
    driver.refuses = True
    await keeper.look()
    assert keeper.status()["refused"] == {"n0/0": "only root may"}
    driver.refuses = False
    await keeper.look()
    assert keeper.status()["refused"] == {} and driver.limits_w["GPU-a"] == 450.0


class Meters:
    """Two devices whose counters the test turns; a job holds the first."""

    def __init__(self, control: Control, job_id: str):
        self.readings: dict[str, Reading] = {}
        self.hold({"kind": "job", "id": job_id}, {"kind": "replica", "id": "r1"})
        self.meter = EnergyMeter(control.db, lambda: self.readings, lambda: self.shown)

    def hold(self, *holders: dict[str, str] | None) -> None:
        self.shown: Any = {"devices": [{"id": f"n0/{n}", "holder": one} for n, one in enumerate(holders)]}

    async def look(self, at_s: float, *joules: float | None) -> None:
        self.readings = {f"n0/{n}": Reading(f"n0/{n}", at_s, energy_j=one) for n, one in enumerate(joules)}
        await self.meter.look()


async def test_energy_of_devices_is_booked_for_the_job_that_holds_them(control: Control):
    job_id = await control.job()
    meters = Meters(control, job_id)

    def drawn() -> tuple[float | None, float]:
        row = jobs.get(control.db, job_id)
        return row.joules, row.metered_s

    await meters.look(0, None, None)
    await meters.look(5, 1000, 500)
    assert drawn() == (None, 0), "what was drawn before is nobody's"
    await meters.look(10, 2000, 600)
    await meters.look(10, 2000, 600)
    assert drawn() == (1000, 5), "the same reading counts once"
    meters.hold(None, None)
    await meters.look(20, 3000, 700)
    assert drawn() == (1500, 10), "a device that changed hands is booked by halves"
    meters.hold({"kind": "job", "id": job_id}, None)
    await meters.look(25, 10, None)  # its driver was loaded anew; the other does not count any more
    await meters.look(30, 20, 900)
    assert drawn() == (1510, 15)


def trained(control: Control, job_id: str, *, steps: int, tokens: int, joules: float, metered_s: float) -> None:
    """A job that held one device for a hundred seconds."""
    db = control.db
    jobs.update(db, job_id, step=steps, trained_tokens=tokens)
    job_records.upsert_metric(db, JobMetricRow(job_id, 1, NOON, tokens_per_s=100.0, devices=1))
    usage.devices_held(db, job_id, 1, 0.0)
    usage.devices_held(db, job_id, 0, 100.0)
    if metered_s:
        jobs.add_energy(db, job_id, joules, metered_s)


async def test_a_job_tells_its_energy(control: Control):
    job_id = await control.job()
    assert (await ask(control, "GET", f"/v1/fine_tuning/jobs/{job_id}"))["energy"] is None
    trained(control, job_id, steps=50, tokens=20_000, joules=36_000.0, metered_s=95.0)
    told = (await ask(control, "GET", f"/v1/fine_tuning/jobs/{job_id}"))["energy"]
    assert told == {
        "joules": 36_000.0,
        "metered_share": 0.95,
        "joules_per_step": 720.0,
        "joules_per_1000_tokens": 1800.0,
        "kwh": pytest.approx(0.01),
    }
    own = (await control.http.get(f"/v1/fine_tuning/jobs/{job_id}", headers=SCOPES)).json()
    assert own["energy"] == told, "its owner sees it too"
