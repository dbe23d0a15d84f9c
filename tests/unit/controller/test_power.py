"""The power profile that the box keeps, the energy that devices draw for whoever holds them, and what it comes to."""

from __future__ import annotations

import time
from typing import Any

import pytest

from appliance.controller.devices.energy import EnergyMeter, holders_of
from appliance.controller.devices.mode import write_mode
from appliance.controller.devices.power import AGAIN_S, PowerKeeper
from appliance.controller.interfaces.ports import Mode
from appliance.power.helper_client import HelperAway
from appliance.power.settings import PowerSettings
from appliance.store.objects import job_records, jobs
from appliance.store.records import audit, energy, usage
from appliance.store.rows import JobMetricRow
from appliance.store.upkeep import retention
from runtime.devices.kind import Reading
from tests.unit.controller.conftest import SCOPES, Clock, Control
from tests.unit.controller.test_admin import ask

SETTINGS = PowerSettings(
    helper_socket="/run/x",
    profiles={"quiet": {"limit_w": 300}, "night": {"limit_w": 500, "clock_mhz": 1410}},
    by_mode={"serve": "quiet"},
    by_clock={"22:00-06:00": "night"},
)
NOON = 12 * 3600.0


class Helper:
    """Records what is asked for. refuses: by UUID; away: it does not answer."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.refuses: dict[str, str] = {}
        self.away = False

    async def set(self, devices: dict[str, Any]) -> dict[str, str]:
        if self.away:
            raise HelperAway("it is not there")
        self.asked.append(devices)
        return self.refuses

    def close(self) -> None:
        self.asked.append({"closed": True})


@pytest.fixture
def clock(clock: Clock) -> Clock:
    clock.now_s = NOON
    return clock


@pytest.fixture
def helper() -> Helper:
    return Helper()


@pytest.fixture
def keeper(db, helper, clock) -> PowerKeeper:
    return PowerKeeper(SETTINGS, db, 0, lambda: {"GPU-a": "n0/0", "GPU-b": "n0/1"}, helper, clock, time.gmtime)


def told(db) -> list[tuple[str, str]]:
    return [(row.target, row.detail["because"]) for row in audit.page(db, after=None, limit=10).data][::-1]


async def test_the_profile_follows_the_mode_and_the_clock(db, keeper, helper, clock):
    assert keeper.status()["profile"] is None
    await keeper.look()
    assert helper.asked == [{}] and keeper.status()["profile"] == "off", "a new box restores nothing, and says so"
    assert told(db) == []
    write_mode(db, Mode("serve"), clock())
    await keeper.look()
    await keeper.look()
    assert helper.asked[1:] == [{"GPU-a": {"limit_w": 300.0}, "GPU-b": {"limit_w": 300.0}}], "once"
    clock.now_s += 10 * 3600
    await keeper.look()
    assert helper.asked[2]["GPU-a"] == {"limit_w": 500.0, "clock_mhz": 1410}
    assert keeper.status() == {
        "helper": True,
        "profile": "night",
        "limit_w": 500.0,
        "clock_mhz": 1410,
        "because": "the clock: 22:00-06:00",
        "refused": {},
    }
    assert [keeper.limits_of(device_id) for device_id in ("n0/0", "n1/0")] == ["500 W and 1410 MHz", ""]
    clock.now_s += 9 * 3600
    await keeper.look()
    write_mode(db, Mode("train"), clock())
    await keeper.look()
    assert helper.asked[4] == {}
    mode, night = "the mode: serve", "the clock: 22:00-06:00"
    assert told(db) == [("quiet", mode), ("night", night), ("quiet", mode), ("off", "the mode: train")]
    keeper.close()
    assert helper.asked[-1] == {"closed": True}


async def test_a_device_that_was_reset_gets_its_limits_again(keeper, helper, clock):
    await keeper.look()
    clock.now_s += AGAIN_S
    await keeper.look()
    assert len(helper.asked) == 2


async def test_what_the_helper_refuses_is_shown(db, keeper, helper, clock):
    write_mode(db, Mode("serve"), clock())
    helper.refuses = {"GPU-b": "300 W is not possible"}
    await keeper.look()
    assert keeper.status()["refused"] == {"n0/1": "300 W is not possible"}
    assert audit.page(db, after=None, limit=1).data[0].detail["refused"] == {"n0/1": "300 W is not possible"}


async def test_a_helper_that_is_away_is_asked_again_and_nothing_is_claimed(db, keeper, helper, clock):
    write_mode(db, Mode("serve"), clock())
    await keeper.look()
    clock.now_s += AGAIN_S
    helper.away = True
    with pytest.raises(HelperAway):
        await keeper.look()
    assert keeper.status()["profile"] is None
    helper.away = False
    await keeper.look()
    assert keeper.status()["profile"] == "quiet"


async def test_without_a_helper_nothing_happens(db, clock):
    keeper = PowerKeeper(PowerSettings(), db, 0, dict, None, clock)
    await keeper.look()
    keeper.close()
    assert keeper.status()["helper"] is False and keeper.status()["profile"] is None


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


async def test_a_job_tells_its_energy_and_what_it_cost(control: Control):
    control.context.power = PowerSettings(price_per_kwh=0.36, pue=2.0)
    job_id = await control.job()
    assert (await ask(control, "GET", f"/jobs/{job_id}"))["energy"] is None
    trained(control, job_id, steps=50, tokens=20_000, joules=36_000.0, metered_s=95.0)
    told = (await ask(control, "GET", f"/jobs/{job_id}"))["energy"]
    assert told == {
        "joules": 36_000.0,
        "metered_share": 0.95,
        "joules_per_step": 720.0,
        "joules_per_1000_tokens": 1800.0,
        "device_kwh": pytest.approx(0.01),
        "site_kwh": pytest.approx(0.02),
        "cost": pytest.approx(0.0072),
        "currency": "EUR",
    }
    own = (await control.http.get(f"/v1/fine_tuning/jobs/{job_id}", headers=SCOPES)).json()
    assert own["energy"] == told, "its owner sees it too"


async def test_of_a_job_that_was_counted_for_half_its_time_nothing_is_told_per_step(control: Control):
    job_id = await control.job()
    trained(control, job_id, steps=50, tokens=20_000, joules=36_000.0, metered_s=50.0)
    told = (await ask(control, "GET", f"/jobs/{job_id}"))["energy"]
    assert told["metered_share"] == 0.5
    assert told["joules_per_step"] is None and told["joules_per_1000_tokens"] is None and told["cost"] is None


async def test_a_plan_tells_the_energy_of_jobs_like_it_else_the_limit_of_the_devices(control: Control):
    control.context.power = PowerSettings(price_per_kwh=0.5, rest_w_per_device=100, price_per_device_hour=2)
    asked = {"job": {"model": "starter", "examples": 1000}}
    plan = await ask(control, "POST", "/plan", json=asked)
    assert plan["device_hours"] is None and plan["energy"] is None and plan["hire"] is None
    job_id = await control.job()
    trained(control, job_id, steps=50, tokens=20_000, joules=0.0, metered_s=0.0)
    assert (await ask(control, "POST", "/plan", json=asked))["energy"] is None, "nothing tells what they draw"
    control.context.device_readings = lambda: {"n0/0": Reading("n0/0", 0.0, power_limit_w=700.0)}
    plan = await ask(control, "POST", "/plan", json=asked)
    assert (plan["energy"]["watts_per_device"], plan["energy"]["watts_from"]) == (700.0, "limit")
    energy.add(control.db, {("job", job_id): (30_000.0, 100.0)}, NOON)
    plan = await ask(control, "POST", "/plan", json=asked)
    told, hours = plan["energy"], plan["device_hours"]
    assert (told["watts_per_device"], told["watts_from"]) == (300.0, "jobs")
    assert plan["hire"] == {"per_device_hour": 2.0, "cost": [2.0 * hours], "currency": "EUR"}
    assert told["device_kwh"] == pytest.approx(0.3 * hours) and told["cost"] == pytest.approx(0.4 * hours * 0.5)


async def test_the_report_has_jobs_models_and_what_nobody_held(control: Control):
    job_id = await control.job()
    trained(control, job_id, steps=50, tokens=20_000, joules=36_000.0, metered_s=95.0)
    now_s = 10 * NOON
    energy.add(control.db, {("model", "starter"): (5000.0, 10.0), ("idle", ""): (100.0, 10.0)}, now_s)
    energy.add(control.db, {("job", job_id): (4000.0, 5.0)}, now_s)
    used = {"key": "key_test", "model": "starter", "version": "v1", "requests": 1, "errors": 0}
    usage.add(control.db, [{**used, "prompt_tokens": 400, "completion_tokens": 100}], now_s)
    usage.add(control.db, [{**used, "prompt_tokens": 10**6, "completion_tokens": 0}], NOON)
    control.context.device_readings = lambda: {"n0/0": Reading("n0/0", 0.0, energy_j=1.0), "n0/1": Reading("n0/1", 0)}
    told = await ask(control, "GET", f"/power?since_s={now_s}")
    assert [(one["kind"], one["name"], one["joules"], one["joules_per_1000_tokens"]) for one in told["data"]] == [
        ("job", job_id, 40_000.0, 2000.0),  # of all its time
        ("model", "starter", 5000.0, 10_000.0),  # of this hour
        ("idle", "", 100.0, None),
    ]
    assert told["meters"] == 1 and told["tariff"]["pue"] == 1.0
    assert [one["kind"] for one in (await ask(control, "GET", "/power"))["data"]] == ["job", "model", "idle"]


def test_old_hours_are_deleted(db):
    for hour in range(5):
        energy.add(db, {("idle", ""): (1.0, 1.0), ("model", "m"): (1.0, 1.0)}, hour * 3600.0)
    assert retention.energy(db, 3 * 3600.0, 3) == 3
    assert retention.energy(db, 3 * 3600.0, 3) == 1
    assert retention.energy(db, 3 * 3600.0, 3) == 0
    assert {one.joules for one in energy.since(db, 0)} == {3.0}
