"""The loop on the real store behind the port that the routes ask: modes, drains and who asked, without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from appliance.controller.devices import cordons
from appliance.controller.devices.mode import write_mode
from appliance.controller.interfaces.ports import Mode
from appliance.store.records import deployments, handovers
from appliance.wiring.box_status import BoxStatus
from appliance.wiring.handover_trigger import HandoverTrigger
from appliance.wiring.journal import SqliteJournal
from appliance.wiring.scheduler_port import LoopPort
from appliance.wiring.state_store import BoxSize, Live, SqliteStateStore
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Demand, Policy
from scheduler.handover.ports import SystemClock
from scheduler.loop.loop import SchedulerLoop
from tests.unit.scheduler.fakes import FakeEffects, World, box_of


def test_notes_are_sentences_that_name_their_model():
    told = {
        "devices": [],
        "replicas": [],
        "handovers": [],
        "jobs": [],
        "plan_s": 0.0,
        "notes": {"m": "No room."},
        "troubles": [{"model": "k", "message": "not serving: no memory; next try in 4 s"}],
        "waits": ["stop r1 waits"],
    }
    store = SimpleNamespace(usage=lambda: SimpleNamespace(budget_bytes=1, used_bytes=0), room_bytes=lambda: 1)
    loop = SimpleNamespace(status=lambda: told)
    nothing = SimpleNamespace()
    host = SimpleNamespace(
        nodes=dict, status=lambda: {"short": "1 GB"}, notes=lambda: ["memory is short: 1 GB available"]
    )
    shown = BoxStatus(loop, nothing, nothing, store, host, 0, SchedulerConfig().bounds(), 2)
    notes = ["k: not serving: no memory; next try in 4 s", "m: No room.", "stop r1 waits"]
    assert shown.read()["notes"] == ["memory is short: 1 GB available", *notes]
    assert shown.read()["memory"]["host"] == {"short": "1 GB"}


async def test_drains_and_modes_move_devices_and_hand_overs_say_who_asked(db, events, add_model, add_job):
    add_model()
    add_job(allowed_sizes=[1, 2])
    deployments.update(db, "starter", min_replicas=1, max_replicas=1)
    world = World(box_of(3))
    states = SqliteStateStore(db, events, BoxSize(0, 3, 1), Live(lambda _: Demand()), lambda: None)
    write_mode(db, Mode("serve"))
    loop = SchedulerLoop(SystemClock(), SchedulerConfig())
    trigger = HandoverTrigger(loop.status)
    journal = SqliteJournal(db, trigger.now)
    loop.connect(FakeEffects(world), states, journal)
    nothing = SimpleNamespace(
        inflight=lambda _: 0,
        refresh=lambda: None,
        usage=lambda: SimpleNamespace(budget_bytes=1, used_bytes=0),
        room_bytes=lambda: 1,
        status=dict,
        notes=list,
        nodes=dict,
    )
    shown = BoxStatus(loop, nothing, nothing, nothing, nothing, 0, SchedulerConfig().bounds(), 2)
    port = LoopPort(loop, nothing, journal, nothing, db, trigger, shown)
    running = asyncio.create_task(loop.run())
    await loop.wait_settled(loop.nudge())
    (device,) = [d["id"] for d in port.status()["devices"] if d["holder"]]
    assert [(place["reason"], place["position"]) for place in port.status()["queue"]] == [("Resources", 1)]

    told = port.explain(Policy("train"))
    assert any("ftjob-1 runs on 2 devices" in step and ", because training gets" in step for step in told["steps"])

    cordons.drain(db, device, "a test", "ops", 1.0)
    port.nudge(f"drain of {device}", "ops")
    await loop.wait_settled(loop.nudge())
    held = {d["id"]: d["holder"] for d in port.status()["devices"]}
    assert held[device] is None and sum(holder is not None for holder in held.values()) == 1
    newest = handovers.list_recent(db, 1)[0]
    assert newest.detail == {"asked_by": "ops", "asked_for": f"drain of {device}"}

    wanted = write_mode(db, Mode("train", serving_floor=1, by="alice"))
    handover_id = await port.set_mode(wanted)
    await port.wait_handover(handover_id)
    assert handovers.find(db, handover_id).detail == {"asked_by": "alice", "asked_for": "mode train"}
    loop.stop()
    await running
