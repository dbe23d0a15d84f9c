"""The power limit that the box keeps, and the energy that devices draw for whoever holds them."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.controller.devices.energy import EnergyMeter, holders_of
from appliance.controller.devices.mode import write_mode
from appliance.controller.devices.power import PowerKeeper
from appliance.controller.interfaces.records import Mode
from appliance.store.objects import job_records, jobs
from appliance.store.records import energy, usage
from appliance.store.rows import JobMetricRow
from appliance.store.upkeep import retention
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


async def test_box_without_limits_sets_none(db, driver):
    keeper = PowerKeeper({}, db, 0, [Device("n0/0", "n0", 0, uuid="GPU-a")], driver)
    await keeper.look()
    assert driver.calls == 0 and keeper.status() == {"set": False, "limit_w": None, "refused": {}}


def status(*holders: tuple[str, str] | None, replicas: tuple[str, ...] = ()) -> Any:
    devices = [
        {"id": f"n0/{n}", "holder": None if one is None else {"kind": one[0], "id": one[1]}}
        for n, one in enumerate(holders)
    ]
    return {"devices": devices, "replicas": [{"id": name, "model": "starter"} for name in replicas]}


def test_who_holds_a_device():
    shown = status(("job", "ftjob-1"), ("replica", "r1"), None, ("replica", "gone"), replicas=("r1",))
    assert holders_of(shown) == {"n0/0": ("job", "ftjob-1"), "n0/1": ("model", "starter")}


class Meters:
    """Two devices whose counters the test turns."""

    def __init__(self, db: Any):
        self.readings: dict[str, Reading] = {}
        self.shown = status(("job", "ftjob-1"), None)
        self.meter = EnergyMeter(db, lambda: self.readings, lambda: self.shown, lambda: NOON)

    async def look(self, at_s: float, *joules: float | None) -> None:
        self.readings = {f"n0/{n}": Reading(f"n0/{n}", at_s, energy_j=one) for n, one in enumerate(joules)}
        await self.meter.look()


def drawn(db) -> dict[tuple[str, str], tuple[float, float]]:
    return {(one.kind, one.name): (one.joules, one.metered_s) for one in energy.since(db, 0)}


async def test_what_devices_draw_is_booked_for_their_holders(db):
    meters = Meters(db)
    await meters.look(0, 1000, 500)
    assert drawn(db) == {}, "what was drawn before is nobody's"
    await meters.look(5, 2000, 600)
    assert drawn(db) == {("job", "ftjob-1"): (1000, 5), ("idle", ""): (100, 5)}
    await meters.look(5, 2000, 600)
    assert drawn(db)["job", "ftjob-1"] == (1000, 5), "the same reading counts once"
    meters.shown = status(("replica", "r1"), None, replicas=("r1",))
    await meters.look(15, 3000, 700)
    assert drawn(db) == {("job", "ftjob-1"): (1500, 10), ("model", "starter"): (500, 5), ("idle", ""): (200, 15)}
    await meters.look(20, 10, None)  # its driver was loaded anew; the other does not count any more
    await meters.look(25, 20, 900)
    assert drawn(db)["model", "starter"] == (510, 10) and drawn(db)["idle", ""] == (200, 15)


async def test_a_box_whose_devices_count_nothing_writes_nothing(db):
    meters = Meters(db)
    await meters.look(0, None, None)
    await meters.look(5, None, None)
    assert energy.since(db, 0) == []


def trained(control: Control, job_id: str, *, steps: int, tokens: int, joules: float, metered_s: float) -> None:
    """A job that held one device for a hundred seconds."""
    db = control.db
    jobs.update(db, job_id, step=steps, trained_tokens=tokens)
    job_records.upsert_metric(db, JobMetricRow(job_id, 1, NOON, tokens_per_s=100.0, devices=1))
    usage.devices_held(db, job_id, 1, 0.0)
    usage.devices_held(db, job_id, 0, 100.0)
    energy.add(db, {("job", job_id): (joules, metered_s)}, NOON)


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


async def test_of_a_job_that_was_counted_for_half_its_time_nothing_is_told_per_step(control: Control):
    job_id = await control.job()
    trained(control, job_id, steps=50, tokens=20_000, joules=36_000.0, metered_s=50.0)
    told = (await ask(control, "GET", f"/v1/fine_tuning/jobs/{job_id}"))["energy"]
    assert told["metered_share"] == 0.5
    assert told["joules_per_step"] is None and told["joules_per_1000_tokens"] is None


async def test_a_plan_tells_the_energy_of_jobs_like_it_else_the_limit_of_the_devices(control: Control):
    asked = {"job": {"model": "starter", "examples": 1000}}
    plan = await ask(control, "POST", "/plan", json=asked)
    assert plan["device_hours"] is None and plan["energy"] is None
    job_id = await control.job()
    trained(control, job_id, steps=50, tokens=20_000, joules=0.0, metered_s=0.0)
    assert (await ask(control, "POST", "/plan", json=asked))["energy"] is None, "nothing tells what they draw"
    control.context.health.newest = lambda: {"n0/0": Reading("n0/0", 0.0, power_limit_w=700.0)}
    plan = await ask(control, "POST", "/plan", json=asked)
    assert (plan["energy"]["watts_per_device"], plan["energy"]["watts_from"]) == (700.0, "limit")
    energy.add(control.db, {("job", job_id): (30_000.0, 100.0)}, NOON)
    plan = await ask(control, "POST", "/plan", json=asked)
    told, hours = plan["energy"], plan["device_hours"]
    assert (told["watts_per_device"], told["watts_from"]) == (300.0, "jobs")
    assert told["kwh"] == pytest.approx(0.3 * hours)


async def test_the_report_has_jobs_models_and_what_nobody_held(control: Control):
    job_id = await control.job()
    trained(control, job_id, steps=50, tokens=20_000, joules=36_000.0, metered_s=95.0)
    now_s = 10 * NOON
    energy.add(control.db, {("model", "starter"): (5000.0, 10.0), ("idle", ""): (100.0, 10.0)}, now_s)
    energy.add(control.db, {("job", job_id): (4000.0, 5.0)}, now_s)
    used = {"key": "key_test", "model": "starter", "version": "v1", "requests": 1, "errors": 0}
    usage.add(control.db, [{**used, "prompt_tokens": 400, "completion_tokens": 100}], now_s)
    usage.add(control.db, [{**used, "prompt_tokens": 10**6, "completion_tokens": 0}], NOON)
    control.context.health.newest = lambda: {"n0/0": Reading("n0/0", 0.0, energy_j=1.0), "n0/1": Reading("n0/1", 0)}
    told = await ask(control, "GET", f"/power?since_s={now_s}")
    assert [(one["kind"], one["name"], one["joules"], one["joules_per_1000_tokens"]) for one in told["data"]] == [
        ("job", job_id, 40_000.0, 2000.0),  # of all its time
        ("model", "starter", 5000.0, 10_000.0),  # of this hour
        ("idle", "", 100.0, None),
    ]
    assert told["meters"] == 1
    assert [one["kind"] for one in (await ask(control, "GET", "/power"))["data"]] == ["job", "model", "idle"]


def test_old_hours_are_deleted(db):
    for hour in range(5):
        energy.add(db, {("idle", ""): (1.0, 1.0), ("model", "m"): (1.0, 1.0)}, hour * 3600.0)
    retention.delete_aged(db, "energy", 3 * 3600.0)
    assert {one.joules for one in energy.since(db, 0)} == {3.0}
