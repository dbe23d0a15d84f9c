"""The table of verbs: what a step asks of the box before it may begin ("must hold before" in docs/handover.md, case by
case), what it makes of it, and that every verb has all that a verb needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.simulator.effects import SimEffects
from scheduler.core.allocation import ReplicaPlan
from scheduler.core.config import SchedulerConfig
from scheduler.core.inventory import Holder, Lease, Ledger
from scheduler.core.workload import ReplicaView
from scheduler.handover import handover
from scheduler.handover.box import Box, GroupView
from scheduler.handover.effects import Effects
from scheduler.handover.step import Step
from scheduler.handover.verbs import VERBS
from tests.unit.scheduler import fakes
from tests.unit.scheduler.fakes import box_of

ROOT = Path(__file__).parents[3]

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
def test_what_must_not_be_done_yet_is_refused_with_the_reason(step: Step, state: str, why: str) -> None:
    assert VERBS[step.verb].refusal(step, box(state)) == why


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
def test_what_may_be_done_is_not(step: Step, state: str) -> None:
    assert VERBS[step.verb].refusal(step, box(state)) == ""


VERB_FUNCTIONS = {name for name, value in vars(Effects).items() if callable(value) and not name.startswith("_")}
BESIDE = {"observe", "next_event"}


def test_every_verb_of_the_table_has_everything_and_nothing_else_has_a_verb():
    """The protocol, both implementations, the tests' own costs; and whoever names a verb names one of the table."""
    assert VERB_FUNCTIONS == VERBS.keys() | BESIDE
    for name, verb in VERBS.items():
        assert verb.name == name and verb.limit_s(SchedulerConfig()) > 0 and verb.waits_for.startswith("for ")
    assert fakes.SECONDS.keys() == VERBS.keys()
    for world in (SimEffects, fakes.FakeEffects):
        assert VERBS.keys() <= {name for name in dir(world) if not name.startswith("_")}
    ray = (ROOT / "scheduler/ray/effects.py").read_text()
    assert all(f"self.{name}" in ray for name in VERBS)
    for module in (
        "scheduler/handover/handover.py",
        "scheduler/loop",
        "appliance/controller/admin/handover_views.py",
        "appliance/demo/main.py",
        "appliance/controller/scheduling/journal.py",
    ):
        path = ROOT / module
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            named = re.findall(r'"([a-z]+_(?:replica|group))"', file.read_text())
            assert set(named) <= VERBS.keys(), f"{file.name} names a verb that is none"


def test_a_verb_changes_the_box_as_it_says_and_holds_afterwards():
    order = [handover.acquire(NEW), handover.wake_or_start(PLAN, NEW, asleep=False), handover.open_replica("r2")]
    now = box()
    for step in order:
        verb = VERBS[step.verb]
        assert verb.refusal(step, now) == ""
        now = verb.done(step, verb.begun(step, now, 1.0), 2.0)
        assert verb.holds(step.target, step.version, now)
    assert now.replicas["r2"].state == "open"
    assert [name for name, verb in VERBS.items() if verb.no_return] == [
        "stop_replica",
        "sleep_replica",
        "suspend_group",
        "stop_group",
    ]
