"""What a step asks of the box before it may begin: the column "must hold before" of docs/handover.md, case by case."""

from __future__ import annotations

import pytest

from scheduler.core.allocation import ReplicaPlan
from scheduler.core.inventory import Holder, Lease, Ledger
from scheduler.core.workload import ReplicaView
from scheduler.handover import handover
from scheduler.handover.box import Box, GroupView
from scheduler.handover.step_rules import refusal
from tests.unit.scheduler.fakes import box_of

DEVICES = box_of(3)
OF_R1, OF_J1 = Lease("1", Holder("replica", "r1"), ("n0/0",)), Lease("2", Holder("job", "j1"), ("n0/1",))
NEW = Lease("3", Holder("replica", "r2"), ("n0/2",))
PLAN = ReplicaPlan("r2", "m", "v1", 1, ("n0/2",), "open")


def box(state: str = "open") -> Box:
    return Box(
        {d.id: d for d in DEVICES},
        Ledger(d.id for d in DEVICES).acquire(OF_R1, OF_J1),
        {"r1": ReplicaView("r1", "m", "v1", state, ("n0/0",))},
        {"j1": GroupView("j1", ("n0/1",))},
    )


@pytest.mark.parametrize(
    ("step", "state", "why"),
    [
        (handover.acquire(Lease("4", NEW.holder, ("n0/1",))), "open", "device n0/1 is still held by job j1"),
        (handover.acquire(Lease("4", NEW.holder, ("n9/0",))), "open", "device n9/0 is gone"),
        (handover.release(OF_R1), "open", "replica r1 is awake on its devices"),
        (handover.release(OF_R1), "draining", "replica r1 is awake on its devices"),
        (handover.release(OF_J1), "open", "job j1 still has ranks on its devices"),
        (handover.sleep_replica("r1"), "open", "the engine is not drained"),
        (handover.wake_or_start(PLAN, NEW, asleep=False), "open", "lease 3 is not held"),
        (handover.start_group("j2", NEW), "open", "lease 3 is not held"),
        (handover.open_replica("r1"), "asleep", "the engine is not awake"),
        (handover.open_replica("r1"), "dead", "the engine is not awake"),
        (handover.suspend_group("j2"), "open", "the job has no group of ranks"),
    ],
)
def test_what_must_not_be_done_yet_is_refused_with_the_reason(step: handover.Step, state: str, why: str) -> None:
    assert refusal(step, box(state)) == why


@pytest.mark.parametrize(
    ("step", "state"),
    [
        (handover.acquire(NEW), "open"),
        (handover.acquire(OF_R1), "open"),
        (handover.release(OF_R1), "asleep"),
        (handover.release(OF_R1), "dead"),
        (handover.sleep_replica("r1"), "draining"),
        (handover.stop_replica("unknown"), "open"),
        (handover.suspend_group("j1"), "open"),
    ],
)
def test_what_may_be_done_is_not(step: handover.Step, state: str) -> None:
    assert refusal(step, box(state)) == ""
