"""A failing device is cordoned in the store, said in the audit log, and left alone once somebody lifts the cordon."""

from __future__ import annotations

import pytest

from appliance.controller.cordons import CORDONED, FAILING
from appliance.store import audit, box
from appliance.wiring.device_watch import DeviceWatch
from scheduler.config import SchedulerConfig


@pytest.fixture
def watch(db):
    async def read():
        return ()

    nudges = []
    made = DeviceWatch(db, read, SchedulerConfig(), lambda: nudges.append(1), clock=lambda: 1000.0)
    made.nudges = nudges
    return made


def told(db):
    return [(row.action, row.target, row.detail.get("reason"), row.key_id) for row in
            audit.page(db, after=None, limit=10).data]  # fmt: skip


def test_two_deaths_cordon_and_undrain_forgives(db, watch):
    box.put(db, CORDONED, ["n0/7"])  # an operator's
    watch.died(("n0/3",), "job a", "died")
    assert box.get(db, CORDONED) == ["n0/7"] and watch.nudges == []
    watch.died(("n0/3",), "model m", "the process ended")
    assert box.get(db, CORDONED) == ["n0/3", "n0/7"] and watch.nudges == [1]
    reason = "2 processes died on it within 600 s, the last: the process ended"
    assert box.get(db, FAILING) == {"n0/3": reason}
    assert told(db) == [("device.cordon", "n0/3", reason, None)]
    watch.judge()
    assert len(told(db)) == 1, "said once"
    box.put(db, CORDONED, ["n0/7"])
    watch.judge()
    assert box.get(db, CORDONED) == ["n0/7"] and box.get(db, FAILING) == {}
    watch.died(("n0/3",), "job b", "died")
    assert box.get(db, CORDONED) == ["n0/7"], "counted anew"


def test_a_cordon_survives_a_restart_of_the_watch(db, watch):
    for _ in range(2):
        watch.died(("n0/3",), "job a", "died")
    again = DeviceWatch(db, None, SchedulerConfig(), lambda: None, clock=lambda: 9000.0)
    again.judge()
    assert box.get(db, CORDONED) == ["n0/3"] and list(box.get(db, FAILING)) == ["n0/3"]


def test_nodes_that_come_and_go_are_in_the_audit_log(db, watch):
    watch.node_changed("n1", "joined")
    watch.node_changed("n1", "lost")
    assert [row[:2] for row in told(db)] == [("node.lost", "n1"), ("node.joined", "n1")]
