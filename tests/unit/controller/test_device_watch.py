"""A failing device is cordoned in the store, said in the audit log, and left alone once somebody lifts the cordon."""

from __future__ import annotations

import pytest

from appliance.controller.devices import cordons
from appliance.controller.devices.cordons import DeviceWatch
from appliance.store.records import audit
from runtime.devices.kind import Reading
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Device
from scheduler.devices.discovery import logical_devices


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
        for row in audit.page(db, after=None, limit=10).data
    ]


class Clock:
    def __init__(self, read=()):
        self.now_s, self.read, self.nudges, self.let_go = 1000.0, read, [], frozenset()

    async def __call__(self, let_go):
        self.let_go = let_go
        return tuple(Reading("n0/3", self.now_s, **told) for told in self.read if "n0/3" not in let_go)

    def watch(self, db) -> DeviceWatch:
        return DeviceWatch(db, SchedulerConfig(), lambda: self.nudges.append(self.now_s), lambda: self.now_s)


async def test_cordon_is_lifted_after_the_retry_time_and_undrain_forgives(db):
    cordons.drain(db, {"id": "n0/7"}, "", "ann", 1.0)
    clock = Clock([{"lost": "GPU is lost"}])
    await clock.watch(db).look(clock)
    reason = "does not answer any more (GPU is lost)"
    assert cordoned(db) == ["n0/3", "n0/7"] and faults(db) == {"n0/3": reason} and clock.nudges == [1000.0]
    clock.now_s, clock.read = clock.now_s + 899, [{}]
    watch = clock.watch(db)  # a restart forgets nothing
    await watch.look(clock)
    shown = cordons.shown(cordons.read(db), {"id": "n0/3", "health": "draining"})["health_reason"]
    assert cordoned(db) == ["n0/3", "n0/7"] and reason in shown and "; it is tried again in" in shown
    assert told(db) == [("device.cordon", "n0/3", reason, None)], "said once"
    clock.now_s += 1
    await watch.look(clock)
    assert cordoned(db) == ["n0/7"] and told(db)[0][:2] == ("device.try_again", "n0/3")


async def test_heat_is_judged_over_its_whole_time_however_often_the_driver_is_read(db):
    clock = Clock([{"temperature_c": 40, "slowdown_c": 90}])
    watch = clock.watch(db)
    await watch.look(clock)
    clock.read = [{"temperature_c": 95, "slowdown_c": 90}]
    for _ in range(160):
        clock.now_s += 0.2
        await watch.look(clock)
    assert cordoned(db) == ["n0/3"]


async def test_cordon_stays_while_the_device_fails_and_for_broken_hardware(db):
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


async def test_a_device_that_a_person_drained_is_let_go_and_judged_anew_once_it_is_back(db):
    """Its driver counts memory errors from 0 again after a reset."""
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


def test_a_lost_node_stays_in_view_until_it_is_back(db, watch):
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


def test_a_node_lost_while_no_controller_was_there_is_missed_by_the_next(db, watch):
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


def test_cordons_follow_a_gpu_whose_number_changes(db, watch):
    watch.check(gpus("a", "b", "c", unfit=[1]))
    cordons.drain(db, {"id": "n0/2", "uuid": "c"}, "noisy", "ann", 1.0)
    assert cordoned(db) == ["b", "c"] and told(db)[0][1] == "n0/1"
    watch.check(gpus("a", "c"))  # b fell off the bus
    device = cordons.shown(cordons.read(db), {"id": "n0/1", "uuid": "c", "health": "ok"})
    assert device["drain"]["reason"] == "noisy" and list(faults(db)) == ["b"]
    cordons.undrain(db, device)
    assert cordoned(db) == ["b"]


def test_a_gpu_that_cannot_be_used_is_cordoned_when_it_is_found(db, watch):
    watch.node_changed("n0", "joined", gpus("a", "", unfit=[1]))
    assert cordoned(db) == ["n0/1"]
    assert ("device.cordon", "n0/1", "does not answer", None) in told(db)
    watch.check(gpus("a", "b"))  # it answers again, and stays cordoned until it is tried
    assert cordons.shown(cordons.read(db), {"id": "n0/1", "uuid": "b", "health": "ok"})["cordon"] == "box"
