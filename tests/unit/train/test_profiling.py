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


@pytest.fixture
def told() -> list[tuple[str, dict[str, Any]]]:
    """Events of a rank."""
    return []


@pytest.fixture
def profiling(tmp_path: Path, told: list):
    """Make one for so many rows a step."""
    return lambda rows=1: Profiling(
        tmp_path / "profile", "gloo", lambda event, **data: told.append((event, data)), Progress("step", 3), rows
    )


def work(one: Profiling) -> None:
    with one.reading_input():
        batch = torch.ones(64, 64)
    torch.mm(batch, batch)


def test_profile_of_requested_steps_has_a_trace(profiling, told):
    one = profiling()
    for step in range(1, 5):
        one.before_step(2 if step == 2 else 0)
        work(one)
        one.after_step(step)
    ((event, found),) = told
    assert event == "profiled" and (found["step"], found["steps"]) == (3, 2)
    share, operators = found["share"], {row["name"]: row for row in found["operators"]}
    assert operators["aten::mm"]["count"] == 2 and operators["aten::mm"]["kind"] == "compute"
    assert operators["input"]["kind"] == "input" and share["input"] > 0 and share["communication"] == 0
    assert sum(share.values()) == pytest.approx(found["seconds"])
    trace = json.loads(gzip.decompress(Path(found["trace"]).read_bytes()))
    assert any(row.get("name") == "aten::mm" for row in trace["traceEvents"])
    assert found["bytes"] == Path(found["trace"]).stat().st_size


@pytest.mark.parametrize(("rows", "steps", "products"), [(3, 2, 6), (20, 1, 8)])
def test_profile_of_many_rows_has_the_last_eight(profiling, told, rows, steps, products):
    one = profiling(rows)
    for step in range(1, 6):
        one.before_step(10 if step == 1 else 0)
        for _ in range(rows):
            work(one)
            one.after_row()
        one.after_step(step)
    ((_, found),) = told
    operators = {row["name"]: row for row in found["operators"]}
    assert (found["steps"], operators["aten::mm"]["count"]) == (steps, products)


def test_drop_ends_a_profile_that_has_not_begun(profiling, told):
    one = profiling(20)
    one.before_step(1)
    one.drop()
    for _ in range(20):
        one.after_row()
    one.after_step(1)
    assert [event for event, _ in told] == ["message"]


@pytest.mark.parametrize("broken", ["start", "stop", "export_chrome_trace"])
def test_profiler_that_fails_costs_the_profile_alone(profiling, told, monkeypatch, broken):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no counters")

    one = profiling()
    monkeypatch.setattr(torch.profiler.profile, broken, fail)
    one.before_step(1)
    work(one)
    one.after_step(1)
    one.end(1)
    assert [event for event, _ in told] == ["message"]
    monkeypatch.undo()
