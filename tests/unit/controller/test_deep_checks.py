"""A deep check takes a device that can be spared, has it measured and gives it back, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from appliance.controller.devices import cordons
from appliance.controller.devices.deep_checks import BASELINES, DeepChecks
from appliance.controller.devices.device_watch import DeviceWatch
from appliance.controller.devices.night_round import AWAKE_AGAIN, Nightly, NightRound, with_awake_again
from appliance.controller.interfaces.errors import OperationFailed
from appliance.controller.interfaces.ports import DEVICE_FAILED
from appliance.store.records import box
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import DeploymentView
from scheduler.devices.health import Fault
from tests.simulator.control_plane import SimulatedMeasure, SimulatedScheduler
from tests.unit.controller.conftest import Control
from tests.unit.controller.test_admin import actions, ask


@dataclass
class Bench:
    checks: DeepChecks
    night: NightRound
    scheduler: SimulatedScheduler
    measure: SimulatedMeasure
    verdicts: list[tuple[str, Fault | None]] = field(default_factory=list)
    held: int = 0
    limits: str = ""


@pytest.fixture
def bench(db) -> Bench:
    made = Bench.__new__(Bench)
    made.scheduler, made.measure, made.verdicts, made.held = SimulatedScheduler(db), SimulatedMeasure(), [], 0
    made.limits = ""
    made.checks = DeepChecks(
        db,
        made.scheduler,
        made.measure,
        lambda: made.held,
        lambda device_id, fault: made.verdicts.append((device_id, fault)),
        60.0,
        limits=lambda device_id: made.limits,
        look_every_s=0.001,
    )
    made.night = NightRound(db, made.scheduler, made.checks, look_every_s=0.001)
    return made


def in_use(db) -> bool:
    return not box.get(db, cordons.CORDONED, []) and not box.get(db, cordons.CHECKED, {})


async def test_the_round_of_a_night_measures_devices_of_all_nodes_with_those_beside_them(db, bench):
    away = [{**bench.scheduler.devices[0], "id": f"n1/{n}", "node": "n1", "index": n} for n in range(2)]
    bench.scheduler.devices[:] = [*bench.scheduler.devices[:2], *away]
    await bench.night.all_devices()
    assert [device_id for device_id, fault in bench.verdicts if fault is None] == ["n0/0", "n0/1", "n1/0", "n1/1"]
    assert bench.measure.together_of[2:] == [["n1/0", "n1/1"], ["n1/1", "n1/0"]] and in_use(db)


async def test_a_device_is_measured_with_the_free_ones_and_goes_back(db, bench):
    for device in bench.scheduler.devices[3:]:
        device["holder"] = {"kind": "job", "id": "j"}
    result = await bench.checks.check("n0/0", "ann")
    assert result["state"] == "ok" and bench.verdicts == [("n0/0", None)] and in_use(db)
    assert bench.measure.together_of == [["n0/0", "n0/1", "n0/2"]]
    with_them = "all-reduce of 3, with n0/1 and n0/2"
    assert box.get(db, BASELINES) == {"n0/0": {"from host": 10e9, "products": 1e12, with_them: 5e9}}
    assert bench.checks.results()["n0/0"]["rates"]["products"] == 1e12


async def test_the_links_to_other_devices_are_no_fault_of_a_device(db, bench, monkeypatch):
    """Two of a box may be joined by NVLink, and two others by the host's processors alone."""

    def only(*free):
        for device in bench.scheduler.devices:
            device["holder"] = None if device["id"] in ("n0/0", *free) else {"kind": "job", "id": "j"}

    async def rate(self, ids):
        return {"all-reduce of 2": rates["n0/1" in ids]}

    monkeypatch.setattr(SimulatedMeasure, "together", rate)
    rates = {True: 100e9, False: 10e9}
    for other in ("n0/1", "n0/2"):
        only(other)
        assert (await bench.checks.check("n0/0", "ann"))["state"] == "ok"
    rates[False] = 4e9
    assert (await bench.checks.check("n0/0", "ann"))["state"] == "warn", "slower than with the same one before"


async def test_the_first_good_measures_stay_the_baseline_until_somebody_wants_others(db, bench):
    await bench.checks.check("n0/0", "ann")
    bench.measure.rates = {"from host": 4e9, "products": 1e12}
    slow = await bench.checks.check("n0/0", "ann")
    assert slow["state"] == "warn", "a device of the host"
    assert box.get(db, BASELINES)["n0/0"]["from host"] == 10e9
    assert (await bench.checks.check("n0/0", "ann", new_baseline=True))["state"] == "ok"
    assert box.get(db, BASELINES)["n0/0"]["from host"] == 4e9


