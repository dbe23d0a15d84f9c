"""The verdict on a mode beside the static splits."""

from __future__ import annotations

from scheduler.simulator.simulate import pareto


def point(attainment: float, hours: float) -> dict[str, float]:
    return {"slo_attainment": attainment, "training_gpu_hours": hours}


def test_the_four_verdicts() -> None:
    splits = [point(0.5, 7.0), point(0.9, 6.0), point(1.0, 4.0)]
    assert pareto(point(1.0, 7.0), splits) == "better than all"
    assert pareto(point(0.95, 5.5), splits) == "on the front"
    assert pareto(point(0.9, 5.9), splits) == "beaten", "as many in time, and trained less"
    assert pareto(point(0.9, 6.0), splits) == "on the front", "nobody is beaten by the equal"
    assert pareto(point(0.9, 6.0), []) == "none"
