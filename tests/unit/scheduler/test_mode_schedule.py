import asyncio
from dataclasses import replace
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from benchmarks.simulator import virtual_time
from scheduler.core.errors import InvalidSchedule
from scheduler.core.workload import DeploymentView, JobView, Policy, Workload
from scheduler.loop.mode_schedule import Window, in_force
from tests.unit.scheduler.fakes import FakeStore, in_virtual_time
from tests.unit.scheduler.test_loop import Rig

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


NIGHT = Window("0 22 * * *", TRAIN, "Europe/Berlin", until="0 6 * * *")


def test_a_choice_made_inside_a_window_lasts_until_an_edge_of_any_window() -> None:
    set_s, noon = at("2026-03-02 23:00:00"), Window("0 1 * * *", SERVE, "Europe/Berlin", for_s=1800.0)
    held = in_force((NIGHT, noon), AUTO, set_s, at("2026-03-02 23:30:00"))
    assert (held.policy, held.window, held.overridden) == (AUTO, None, NIGHT)
    assert held.until_s == at("2026-03-03 01:00:00")
    assert in_force((NIGHT, noon), AUTO, set_s, at("2026-03-03 01:10:00")).window == noon
    resumed = in_force((NIGHT, noon), AUTO, set_s, at("2026-03-03 01:30:00"))
    assert (resumed.window, resumed.since_s) == (NIGHT, at("2026-03-03 01:30:00"))


def test_a_time_that_the_clocks_skip_or_repeat_fires_once() -> None:
    half_past_two = Window("30 2 * * *", TRAIN, "Europe/Berlin")
    assert half_past_two.next_s(at("2026-03-28 12:00")) == at("2026-03-29 03:00")
    assert half_past_two.next_s(at("2026-03-29 03:00")) == at("2026-03-30 02:30")
    first = half_past_two.next_s(at("2026-10-24 12:00"))
    assert first == at("2026-10-25 02:30")
    assert half_past_two.next_s(first) == at("2026-10-26 02:30"), "not in the hour that comes again"
    assert half_past_two.last_s(at("2026-10-25 12:00")) == first
    half_hourly = Window("*/30 * * * *", TRAIN, "Europe/Berlin")
    assert half_hourly.next_s(first) == first + 1800.0, "which an interval does fire in"


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"until": "0 6 * * *", "for_s": 60.0}, "not by both"),
        ({"for_s": 1.0}, "from a minute to a year"),
        ({"until": "6 o'clock"}, "expected five fields"),
    ],
)
def test_an_end_that_cannot_be_used(named: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidSchedule, match=told):
        Window("0 22 * * *", TRAIN, **named)


class WindowStore(FakeStore):
    windows: tuple[Window, ...] = ()

    def load(self, *, free_devices: int = 0) -> Workload:
        return replace(super().load(), windows=self.windows, policy_since_s=0.0)


def test_the_loop_changes_mode_when_a_window_fires() -> None:
    async def life() -> None:
        store = WindowStore(AUTO, (JobView("j", (1, 2)),), (DeploymentView("m", "v1", min_replicas=1),))
        store.windows = (Window("0 22 * * *", TRAIN), Window("0 6 * * *", SERVE))
        async with Rig(store, devices=2) as rig:
            await rig.settle()
            assert set(rig.states()) == {"open"} and not rig.jobs()
            assert rig.loop.status()["policy"]["schedule"] == "0 6 * * *"
            await asyncio.sleep(3600 + 60)
            assert set(rig.states()) == {"asleep"} and rig.jobs() == {"j": 2}
            await asyncio.sleep(8 * 3600)
            assert set(rig.states()) == {"open"} and not rig.jobs()

    virtual_time.run(life(), start_s=at("2026-03-02 21:00:00", "UTC"))


@in_virtual_time
async def test_explain_says_what_would_happen_and_does_nothing() -> None:
    store = FakeStore(SERVE, (JobView("j", (1, 2)),), (DeploymentView("m", "v1", min_replicas=1),))
    async with Rig(store, devices=2) as rig:
        await rig.settle()
        told = rig.loop.explain(TRAIN)
        assert told["steps"] == [
            "Replica r1-0 finishes its requests and goes to sleep, because job j gets n0/0.",
            "Job j runs on 2 devices (n0/0, n0/1), because training gets 2 of 2 devices in mode train.",
        ]
        assert told["jobs"] == {"j": ["n0/0", "n0/1"]} and told["waiting"] == {}
        assert rig.loop.explain()["steps"] == [] and "mode serve" in rig.loop.explain()["waiting"]["j"]
        assert rig.journal.last_id() == 1 and not rig.jobs()