@pytest.mark.parametrize("code", ["not_measured", DEVICE_FAILED])
async def test_a_gpu_is_not_blamed_for_its_node_or_for_who_else_holds_its_memory(db, bench, monkeypatch, code):
    """A node that went during a check, or others' programs, left its GPUs out of use until a person came."""
    bench.scheduler.devices[:] = [{**bench.scheduler.devices[0], "kind": "cuda"}]

    async def alone(self, device_id):
        raise OperationFailed("its node n0 does not answer", code=code)

    monkeypatch.setattr(SimulatedMeasure, "alone", alone)
    if code == DEVICE_FAILED:
        assert (await bench.checks.check("n0/0", "ann"))["state"] == "fail"
        assert [fault.may_pass for _, fault in bench.verdicts] == [False]
        return
    with pytest.raises(OperationFailed, match="its node n0"):
        await bench.checks.check("n0/0", "ann")
    assert in_use(db) and bench.verdicts == []


async def test_a_person_may_take_less_than_is_published_for_the_baseline(db, bench):
    """H100 in slots of PCIe 4.0 copy half of what is published: each check took them out of use, and a baseline that
    a person asked for was not kept."""
    bench.scheduler.devices[:] = [{**bench.scheduler.devices[0], "kind": "cuda", "name": "NVIDIA H100 PCIe"}]
    bench.measure.rates = {"from host": 25e9, "products": 500e12}
    assert (await bench.checks.check("n0/0", "ann"))["state"] == "fail"
    assert (await bench.checks.check("n0/0", "ann", new_baseline=True))["state"] == "ok"
    assert (await bench.checks.check("n0/0", "ann"))["state"] == "ok"
    bench.measure.rates["from host"] = 20e9
    assert (await bench.checks.check("n0/0", "ann"))["state"] == "fail"


async def test_a_gpu_whose_power_the_box_limits_is_held_against_itself_under_these_limits(db, bench):
    """Measured at night under a profile of 1,410 MHz, sound GPUs were slower than by day and than is published: the
    doctor's round took one after the other out of use, and none came back before the profile ended."""
    bench.scheduler.devices[:] = [{**bench.scheduler.devices[0], "kind": "cuda", "name": "NVIDIA H100 80GB HBM3"}]
    by_day = {"from host": 55e9, "products": 720e12}
    bench.measure.rates = by_day
    assert (await bench.checks.check("n0/0", "ann"))["state"] == "ok"
    bench.limits, bench.measure.rates = "1410 MHz", {"from host": 55e9, "products": 560e12}
    assert (await bench.checks.check("n0/0", "ann"))["state"] == "ok"
    at_night = {"from host, at 1410 MHz": 55e9, "products, at 1410 MHz": 560e12}
    assert box.get(db, BASELINES) == {"n0/0": by_day | at_night}
    bench.measure.rates = {"from host": 55e9, "products": 500e12}
    assert (await bench.checks.check("n0/0", "ann"))["state"] == "fail", "slower than under the same limits before"
    bench.limits, bench.measure.rates = "", {"from host": 55e9, "products": 560e12}
    assert (await bench.checks.check("n0/0", "ann"))["state"] == "fail"


async def test_a_profile_that_changes_during_a_measure_spoils_it(db, bench):
    bench.measure.go_on.clear()
    asked = asyncio.create_task(bench.checks.check("n0/0", "ann"))
    await bench.measure.begun.wait()
    bench.limits = "450 W"
    bench.measure.go_on.set()
    with pytest.raises(OperationFailed, match="power profile of n0/0 changed") as refused:
        await asked
    assert refused.value.code == "device_needed" and in_use(db) and bench.verdicts == []


async def test_a_device_that_a_model_needs_is_refused_in_words(db, bench):
    bench.scheduler.awake = {"starter": "n0/0"}
    with pytest.raises(OperationFailed, match="starter would have 0 awake engines instead of 1") as refused:
        await bench.checks.check("n0/0", "ann")
    assert refused.value.code == "device_needed" and in_use(db) and not bench.measure.begun.is_set()


async def test_held_requests_get_the_device_back_at_once(db, bench):
    bench.measure.go_on.clear()
    asked = asyncio.create_task(bench.checks.check("n0/0", "ann"))
    await bench.measure.begun.wait()
    assert box.get(db, cordons.CORDONED) == ["n0/0"]
    shown = cordons.read(db).shown({"id": "n0/0", "health": "ok"})
    assert shown["health_reason"] == "a deep check, asked for by ann"
    bench.held = 1
    with pytest.raises(OperationFailed, match="requests wait for an engine"):
        await asked
    assert in_use(db) and bench.verdicts == []


