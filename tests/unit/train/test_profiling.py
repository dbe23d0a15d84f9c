"""Profiles of a run's steps: what they say, and that nothing about them ends a job."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from train.control.progress import ControlSignals, Progress
from train.trainer import profiling
from train.trainer.profiling import Profiling


class Told:
    """Events of a rank."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **data: Any) -> None:
        self.events.append((event, data))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def one(tmp_path: Path, told: Told) -> Profiling:
    return Profiling(tmp_path / "profile", "gloo", told, Progress("step", 3))


def work(one: Profiling) -> None:
    with one.reading_input():
        batch = torch.ones(64, 64)
    torch.mm(batch, batch)


def test_the_steps_that_were_asked_for_are_told_with_a_trace(one: Profiling, told: Told, tmp_path: Path):
    for step in range(1, 5):
        one.before_step(2 if step == 2 else 0)
        work(one)
        one.after_step(step)
    ((event, found),) = told.events
    assert event == "profiled" and (found["step"], found["steps"]) == (3, 2)
    share, operators = found["share"], {row["name"]: row for row in found["operators"]}
    assert operators["aten::mm"]["count"] == 2 and operators["aten::mm"]["kind"] == "compute"
    assert operators["input"]["kind"] == "input" and share["input"] > 0 and share["communication"] == 0
    assert sum(share.values()) == pytest.approx(found["seconds"])
    trace = json.loads(gzip.decompress(Path(found["trace"]).read_bytes()))
    assert any(row.get("name") == "aten::mm" for row in trace["traceEvents"])
    assert found["bytes"] == Path(found["trace"]).stat().st_size


def test_one_trace_of_a_job_is_kept_and_none_that_is_too_long(
    one: Profiling, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for step in (1, 2):
        one.before_step(1)
        work(one)
        one.after_step(step)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["trace-2.json.gz"]
    monkeypatch.setattr(profiling, "MOST_EVENTS", 1)
    one.before_step(1)
    work(one)
    one.after_step(3)
    assert told.events[-1][1]["trace"] is None and told.events[-1][1]["operators"] != []
    assert list((tmp_path / "profile").iterdir()) == []


@pytest.mark.parametrize(("rows", "steps", "products"), [(3, 2, 6), (20, 1, 8)])
def test_a_profile_has_so_many_rows_that_its_events_do_not_hold_up_the_other_ranks(
    tmp_path: Path, told: Told, rows: int, steps: int, products: int
):
    """Ten steps of eight rows of an 8 B model took torch longer to read than other ranks wait in a collective."""
    one = Profiling(tmp_path / "profile", "gloo", told, Progress("step", 3), rows)
    for step in range(1, 6):
        one.before_step(10 if step == 1 else 0)
        for _ in range(rows):
            one.before_row()
            work(one)
        torch.add(torch.ones(2), 1)  # the end of a step
        one.after_step(step)
    ((_, found),) = told.events
    operators = {row["name"]: row for row in found["operators"]}
    assert found["steps"] == steps and operators["aten::mm"]["count"] == products
    assert operators["aten::add"]["count"] == steps


def test_a_profile_whose_rows_have_not_come_is_dropped_with_the_others(tmp_path: Path, told: Told):
    one = Profiling(tmp_path / "profile", "gloo", told, Progress("step", 3), 20)
    one.before_step(1)
    one.before_row()
    one.drop()
    assert [event for event, _ in told.events] == ["message"]
    one.before_row()
    one.after_step(1)
    assert len(told.events) == 1


def test_it_ends_with_the_steps_that_it_has_when_its_time_is_over(
    one: Profiling, told: Told, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(profiling, "LIMIT_S", 0.0)
    one.before_step(40)
    work(one)
    one.after_step(1)
    assert [(event, found["steps"]) for event, found in told.events] == [("profiled", 1)]


def test_devices_that_are_wanted_do_not_wait_for_a_profile(one: Profiling, told: Told, tmp_path: Path):
    one.before_step(5)
    work(one)
    one.after_step(1)
    one.drop()
    one.drop()
    assert [event for event, _ in told.events] == ["message"] and "after 1 steps" in told.events[0][1]["text"]
    assert not (tmp_path / "profile").exists()
    one.before_step(1)
    work(one)
    one.after_step(2)
    assert told.events[-1][0] == "profiled", "it can be asked for again"


@pytest.mark.parametrize("broken", ["start", "stop", "export_chrome_trace"])
def test_a_profiler_that_fails_costs_the_profile_alone(
    one: Profiling, told: Told, monkeypatch: pytest.MonkeyPatch, broken: str
):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no counters")

    monkeypatch.setattr(torch.profiler.profile, broken, fail)
    one.before_step(1)
    work(one)
    one.after_step(1)
    one.end(1)
    assert [event for event, _ in told.events] == ["message"]
    assert "goes on: RuntimeError('no counters')" in told.events[0][1]["text"]
    monkeypatch.undo()


def test_a_profile_is_taken_up_once():
    signals = ControlSignals()
    assert signals.take_profile() == 0
    signals.profile(steps=3)
    assert (signals.take_profile(), signals.take_profile()) == (3, 0)
