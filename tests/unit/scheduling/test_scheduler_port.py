"""The scheduler port that routes call, with a real loop and database but without Ray: modes, drains, requesters."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from appliance.controller.context.context import Scheduler
from appliance.controller.devices import cordons
from appliance.controller.devices.mode import Mode, write_mode
from appliance.controller.interfaces.errors import SwapFailed
from appliance.store import models
from appliance.store.box import SqliteJournal
from appliance.store.database import Database
from appliance.store.rows import DEPLOYMENTS, HANDOVERS
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Policy
from scheduler.handover.effects import StepRecord
from scheduler.loop.loop import SchedulerLoop
from tests.unit.scheduler.fakes import FakeEffects, World, box_of
from tests.unit.scheduling.fakes import states_of


@pytest.fixture
def scheduler_of(db):
    """Return a function that builds a Scheduler of the given parts and of stand-ins for the other parts."""
    host = {"short": "1 GB", "reserve_bytes": 5}
    nothing = {
        "effects": SimpleNamespace(resident_bytes=dict),
        "journal": SqliteJournal(db),
        "routing": SimpleNamespace(wait_applied=lambda: asyncio.sleep(0), refresh=lambda: 1),
        "db": db,
        "bus": SimpleNamespace(inflight=lambda _: 0),
        "weights": SimpleNamespace(budget_bytes=1, usage=lambda: SimpleNamespace(used_bytes=0), room_bytes=lambda: 1),
        "memory": SimpleNamespace(nodes=dict, status=lambda: host, notes=lambda: ["memory is short: 1 GB available"]),
    }
    return lambda **parts: Scheduler(**nothing | parts, serving_floor=0, config=SchedulerConfig())


async def test_drains_and_modes_move_devices_and_record_requester(db, events, add_model, add_job, scheduler_of):
    add_model()
    add_job(allowed_sizes=[1, 2])
    DEPLOYMENTS.update(db, "starter", min_replicas=1, max_replicas=1)
    world = World(tuple(replace(device, uuid=f"GPU-{device.id}") for device in box_of(3)))
    states = states_of(db, events, 0)
    write_mode(db, Mode("serve"))
    journal = SqliteJournal(db)
    effects = FakeEffects(world)
    effects.seconds = dict.fromkeys(effects.seconds, 0.01)
    loop = SchedulerLoop(effects, states, journal)
    port = scheduler_of(loop=loop, journal=journal)
    running = asyncio.create_task(loop.run())
    await loop.wait_settled(loop.nudge())
    (row,) = [d for d in port.status()["devices"] if d["holder"]]
    device = row["id"]
    assert [(place["reason"], place["position"]) for place in port.status()["queue"]] == [("Resources", 1)]

    told = port.loop.explain(Policy("train"))
    assert any("ftjob-1 runs on 2 devices" in step and ", because training gets" in step for step in told["steps"])

    cordons.drain(db, row, "a test", "ops", 1.0)
    assert list(cordons.read(db)) == [f"GPU-{device}"]
    port.nudge(f"drain of {device}", "ops")
    await loop.wait_settled(loop.nudge())
    held = {d["id"]: d["holder"] for d in port.status()["devices"]}
    assert held[device] is None and sum(holder is not None for holder in held.values()) == 1
    newest = HANDOVERS.get(db, journal.last_id())
    assert (newest.asked_by, newest.asked_for) == ("ops", f"drain of {device}")

    write_mode(db, wanted := Mode("train", serving_floor=1, by="alice"))
    handover_id = await port.set_mode(wanted, wait=True)
    assert await port.set_mode(wanted, wait=True) is None, "nothing is left to do for it"
    newest = HANDOVERS.get(db, int(handover_id))
    assert (newest.asked_by, newest.asked_for) == ("alice", "mode train")
    loop.stop()
    await running


async def test_convergence_of_failing_model_names_reason(db, add_model, scheduler_of):
    add_model()
    journal = SqliteJournal(db)
    step = StepRecord(0, "swap", "swap_replica", "r", "done", 1.0, 2.0, {"model": "starter", "error": "no memory"})

    async def settle(generation: int) -> None:
        if replica["version"] == "older":
            journal.begin(1, "swaps", 1.0, "", "")
            journal.step(1, step)

    replica = {"id": "r1", "model": "starter", "state": "open", "version": models.find(db, "starter").active_version}
    loop = SimpleNamespace(
        reset_failures=lambda model: None, nudge=lambda: 1, wait_settled=settle, status=lambda: {"replicas": [replica]}
    )
    port = scheduler_of(loop=loop, journal=journal)
    await port.converge_model("starter")

    replica["version"] = "older"
    with pytest.raises(SwapFailed, match="no memory"):
        await port.converge_model("starter")


STEP = StepRecord(0, "free r1", "drain_replica", "r1", started_s=11.0)


def test_journal_after_restart_lists_unfinished_handovers(tmp_path):
    with Database(tmp_path / "a.db") as db:
        journal = SqliteJournal(db)
        assert journal.last_id() == 0
        journal.begin(3, "mode train", 10.0, "ann", "mode train")
        journal.step(3, STEP)
    with Database(tmp_path / "a.db") as db:
        journal = SqliteJournal(db)
        assert journal.last_id() == 3 and journal.unfinished() == [3]
        journal.step(3, replace(STEP, state="failed", ended_s=12.0, detail={"error": "e"}))
        assert journal.steps_since(2) == [replace(STEP, state="failed", ended_s=12.0, detail={"error": "e"})]
        journal.end(3, "undone", 12.0, "the engine died")
        row = HANDOVERS.get(db, 3)
        assert journal.unfinished() == [] and (row.state, row.error) == ("undone", "the engine died")
