"""The power limit that the box keeps, and the energy of jobs."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from appliance.controller.devices.mode import EnergyMeter, Mode, PowerKeeper, of_job, write_mode
from appliance.store.objects import jobs
from appliance.store.records import usage
from runtime.devices.kind import Reading
from runtime.devices.kinds import kind_of
from scheduler.core.workload import Device
from tests.devices_support.nvml import Machine, eight_h100
from tests.unit.controller.conftest import SCOPES, Control


@pytest.fixture
def driver(monkeypatch) -> Machine:
    return eight_h100().install(monkeypatch)


@pytest.fixture
def keeper(db, driver) -> PowerKeeper:
    return PowerKeeper({"serve": 450.0}, db, 0, [Device("n0/0", "n0", 0, uuid="GPU-h100-0")], kind_of("cuda"))


async def test_power_limit_follows_the_mode(db, keeper, driver):
    write_mode(db, Mode("serve"), 1.0)
    await keeper.look()
    await keeper.look()
    limits_mw = [gpu.limit_mw for gpu in driver.gpus]
    assert limits_mw == [450_000, *[700_000] * 7] and driver.limits_set == 1, "the others are not the box's to limit"
    assert keeper.status() == {"set": True, "limit_w": 450.0, "refused": {}}
    write_mode(db, Mode("train"), 2.0)
    await keeper.look()
    assert driver.gpus[0].limit_mw == 700_000 and keeper.status()["limit_w"] is None


async def test_power_limit_that_the_driver_refuses_is_shown_and_tried_again(db, keeper, driver):
    write_mode(db, Mode("serve"), 1.0)
    driver.set_limit_error = pynvml.NVMLError_NoPermission()
    await keeper.look()
    assert keeper.status()["refused"] == {"n0/0": "the driver says: Insufficient Permissions"}
    driver.set_limit_error = None
    await keeper.look()
    assert keeper.status()["refused"] == {} and driver.gpus[0].limit_mw == 450_000


async def test_power_limit_of_a_lost_gpu_is_left_out(db, keeper, driver):
    write_mode(db, Mode("serve"), 1.0)
    driver.gpus[0].handle_error = pynvml.NVMLError_GpuIsLost()
    await keeper.look()
    assert keeper.status()["refused"] == {} and driver.limits_set == 0 and driver.users == 0


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
    assert drawn() == (1000, 5), "whoever holds it now pays"
    meters.hold({"kind": "job", "id": job_id}, None)
    await meters.look(25, 10, None)  # its driver was loaded anew; the other does not count any more
    await meters.look(30, 20, 900)
    assert drawn() == (1010, 10)


async def test_energy_of_a_job_is_told_by_step_and_token_where_its_time_was_metered(control: Control):
    job_id, db = await control.job(), control.db
    jobs.update(db, job_id, step=50, trained_tokens=20_000)
    usage.devices_held(db, job_id, 1, 0.0)
    usage.devices_held(db, job_id, 0, 100.0)
    assert of_job(db, jobs.get(db, job_id), 100.0) is None
    jobs.add_energy(db, job_id, 18_000.0, 80.0)
    partly = of_job(db, jobs.get(db, job_id), 100.0)
    assert partly is not None and (partly["metered_share"], partly["joules_per_step"]) == (0.8, None)
    jobs.add_energy(db, job_id, 18_000.0, 15.0)
    answer = await control.http.get(f"/v1/fine_tuning/jobs/{job_id}", headers=SCOPES)
    told = answer.json()["energy"]
    assert (told["joules_per_step"], told["joules_per_1000_tokens"]) == (720.0, 1800.0)
    assert told["kwh"] == pytest.approx(0.01)
