"""Profiles of a run's steps: what they say, and that nothing about them ends a job."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from train.control.progress import Progress
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


@pytest.mark.parametrize(("rows", "steps", "products"), [(3, 2, 6), (20, 1, 8)])
def test_profile_of_many_rows_has_the_last_eight(tmp_path: Path, told: Told, rows: int, steps: int, products: int):
    one = Profiling(tmp_path / "profile", "gloo", told, Progress("step", 3), rows)
    for step in range(1, 6):
        one.before_step(10 if step == 1 else 0)
        for _ in range(rows):
            work(one)
            one.after_row()
        one.after_step(step)
    ((_, found),) = told.events
    operators = {row["name"]: row for row in found["operators"]}
    assert (found["steps"], operators["aten::mm"]["count"]) == (steps, products)


def test_drop_ends_a_profile_that_has_not_begun(tmp_path: Path, told: Told):
    one = Profiling(tmp_path / "profile", "gloo", told, Progress("step", 3), 20)
    one.before_step(1)
    one.drop()
    for _ in range(20):
        one.after_row()
    one.after_step(1)
    assert [event for event, _ in told.events] == ["message"]


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
