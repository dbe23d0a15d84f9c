"""The box cordons failing devices, sets power limits, and measures the energy of jobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pynvml
import pytest

from appliance.controller.devices import cordons
from appliance.controller.devices.cordons import DeviceWatch
from appliance.controller.devices.mode import EnergyMeter, Mode, PowerKeeper, of_job, write_mode
from appliance.store import jobs, usage
from appliance.store.rows import AUDIT, JobMetricRow, JobRow
from runtime.devices.kind import Reading
from runtime.devices.kinds import kind_of
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Device
from scheduler.devices.discovery import logical_devices
from scheduler.devices.health import straggling
from tests.devices_support.nvml import Machine, eight_h100
from tests.unit.controller.conftest import SCOPES, Control


@pytest.fixture
def watch(db):
    nudges = []
    made = DeviceWatch(db, SchedulerConfig(), lambda: nudges.append(1), clock=lambda: 1000.0)
    made.nudges = nudges
    return made


def faults(db):
    return {device_id: row.fault for device_id, row in cordons.read(db).items() if row.fault}


def cordoned(db):
    return sorted(cordons.read(db))


def told(db):
    return [
        (row.action, row.target, row.detail.get("reason"), row.key_id)
        for row in AUDIT.page(db, after=None, limit=10).data
    ]


class Clock:
    def __init__(self, read=()):
        self.now_s, self.read, self.nudges, self.let_go = 1000.0, read, [], frozenset()

    async def __call__(self, let_go):
        self.let_go = let_go
        return tuple(Reading("n0/3", self.now_s, **told) for told in self.read if "n0/3" not in let_go)

    def watch(self, db) -> DeviceWatch:
        return DeviceWatch(db, SchedulerConfig(), lambda: self.nudges.append(self.now_s), lambda: self.now_s)


async def test_cordon_is_lifted_after_retry_time_or_undrain(db):
    cordons.drain(db, {"id": "n0/7"}, "", "ann", 1.0)
    clock = Clock([{"lost": "GPU is lost"}])
    await clock.watch(db).look(clock)
    reason = "does not answer any more (GPU is lost)"
    assert cordoned(db) == ["n0/3", "n0/7"] and faults(db) == {"n0/3": reason} and clock.nudges == [1000.0]
    clock.now_s, clock.read = clock.now_s + 899, [{}]
    watch = clock.watch(db)  # as after a restart, which cordons survive
    await watch.look(clock)
    shown = cordons.shown(cordons.read(db), {"id": "n0/3", "health": "draining"})["health_reason"]
    assert cordoned(db) == ["n0/3", "n0/7"] and reason in shown and "; it is tried again in" in shown
    assert told(db) == [("device.cordon", "n0/3", reason, None)], "said once"
    clock.now_s += 1
    await watch.look(clock)
    assert cordoned(db) == ["n0/7"] and told(db)[0][:2] == ("device.try_again", "n0/3")


@pytest.mark.parametrize("slow_s, told_s", [(1.4, 1300.0), (1.2, None)])
async def test_straggling_gpu_is_cordoned_after_five_minutes(db, slow_s, told_s):
    devices, clock = ["n0/1", "n0/2", "n0/3"], Clock()
    job = JobRow("j", "m", "supervised", "f", 1, "ft:m", 1.0, phase="running", devices=devices)
    jobs.insert(db, job)

    async def read(_released):
        return tuple(Reading(name, clock.now_s) for name in devices)

    watch = clock.watch(db)
    while clock.now_s <= 1310 and not cordoned(db):
        jobs.upsert_metric(db, JobMetricRow("j", int(clock.now_s), clock.now_s, rank_seconds=[1.0, 1.0, slow_s]))
        await watch.look(read)
        clock.now_s += 10.0
    reason = "computed 40% longer than the other devices of its job"
    assert faults(db) == ({"n0/3": reason} if told_s else {}) and clock.now_s == (told_s or 1310.0) + 10.0
    jobs.update(db, "j", devices=devices[::-1])
    await watch.look(read)
    assert "n0/1" not in cordoned(db), "steps of before do not count for it"


@pytest.mark.parametrize(("slow", "count"), [(1.0, 0), (12.0, 1)])
def test_uneven_rows_do_not_cause_straggler_cordon(slow, count):
    rng, devices = np.random.default_rng(0), [f"n0/{index}" for index in range(8)]
    for _ in range(200):
        seconds = rng.lognormal(sigma=0.8, size=(20, 8))
        seconds[:, 3] *= slow
        assert len(straggling(seconds.tolist(), devices)) == count


async def test_heat_is_judged_by_time_not_by_readings(db):
    clock = Clock([{"temperature_c": 40, "slowdown_c": 90}])
    watch = clock.watch(db)
    await watch.look(clock)
    clock.read = [{"temperature_c": 95, "slowdown_c": 90}]
    for _ in range(160):
        clock.now_s += 0.2
        await watch.look(clock)
    assert cordoned(db) == ["n0/3"]


async def test_cordon_stays_while_the_device_fails(db):
    clock = Clock([{"lost": "GPU is lost"}])
    watch = clock.watch(db)
    await watch.look(clock)
    clock.now_s += 1000.0
    await watch.look(clock)
    assert cordoned(db) == ["n0/3"]
    clock.read = [{}]
    await watch.look(clock)
    assert cordoned(db) == []
    clock.read = [{"faults": ("reported Xid 79",)}]
    await watch.look(clock)
    clock.now_s, clock.read = clock.now_s + 1e6, [{}]
    await watch.look(clock)
    assert cordoned(db) == ["n0/3"]


async def test_drained_device_is_released_and_judged_after_undrain(db):
    """After a reset of the device, the driver counts memory errors from 0 again."""
    clock = Clock([{"ecc_uncorrected": 3}])
    watch = clock.watch(db)
    await watch.look(clock)
    cordons.drain(db, {"id": "n0/3"}, "a reset", "ann", clock.now_s)
    await watch.look(clock)
    assert clock.let_go == {"n0/3"}
    cordons.undrain(db, {"id": "n0/3"})
    for errors in (0, 1):
        assert cordoned(db) == []
        clock.read = [{"ecc_uncorrected": errors}]
        await watch.look(clock)
        assert not clock.let_go
    assert faults(db) == {"n0/3": "had 1 uncorrected memory error"}


DEVICES = logical_devices(2, "n1")


def seen(db):
    return {device["id"]: (device["health"], device["lost"]) for device in cordons.in_view(db, [])}


def test_lost_node_stays_in_view_until_it_returns(db, watch):
    watch.node_changed("n1", "joined", DEVICES)
    assert seen(db) == {}, "those that are there are told by the scheduler"
    watch.node_changed("n1", "lost", DEVICES)
    why = {"since_s": 1000.0, "reason": "its node does not answer any more"}
    assert seen(db) == {"n1/0": ("lost", why), "n1/1": ("lost", why)}
    watch.node_changed("n1", "joined", DEVICES)
    assert seen(db) == {}
    assert [row[:3] for row in reversed(told(db))] == [
        ("node.joined", "n1", None),
        ("node.lost", "n1", why["reason"]),
        ("node.joined", "n1", None),
    ]


def test_node_lost_without_a_controller_is_marked_at_start(db, watch):
    watch.node_changed("n1", "joined", DEVICES)
    watch.node_changed("n2", "joined", logical_devices(1, "n2"))
    after = DeviceWatch(db, SchedulerConfig(), lambda: None, clock=lambda: 2000.0)
    after.node_changed("n2", "joined", logical_devices(1, "n2"))
    after.began(["n0", "n2"])
    assert seen(db)["n1/0"][1] == {
        "since_s": 2000.0,
        "reason": "its node was not there when the box's controller began",
    }
    assert [row[:2] for row in told(db)] == [("node.lost", "n1"), ("node.joined", "n2"), ("node.joined", "n1")]
    after.began(["n0", "n2"])
    assert len(told(db)) == 3, "said once"


def gpus(*uuids, unfit=()):
    return tuple(
        Device(f"n0/{n}", "n0", n, "cuda", uuid=uuid, unfit="does not answer" if n in unfit else "")
        for n, uuid in enumerate(uuids)
    )


def test_cordons_follow_gpu_uuid_when_index_changes(db, watch):
    watch.check(gpus("a", "b", "c", unfit=[1]))
    cordons.drain(db, {"id": "n0/2", "uuid": "c"}, "noisy", "ann", 1.0)
    assert cordoned(db) == ["b", "c"] and told(db)[0][1] == "n0/1"
    watch.check(gpus("a", "c"))  # b disappeared from the PCI bus
    device = cordons.shown(cordons.read(db), {"id": "n0/1", "uuid": "c", "health": "ok"})
    assert device["drain"]["reason"] == "noisy" and list(faults(db)) == ["b"]
    cordons.undrain(db, device)
    assert cordoned(db) == ["b"]


def test_unfit_gpu_is_cordoned_at_discovery(db, watch):
    watch.node_changed("n0", "joined", gpus("a", "", unfit=[1]))
    assert cordoned(db) == ["n0/1"]
    assert ("device.cordon", "n0/1", "does not answer", None) in told(db)
    watch.check(gpus("a", "b"))  # the device answers again, but stays cordoned until the retry time
    assert cordons.shown(cordons.read(db), {"id": "n0/1", "uuid": "b", "health": "ok"})["cordon"] == "box"


@pytest.fixture
def driver(monkeypatch) -> Machine:
    return eight_h100().install(monkeypatch)


@pytest.fixture
def keeper(db, driver) -> PowerKeeper:
    return PowerKeeper({"serve": 450.0}, db, [Device("n0/0", "n0", 0, uuid="GPU-h100-0")], kind_of("cuda"))


async def test_power_limit_follows_mode(db, keeper, driver):
    write_mode(db, Mode("serve", since_s=1.0))
    await keeper.look()
    await keeper.look()
    limits_mw = [gpu.limit_mw for gpu in driver.gpus]
    assert limits_mw == [450_000, *[700_000] * 7] and driver.limits_set == 1, "the others are not the box's to limit"
    assert keeper.status() == {"set": True, "limit_w": 450.0, "refused": {}}
    write_mode(db, Mode("train", since_s=2.0))
    await keeper.look()
    assert driver.gpus[0].limit_mw == 700_000 and keeper.status()["limit_w"] is None


async def test_refused_power_limit_is_reported_and_retried(db, keeper, driver):
    write_mode(db, Mode("serve", since_s=1.0))
    driver.set_limit_error = pynvml.NVMLError_NoPermission()
    await keeper.look()
    assert keeper.status()["refused"] == {"n0/0": "the driver says: Insufficient Permissions"}
    driver.set_limit_error = None
    await keeper.look()
    assert keeper.status()["refused"] == {} and driver.gpus[0].limit_mw == 450_000


async def test_power_limit_skips_lost_gpu(db, keeper, driver):
    write_mode(db, Mode("serve", since_s=1.0))
    driver.gpus[0].handle_error = pynvml.NVMLError_GpuIsLost()
    await keeper.look()
    assert keeper.status()["refused"] == {} and driver.limits_set == 0 and driver.users == 0


class Meters:
    """Two devices with energy counters that the test sets; a job holds the first device."""

    def __init__(self, control: Control, job_id: str):
        self.readings: dict[str, Reading] = {}
        self.hold({"kind": "job", "id": job_id}, {"kind": "replica", "id": "r1"})
        self.meter = EnergyMeter(control.db, lambda: self.readings, lambda: self.shown)

    def hold(self, *holders: dict[str, str] | None) -> None:
        self.shown: Any = {"devices": [{"id": f"n0/{n}", "holder": one} for n, one in enumerate(holders)]}

    async def look(self, at_s: float, *joules: float | None) -> None:
        self.readings = {f"n0/{n}": Reading(f"n0/{n}", at_s, energy_j=one) for n, one in enumerate(joules)}
        await self.meter.look()


async def test_energy_is_added_to_job_that_holds_device(control: Control):
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
    await meters.look(25, 10, None)  # the first counter restarted at 10; the second device has no counter any more
    await meters.look(30, 20, 900)
    assert drawn() == (1010, 10)


async def test_energy_per_step_is_none_without_metered_time(control: Control):
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
