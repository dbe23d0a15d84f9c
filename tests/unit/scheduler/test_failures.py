"""Failures of models and jobs: counts, retry delays, and what is blamed."""

import pytest

from scheduler.core.config import SchedulerConfig
from scheduler.core.failures import Failures, reverts_to
from scheduler.core.workload import Build, DeploymentView


@pytest.fixture
def failures() -> Failures:
    return Failures(SchedulerConfig())


def test_failures_within_a_second_count_once(failures: Failures) -> None:
    first = failures.model_failed("m", "v1", "its engine died", 100.0)
    for at in (100.0, 100.2, 100.9):
        assert failures.model_failed("m", "v1", "drain: the engine died", at) is first
    assert (first.count, first.tries, first.not_before_s, first.reason) == (1, 1, 101.0, "its engine died")
    failures.model_failed("m", "v1", "again", 101.5)
    assert (first.count, first.not_before_s) == (2, 103.5)


def test_job_is_hopeless_after_own_failures_without_progress(failures: Failures) -> None:
    now_s = 0.0
    for step, blame, over in [
        (0, "own", False),
        (0, "own", False),
        (0, "outside", False),
        (1, "own", False),
        (1, "own", False),
        (1, "memory", False),
        (1, "own", True),
    ]:
        failure = failures.job_failed("j", step, "x", now_s, blame=blame)
        assert failures.hopeless(failure) is over
        now_s = failure.not_before_s
    assert failures.hopeless(failures.job_failed("k", 0, "no such column", 0.0, blame="input"))


def test_failure_wait_resets_after_long_life(failures: Failures) -> None:
    now_s = 0.0
    for _ in range(6):
        failure = failures.model_failed("m", "v1", "x", now_s)
        now_s = failure.not_before_s
    assert failure.wait_s == 32.0
    failures.model_failed("m", "v1", "x", now_s + 10, lived_s=10.0)
    assert failure.wait_s == 60.0
    failures.model_failed("m", "v1", "x", now_s + 200, lived_s=61.0)
    assert (failure.wait_s, failure.count) == (1.0, 1)


def test_retry_memory_ends_wait_of_memory_failures_only(failures: Failures) -> None:
    for model, blame in [("a", "own"), ("b", "memory"), ("c", "outside")]:
        failures.model_failed(model, "v1", "x", 100.0, blame=blame)
    failures.retry("memory")
    assert [failures.model(m, "v1").not_before_s for m in "abc"] == [101.0, 0.0, 0.0]
    failures.retry("device")
    assert failures.model("a", "v1").not_before_s == 0.0


SERVED, NOW = Build("v1", 1, "old"), Build("v1", 1, "new")


@pytest.mark.parametrize(
    ("served", "failed", "goes_back"),
    [
        (SERVED, NOW, True),
        (SERVED, Build("v1", 1, "of before"), False),
        (NOW, NOW, False),
        (Build("v0", 1, "old"), NOW, False),
        (Build("v1", 2, "old"), NOW, False),
        (Build(), NOW, False),
        (None, NOW, False),
    ],
)
def test_settings_are_blamed_if_nothing_else_changed(served: Build | None, failed: Build, goes_back: bool) -> None:
    deployment = DeploymentView("m", "v1", settings="new", served=served)
    assert reverts_to(deployment, failed) == (served if goes_back else None)