async def test_a_person_may_put_it_back_meanwhile(db, bench):
    bench.measure.go_on.clear()
    asked = asyncio.create_task(bench.checks.check("n0/0", "ann"))
    await bench.measure.begun.wait()
    cordons.undrain(db, "n0/0")
    with pytest.raises(OperationFailed, match="was put back into use"):
        await asked
    assert in_use(db)


async def test_whoever_leaves_gives_it_back(db, bench):
    bench.measure.go_on.clear()
    asked = asyncio.create_task(bench.checks.check("n0/0", "ann"))
    await bench.measure.begun.wait()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert in_use(db)


async def test_a_drained_device_stays_drained(db, bench):
    cordons.drain(db, "n0/0", "its fan", "ann", 1.0)
    bench.scheduler.nudge("drain")
    assert (await bench.checks.check("n0/0", "ann"))["state"] == "ok"
    assert box.get(db, cordons.CORDONED) == ["n0/0"]
    cordons.drain(db, "n0/1", "", "ann", 1.0)
    bench.scheduler.nudge("drain")
    await bench.night.all_devices()
    assert {name for name, _ in bench.verdicts} == {"n0/0", *(f"n0/{index}" for index in range(2, 8))}


async def test_a_device_that_cannot_be_spared_is_asked_for_again_that_night(db, bench, monkeypatch):
    """A box of two devices went without: an engine that had answered a minute before was awake on one of them."""
    asked, refusals = list[str](), 2
    check = bench.checks.check

    async def busy_at_first(device_id: str, by: str, asleep: dict[str, int]) -> dict[str, object]:
        asked.append(device_id)
        if device_id in ("n0/1", "n0/2") and asked.count(device_id) <= refusals:
            code = "device_needed" if device_id == "n0/1" else "not_measured"
            raise OperationFailed("it serves", code=code)
        return await check(device_id, by, asleep=asleep)

    monkeypatch.setattr(bench.checks, "check", busy_at_first)
    await bench.night.all_devices(again_s=0.001)
    assert asked == [*(f"n0/{index}" for index in range(8)), "n0/1", "n0/1"]
    assert {name for name, _ in bench.verdicts} == {f"n0/{index}" for index in range(8) if index != 2}
    asked.clear()
    refusals = 99
    await bench.night.all_devices(again_s=1, round_s=0)
    assert len(asked) == 8, "not beyond the night"


async def test_an_engine_that_nobody_asks_sleeps_for_its_check_and_is_woken_after_the_pass(db, bench, monkeypatch):
    """Without idle_sleep_s an engine stays awake for ever, and its device was never measured by night."""
    bench.scheduler.awake = {"quiet": "n0/0", "other": "n0/1"}
    bench.scheduler.quiet = {"quiet"}
    asked = list[tuple[float | None, dict[str, int]]]()
    nudge = bench.scheduler.nudge

    def woken(reason: str, by: str = "") -> None:
        nudge(reason, by)
        views = with_awake_again(db, [DeploymentView("quiet", "v1"), DeploymentView("other", "v1")], time.time())
        asked.append({view.model: view.awake_again for view in views})
        if asked[-1]["quiet"]:
            assert in_use(db), "its device is back"
            bench.scheduler.replicas = [{"model": "quiet", "state": "open"}]

    monkeypatch.setattr(bench.scheduler, "nudge", woken)
    await bench.night.all_devices(round_s=0)
    assert {name for name, _ in bench.verdicts} == {f"n0/{index}" for index in range(8) if index != 1}
    assert [one for one in asked if any(one.values())] == [{"quiet": 1, "other": 0}] and not any(asked[-1].values())
    with pytest.raises(OperationFailed, match="quiet would have 0 awake engines"):
        await bench.checks.check("n0/0", "ann")


async def test_what_does_not_wake_is_asked_for_some_minutes_alone(db, bench):
    """Somebody else has its devices now; and what a controller that died had asked for ends by itself."""
    bench.scheduler.awake, bench.scheduler.quiet = {"quiet": "n0/0"}, {"quiet"}
    now_s = [1000.0]

    def later() -> float:
        now_s[0] += 10.0
        return now_s[0]

    await NightRound(db, bench.scheduler, bench.checks, clock=later, wake_s=60.0, look_every_s=0.001).all_devices()
    assert now_s[0] > 1060.0 and box.get(db, AWAKE_AGAIN) == {}
    box.put(db, AWAKE_AGAIN, {"models": {"quiet": 1}, "until_s": 500.0})
    (view,) = with_awake_again(db, [DeploymentView("quiet", "v1")], 500.0)
    assert view.awake_again == 0


