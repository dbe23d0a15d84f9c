"""Order of the queue: priority, deadlines, fair share, who runs already."""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Demand, DeploymentView, JobView, PlanInput, Policy
from scheduler.plan.plan import Round
from scheduler.plan.queue import allot, order, positions, urgent_from_s
from tests.unit.scheduler.fakes import box_of


def job(name: str, submitted_s: float, owner: str = "", **fields) -> JobView:  # noqa: ANN003
    return JobView(name, tuple(range(1, 9)), submitted_s=submitted_s, owner=owner, **fields)


def names(jobs: list[JobView], now_s: float = 100.0) -> list[str]:
    return [j.id for j in order(jobs, now_s)]


def test_everybodys_first_job_before_anybodys_second() -> None:
    jobs = [job(f"a{n}", n, "ann") for n in range(3)] + [job("b0", 10, "bob"), job("c0", 11, "cyd")]
    assert names(jobs) == ["a0", "b0", "c0", "a1", "a2"]


def test_jobs_that_cannot_run_do_not_push_their_owners_next_back() -> None:
    jobs = [job("a0", 0, "ann", phase="paused"), job("a1", 1, "ann"), job("b0", 0.5, "bob")]
    assert names(jobs).index("a1") == 2 and names([replace(j, phase="wanted") for j in jobs])[-1] == "a1"


def test_a_deadline_presses_when_the_work_left_hardly_fits_before_it() -> None:
    pressed = job("d", 50, deadline_s=1000.0, remaining_device_s=8 * 400.0)
    assert urgent_from_s(pressed) == 1000.0 - 1.5 * 400.0
    assert names([job("x", 1), pressed], now_s=399.0) == ["x", "d"]
    assert names([job("x", 1), pressed], now_s=400.0) == ["d", "x"]
    higher = job("p", 60, priority=1)
    assert names([higher, pressed], now_s=900.0) == ["p", "d"], "priority comes first"
    queue = allot([job("x", 1), pressed], 8, 10.0, 0.0, "", {"n0": 8})
    assert 400.0 in queue.reviews, "and the plan is looked at again by then"


def test_positions_say_in_slurms_words_why_a_job_waits() -> None:
    jobs = [
        JobView("running", (1, 2), devices=("n0/0",), phase="running", submitted_s=1.0),
        JobView("paused", phase="paused", submitted_s=2.0, priority=9),
        JobView("backoff", not_before_s=20.0, submitted_s=2.0, priority=7),
        JobView("next", (4,), submitted_s=3.0, priority=6),
        JobView("after", submitted_s=4.0),
        JobView("leaving", devices=("n0/1",), phase="running", busy="leaving", submitted_s=9.0, priority=-1),
    ]
    assert [(job.id, reason) for job, reason in positions(jobs, 10.0)] == [
        ("paused", "JobHeldUser"),
        ("backoff", "BeginTime"),
        ("next", "Resources"),
        ("running", None),
        ("after", "Priority"),
        ("leaving", "Priority"),
    ]


def test_a_job_that_leaves_keeps_no_devices_from_serving_though_it_must_not_be_preempted() -> None:
    leaves = JobView("j", devices=("n0/0", "n0/1"), phase="running", preemptible=False, busy="leaving")
    model = DeploymentView("m", "v1", max_replicas=2, demand=Demand(inflight=9, last_request_s=9.0))
    given = PlanInput(
        Policy("serve"), box_of(2), (leaves,), (model,), busy_devices=frozenset(leaves.devices), hysteresis={}
    )
    replicas, _, jobs = Round(given, 10.0, SchedulerConfig(target_inflight=1)).count({}, {})
    assert replicas == {"m": 2} and jobs.sizes == {}
