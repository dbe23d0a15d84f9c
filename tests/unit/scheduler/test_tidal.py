from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from scheduler import virtual_time
from scheduler.errors import InvalidSchedule
from scheduler.journal import MemoryJournal
from scheduler.loop import SchedulerLoop
from scheduler.tidal import Window, in_force, preview
from scheduler.workload import DeploymentView, JobView, Policy, Workload
from tests.unit.scheduler.fakes import FakeEffects, FakeStore, World, box_of

TRAIN, SERVE, AUTO = Policy("train"), Policy("serve"), Policy("auto")
BERLIN = (Window("0 22 * * *", TRAIN, "Europe/Berlin"), Window("0 6 * * *", SERVE, "Europe/Berlin"))


def at(text: str, zone: str = "Europe/Berlin") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def test_the_latest_firing_holds() -> None:
    assert in_force(BERLIN, AUTO, 0.0, at("2026-03-02 21:59:59")).policy == SERVE
    night = in_force(BERLIN, AUTO, 0.0, at("2026-03-02 22:00:00"))
    assert night.policy == TRAIN and night.since_s == at("2026-03-02 22:00:00")
    assert night.until_s == at("2026-03-03 06:00:00") and night.window == BERLIN[0]
    assert in_force(BERLIN, AUTO, 0.0, at("2026-03-03 05:59:00")).policy == TRAIN, "a box that was off all night"


def test_a_persons_choice_lasts_until_the_next_firing() -> None:
    set_s = at("2026-03-02 23:30:00")
    assert in_force(BERLIN, AUTO, set_s, at("2026-03-03 01:00:00")).policy == AUTO
    assert in_force(BERLIN, AUTO, set_s, at("2026-03-03 06:00:00")).policy == SERVE


def test_without_windows_a_persons_choice_lasts() -> None:
    found = in_force((), TRAIN, 5.0, 1e9)
    assert (found.policy, found.since_s, found.until_s, found.window) == (TRAIN, 5.0, None, None)


def test_local_time_is_kept_over_the_change_of_the_clocks() -> None:
    before, after = at("2026-03-28 21:00:00"), at("2026-03-29 21:00:00")  # 29 March: clocks go forward at 2:00
    assert in_force(BERLIN, AUTO, 0.0, before).until_s == at("2026-03-28 22:00:00")
    assert in_force(BERLIN, AUTO, 0.0, after).until_s == at("2026-03-29 22:00:00")
    assert at("2026-03-29 22:00:00") - at("2026-03-28 22:00:00") == 23 * 3600


def test_preview_of_a_day() -> None:
    now_s = at("2026-03-02 12:00:00")
    assert preview(BERLIN, AUTO, now_s, now_s) == [
        (now_s, AUTO),
        (at("2026-03-02 22:00:00"), TRAIN),
        (at("2026-03-03 06:00:00"), SERVE),
    ]


@pytest.mark.parametrize("cron", ["", "0 22 * *", "61 * * * *", "0 0 22 * * *", "@daily", "tonight please go now ok"])
def test_what_is_no_cron_expression(cron: str) -> None:
    with pytest.raises(InvalidSchedule, match="five fields expected"):
        Window(cron, TRAIN)


@pytest.mark.parametrize("zone", ["Mars/Olympus", "../etc/passwd", ""])
def test_what_is_no_time_zone(zone: str) -> None:
    with pytest.raises(InvalidSchedule, match="IANA name expected"):
        Window("0 22 * * *", TRAIN, zone)


class TidalStore(FakeStore):
    windows: tuple[Window, ...] = ()

    def load(self) -> Workload:
        return replace(super().load(), windows=self.windows, policy_since_s=0.0)


def test_the_loop_changes_mode_when_a_window_fires() -> None:
    async def life() -> None:
        store = TidalStore(AUTO, (JobView("j", 1, 2),), (DeploymentView("m", "v1", min_replicas=1),))
        store.windows = (Window("0 22 * * *", TRAIN), Window("0 6 * * *", SERVE))
        world = World(box_of(2))
        loop = SchedulerLoop(FakeEffects(world), store, MemoryJournal(), virtual_time.VirtualClock())
        running = asyncio.create_task(loop.run())
        await loop.wait_settled(loop.nudge())
        assert {r.state for r in world.replicas.values()} == {"open"} and not world.groups
        assert loop.status()["policy"]["schedule"] == "0 6 * * *"
        await asyncio.sleep(3600 + 60)
        assert {r.state for r in world.replicas.values()} == {"asleep"}
        assert [len(g.devices) for g in world.groups.values()] == [2]
        await asyncio.sleep(8 * 3600)
        assert {r.state for r in world.replicas.values()} == {"open"} and not world.groups
        loop.stop()
        await running

    virtual_time.run(life(), start_s=at("2026-03-02 21:00:00", "UTC"))


def test_explain_says_what_would_happen_and_does_nothing() -> None:
    async def life() -> None:
        store = FakeStore(SERVE, (JobView("j", 1, 2),), (DeploymentView("m", "v1", min_replicas=1),))
        world, journal = World(box_of(2)), MemoryJournal()
        loop = SchedulerLoop(FakeEffects(world), store, journal, virtual_time.VirtualClock())
        running = asyncio.create_task(loop.run())
        await loop.wait_settled(loop.nudge())
        told = loop.explain(TRAIN)
        assert told["steps"] == [
            "Replica r1-0 finishes its requests and goes to sleep.",
            "Job j runs on 2 devices (n0/0, n0/1).",
        ]
        assert told["jobs"] == {"j": ["n0/0", "n0/1"]} and told["waiting"] == {}
        assert loop.explain()["steps"] == [] and "mode serve" in loop.explain()["waiting"]["j"]
        assert journal.last_id() == 1 and not world.groups
        loop.stop()
        await running

    virtual_time.run(life())