async def test_engines_may_sleep_on_devices_that_come_back_and_on_no_others(db):
    cordons.check(db, ["n0/0", "n0/1", "n0/2"], "ann", 1.0)
    cordons.drain(db, "n0/1", "", "ann", 2.0)
    box.put(db, cordons.FAILING, {"n0/2": "it computes wrong"})
    assert cordons.measured(db) == {"n0/0"}


async def test_a_controller_that_died_in_a_check_left_nothing_out_of_use(db, bench):
    cordons.check(db, ["n0/0", "n0/1"], "ann", 1.0)
    cordons.drain(db, "n0/1", "", "ann", 2.0)
    DeepChecks(db, bench.scheduler, bench.measure, lambda: 0, lambda *_: None, 60.0)
    assert box.get(db, cordons.CORDONED) == ["n0/1"] and box.get(db, cordons.CHECKED) == {}


async def test_a_failing_device_stays_out_of_use_and_says_why(db, bench):
    watch = DeviceWatch(db, None, SchedulerConfig(), lambda: None)
    checks = DeepChecks(db, bench.scheduler, bench.measure, lambda: 0, watch.measured, 60.0, look_every_s=0.001)
    bench.measure.wrong = {"n0/3": ["a product was not exact"]}
    assert (await checks.check("n0/3", "ann"))["state"] == "fail"
    assert box.get(db, cordons.CORDONED) == ["n0/3"] and box.get(db, cordons.CHECKED) == {}
    assert box.get(db, cordons.FAILING) == {"n0/3": "does not compute right: a product was not exact"}
    assert box.get(db, cordons.TRIALS) == {}, "a person has to look at it"
    cordons.undrain(db, "n0/3")
    watch.judge()
    assert box.get(db, cordons.CORDONED) == [] and box.get(db, cordons.FAILING) == {}


async def test_the_route_answers_with_the_result_or_the_refusal(control: Control):
    found = await ask(control, "POST", "/devices/n0/2/check")
    assert found["state"] == "ok" and found["found"][0] == {
        "measure": "results",
        "state": "ok",
        "found": "right",
        "wanted": "",
    }
    listed = {device["id"]: device["check"] for device in (await ask(control, "GET", "/devices"))["data"]}
    assert listed["n0/2"]["state"] == "ok" and listed["n0/1"] is None
    control.scheduler.awake = {"starter": "n0/1"}
    refused = (await ask(control, "POST", "/devices/n0/1/check", 409))["error"]
    assert refused["code"] == "device_needed" and refused["message"].startswith("N0/1 cannot be spared now: starter")
    assert (await ask(control, "POST", "/devices/n0/99/check", 404))["error"]["code"] == "device_not_found"
    assert actions(control) == [("device.check", "n0/2", "done"), ("device.check", "n0/1", "refused")]


async def test_undrain_with_a_check_leaves_a_failing_device_where_it_is(control: Control):
    await ask(control, "POST", "/devices/n0/2/drain")
    control.context.deep_checks._measure.wrong = {"n0/2": ["a product was not exact"]}
    refused = (await ask(control, "POST", "/devices/n0/2/undrain", 409, json={"check": True}))["error"]
    assert refused["code"] == "device_fails" and "a product was not exact" in refused["message"]
    assert box.get(control.db, cordons.CORDONED) == ["n0/2"]
    control.context.deep_checks._measure.wrong = {}
    assert (await ask(control, "POST", "/devices/n0/2/undrain", json={"check": True}))["health"] == "ok"
    assert box.get(control.db, cordons.CORDONED) == []


async def test_the_round_of_the_night_comes_once_a_day_at_its_time():
    def at(day: int, hour: int, minute: int) -> float:
        return time.mktime((2026, 3, day, hour, minute, 0, 0, 0, -1))

    rounds: list[float] = []
    now_s = at(2, 12, 0)

    async def check_all() -> None:
        rounds.append(now_s)

    nightly = Nightly("03:30", check_all, lambda: now_s)
    for now_s in (at(2, 12, 1), at(3, 3, 29), at(3, 3, 31), at(3, 3, 32), at(4, 9, 0), at(4, 9, 1)):  # noqa: B007
        await nightly.look()
    assert rounds == [at(3, 3, 31), at(4, 9, 0)], "one that the box slept through comes late, not twice"
