"""The plan allocates devices to engines and jobs under each policy, and no device to two holders."""

from collections import Counter
from dataclasses import replace

import pytest

from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import (
    Allocation,
    Demand,
    DeploymentView,
    Device,
    Hysteresis,
    JobView,
    PlanInput,
    Policy,
    ReplicaView,
)
from scheduler.plan import queue
from scheduler.plan.free_devices import FreeDevices
from scheduler.plan.plan import Round, plan
from scheduler.plan.queue import allot, order, positions, urgent_from_s
from tests.unit.scheduler.fakes import box_of

EIGHT = box_of(8)
SIZES = (1, 2, 4, 8)
CONFIG = SchedulerConfig(target_inflight=4, give_back_after_s=60, job_dwell_s=30, turn_s=30)


def planned(now_s: float = 1000.0, **fields) -> Allocation:  # noqa: ANN003
    found = PlanInput(**{"devices": EIGHT, "policy": Policy("auto"), **fields})
    allocation = plan(found, now_s, CONFIG)
    holders = [*(r.devices for r in allocation.open_replicas), *allocation.groups.values()]
    placed = [d for devices in holders for d in devices]
    assert len(placed) == len(set(placed)) and set(placed) <= {d.id for d in found.devices}
    return allocation


def sizes(allocation: Allocation) -> dict[str, int]:
    return {job_id: len(devices) for job_id, devices in allocation.groups.items()}


def awake(allocation: Allocation) -> dict[str, int]:
    return Counter(replica.model for replica in allocation.open_replicas)


def job(name: str = "j1", **fields) -> JobView:  # noqa: ANN003
    return JobView(name, **{"sizes": SIZES, **fields})


def opened(name: str, device: int, **fields) -> ReplicaView:  # noqa: ANN003
    return ReplicaView(name, **{"model": "m", "version": "v1", "state": "open", "devices": (f"n0/{device}",), **fields})


M = DeploymentView("m", "v1", max_replicas=8)


@pytest.mark.parametrize("floor", [8, 20])
@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Policy("train"), "mode train keeps 8 of 8 devices for serving"),
        (Policy("auto"), "the serving floor keeps 8 of 8 devices"),
        (Policy("split", 6), "mode split gives training 0, because the serving floor keeps 8 of 8 devices"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_plan_serving_floor_of_all_devices_excludes_jobs(policy: Policy, why: str, floor: int) -> None:
    hot = replace(M, demand=Demand(held=1, last_request_s=999))
    a = planned(policy=replace(policy, serving_floor=floor), jobs=(job(),), deployments=(hot,))
    assert sizes(a) == {} and awake(a)["m"] >= 1
    assert a.waiting["j1"] == f"Needs 1 device: {why}."


def test_plan_auto_takes_devices_of_idle_engines_for_jobs() -> None:
    replicas = tuple(opened(f"r{i}", i) for i in range(8))
    idle = replace(M, min_replicas=1, demand=Demand(last_request_s=100.0))
    a = planned(deployments=(idle,), replicas=replicas, jobs=(job(),))
    assert sizes(a) == {"j1": 4} and awake(a) == {"m": 4}, "7 devices: the job runs at 4, the others stay open"
    assert Counter(r.state for r in a.replicas) == {"open": 4, "asleep": 4} and a.notes == {}
    assert not awake(planned(policy=Policy("train"), deployments=(M,), replicas=(opened("r0", 0),)))


def test_plan_shrinks_only_after_delay_to_peak_demand() -> None:
    hysteresis = {"m": Hysteresis(replicas=4)}
    low = replace(M, demand=Demand(inflight=2, last_request_s=1000.0))
    first = planned(deployments=(low,), jobs=(job(),), hysteresis=hysteresis)
    assert awake(first) == {"m": 4} and first.review_at_s is not None
    middle = replace(low, demand=Demand(inflight=9, last_request_s=1030.0))
    second = planned(1030.0, deployments=(middle,), jobs=(job(),), hysteresis=first.hysteresis)
    third = planned(1061.0, deployments=(low,), jobs=(job(),), hysteresis=second.hysteresis)
    assert third.hysteresis["m"].replicas == 3, "the peak of the last minute, not the present"
    limited = replace(M, idle_limit_s=5000.0, demand=Demand(last_request_s=990.0))
    assert planned(5000.0, deployments=(limited,)).review_at_s == 5990.0, "when it sleeps at the latest"


def test_plan_names_jobs_ahead_only_to_their_owner() -> None:
    """Owners read these sentences in the events of their jobs, so a sentence must not name jobs of other owners."""
    bobs = job("z", priority=1, owner="bob", sizes=(8,))
    a = planned(jobs=(bobs, job("a", owner="alice"), job("b", owner="bob")))
    assert a.waiting == {
        "a": "Needs 1 device; 0 of training's 8 are left by jobs ahead of it.",
        "b": "Needs 1 device; 0 of training's 8 are left by job z and others ahead of it.",
    }


def test_plan_wakes_sleeping_engine_on_its_device() -> None:
    asleep, m = opened("r7", 5, state="asleep", version="v0"), replace(M, demand=Demand(held=1))
    (replica,) = planned(deployments=(m,), replicas=(asleep,), jobs=(job(),)).open_replicas
    assert (replica.id, replica.devices, replica.version) == ("r7", ("n0/5",), "v1"), "with the active version"
    a = planned(deployments=(m,), replicas=(opened("r0", 0, state="draining"), opened("r1", 1)))
    assert a.open_replicas[0].id == "r1", "not the one that is leaving, though it is as old"
    failing = replace(m, version="v2", not_before_s=2000.0)
    assert planned(deployments=(failing,), replicas=(opened("r0", 0),)).open_replicas[0].version == "v1", "in a backoff"
    there = job(sizes=(1,), phase="running", devices=("n0/5",))
    a = planned(deployments=(m,), replicas=(asleep,), jobs=(there,))
    assert a.groups == {"j1": ("n0/5",)} and awake(a) == {"m": 1}, "no job moves for it"


@pytest.mark.parametrize(("since_s", "started"), [(995.0, 0), (980.0, 1)])
def test_plan_waits_for_engine_going_to_sleep(since_s: float, started: int) -> None:
    falling = opened("r7", 5, state="asleep", busy="leaving", since_s=since_s)
    a = planned(deployments=(replace(M, demand=Demand(held=1)),), replicas=(falling,))
    assert len(a.open_replicas) == started and (started or a.review_at_s == 1005.0)


@pytest.mark.parametrize(
    ("max_asleep", "kept"),
    [({}, {"r2", "r3"}), ({"n0": 3}, {"r2", "r3"}), ({"n0": 1}, {"r3"}), ({"n0": 0}, set()), ({"n1": 0}, {"r2", "r3"})],
)
def test_plan_stops_least_recently_used_sleepers(max_asleep: dict[str, int], kept: set[str]) -> None:
    """Two limits apply to sleeping engines: the configured limit and the limit by host memory."""
    config = CONFIG.model_copy(update={"max_resident_asleep": 2})
    replicas = tuple(opened(f"r{i}", i, state="asleep", model=f"m{i}") for i in range(4))
    models = tuple(DeploymentView(f"m{i}", "v1", demand=Demand(last_request_s=float(i))) for i in range(4))
    plan_input = PlanInput(Policy("auto"), EIGHT, deployments=models, replicas=replicas, max_asleep=max_asleep)
    assert {r.id for r in plan(plan_input, 1000.0, config).replicas} == kept


def test_plan_replaces_engine_with_outdated_settings() -> None:
    m = replace(M, min_replicas=1, max_replicas=1, demand=Demand(inflight=1), settings="new")
    (engine,) = planned(deployments=(m,), replicas=(opened("r0", 0), opened("r1", 1, state="asleep"))).replicas
    assert engine.id not in ("r0", "r1") and (engine.settings, engine.state) == ("new", "open")
    kept = planned(deployments=(m,), replicas=(replace(opened("r0", 0), settings="new"),))
    assert [(r.id, r.settings) for r in kept.replicas] == [("r0", "new")]


HOME_AND_AWAY = (*box_of(2), *(replace(d, id=f"n1/{d.index}", node="n1") for d in box_of(3)))


def test_plan_node_bound_job_leaves_other_nodes_to_engines() -> None:
    bound = job(nodes=("n0",))
    m = replace(M, min_replicas=3, max_replicas=8, demand=Demand(inflight=50))
    a = planned(policy=Policy("split", 4), devices=HOME_AND_AWAY, jobs=(bound,), deployments=(m,))
    assert a.groups["j1"] == ("n0/0", "n0/1") and awake(a) == {"m": 3}
    assert {d for r in a.open_replicas for d in r.devices} == {"n1/0", "n1/1", "n1/2"}, "nothing idles for the job"
    elsewhere = job(sizes=(1,), nodes=("n1",), phase="running", devices=("n0/0",))
    wide = replace(M, tensor_parallel=2, demand=Demand(held=1))
    for policy, device, engines in ((Policy("auto"), "n1/0", {"m": 1}), (Policy("train"), "n0/0", {})):
        a = planned(policy=policy, devices=HOME_AND_AWAY[:3], jobs=(elsewhere,), deployments=(wide,))
        assert a.groups["j1"] == (device,) and awake(a) == engines, "it moves for what serving claims alone"
        assert ("m" in a.notes) is (not engines)


def test_plan_gives_serving_the_devices_of_a_job_too_large_for_its_node() -> None:
    large = job(nodes=("n0",), sizes=(4, 8))
    m = replace(M, max_replicas=8, demand=Demand(inflight=50))
    a = planned(policy=Policy("train"), devices=HOME_AND_AWAY, jobs=(large,), deployments=(m,))
    assert a.waiting["j1"] == "Needs 4 devices of one node; the largest that it may use has 2."
    assert awake(a) == {"m": 5}


def test_plan_of_fragmented_job_moves_other_jobs_or_skips_it() -> None:
    both = ("n0", "n1")
    small = job("small", nodes=both, sizes=(1,), priority=1, phase="running", devices=("n0/0",))
    fixed = job("fixed", nodes=both, sizes=(2,), preemptible=False, phase="running", devices=("n1/0", "n1/1"))
    large = job("large", nodes=both, sizes=(3,), priority=2)
    last = job("last", nodes=both, sizes=(1,), submitted_s=9.0)
    a = planned(devices=box_of(3, nodes=2), jobs=(small, fixed, large, last))
    assert a.groups == {"large": ("n0/0", "n0/1", "n0/2"), "small": ("n1/2",), "fixed": ("n1/0", "n1/1")}
    a = planned(devices=box_of(3, nodes=2), jobs=(replace(small, preemptible=False), fixed, large, last))
    assert sizes(a) == {"small": 1, "fixed": 2, "last": 1}
    assert a.waiting["large"] == "Needs 3 devices; 2 of training's 6 are left by jobs that are not preempted."
    passed = queue.allot((small, fixed, large, last), 6, 1000.0, 0.0, "", {"n0": 3, "n1": 3}, {"large": 0})
    assert passed.sizes == {"small": 1, "fixed": 2, "last": 1} and "several nodes" in passed.waiting["large"]


S = DeploymentView("s", "v1", demand=Demand(held=1))


@pytest.mark.parametrize("policy", [Policy("train"), Policy("split", 8), Policy("auto")])
def test_plan_runs_job_alongside_its_sampling_engine(policy: Policy) -> None:
    for starved in (True, False):
        a = planned(policy=policy, jobs=(job(sampled_by="s", starved=starved),), deployments=(S,))
        assert sizes(a) == {"j1": 4} and awake(a) == {"s": 1}


def test_plan_reserves_devices_for_sampling_and_judge_engines() -> None:
    teacher = DeploymentView("t", "v1", demand=Demand(held=1))
    idle = replace(S, demand=Demand(last_request_s=999.0))
    mine = job(sizes=(1, 2), sampled_by="s", starved=True)
    a = planned(policy=Policy("train"), devices=box_of(3), jobs=(mine,), deployments=(idle, teacher))
    assert sizes(a) == {"j1": 1} and awake(a) == {"s": 1, "t": 1}


@pytest.mark.parametrize("policy", [Policy("train"), Policy("auto")])
def test_plan_alternates_job_and_sampling_engine_on_one_device(policy: Policy) -> None:
    one, mine = box_of(1), job(sizes=(1,), sampled_by="s", phase="running", devices=("n0/0",))
    a = planned(policy=policy, devices=one, jobs=(replace(mine, starved=True),), deployments=(S,))
    assert sizes(a) == {} and awake(a) == {"s": 1} and a.waiting["j1"]
    # Now the samples are complete, so the sampling engine is idle.
    idle = replace(S, demand=Demand(last_request_s=900.0), idle_limit_s=1.0)
    back = replace(mine, phase="suspended", devices=())
    engines = (opened("r1", 0, model="s"),)
    a = planned(policy=policy, devices=one, jobs=(back,), deployments=(idle,), replicas=engines)
    assert sizes(a) == {"j1": 1} and awake(a) == {}


def test_plan_alternates_two_models_on_one_device() -> None:
    asked, hysteresis = Demand(held=1), {"s": Hysteresis(replicas=1, waiting_since_s=985.0)}
    shared = {"devices": box_of(1), "deployments": (replace(M, demand=asked), S), "hysteresis": hysteresis}
    first, then = (planned(t, replicas=(opened("r0", 0, since_s=985.0),), **shared) for t in (1014.0, 1015.0))
    assert awake(first) == {"m": 1} and first.review_at_s == 1015.0 and awake(then) == {"s": 1}


def queued(name: str, submitted_s: float, owner: str = "", **fields) -> JobView:  # noqa: ANN003
    return job(name, submitted_s=submitted_s, owner=owner, **fields)


def names(jobs: list[JobView], now_s: float = 100.0) -> list[str]:
    return [j.id for j in order(jobs, now_s)]


def test_queue_puts_first_job_of_each_owner_before_second_jobs() -> None:
    jobs = [queued(f"a{n}", n, "ann") for n in range(3)] + [queued("b0", 10, "bob"), queued("c0", 11, "cyd")]
    assert names(jobs) == ["a0", "b0", "c0", "a1", "a2"]


def test_queue_order_ignores_paused_jobs_of_an_owner() -> None:
    jobs = [queued("a0", 0, "ann", phase="paused"), queued("a1", 1, "ann"), queued("b0", 0.5, "bob")]
    assert names(jobs).index("a1") == 2 and names([replace(j, phase="wanted") for j in jobs])[-1] == "a1"


def test_queue_job_becomes_urgent_near_its_deadline() -> None:
    pressed = queued("d", 50, deadline_s=1000.0, remaining_device_s=8 * 400.0)
    assert urgent_from_s(pressed) == 1000.0 - 1.5 * 400.0
    assert names([queued("x", 1), pressed], now_s=399.0) == ["x", "d"]
    assert names([queued("x", 1), pressed], now_s=400.0) == ["d", "x"]
    assert names([queued("p", 60, priority=1), pressed], now_s=900.0) == ["p", "d"], "priority comes first"
    queue = allot([queued("x", 1), pressed], 8, 10.0, 0.0, "", {"n0": 8})
    assert 400.0 in queue.reviews, "and the plan is looked at again by then"


def test_queue_positions_have_slurm_reason_codes() -> None:
    jobs = [
        JobView("running", (1, 2), devices=("n0/0",), phase="running", submitted_s=1.0),
        JobView("paused", phase="paused", submitted_s=2.0, priority=9),
        JobView("backoff", not_before_s=20.0, submitted_s=2.0, priority=7),
        JobView("next", (4,), submitted_s=3.0, priority=6),
        JobView("after", submitted_s=4.0),
        JobView("leaving", devices=("n0/1",), phase="running", busy="leaving", submitted_s=9.0, priority=-1),
    ]
    found = positions(jobs, 10.0)
    assert [job.id for job, _ in found] == ["paused", "backoff", "next", "running", "after", "leaving"]
    reasons = ["JobHeldUser", "BeginTime", "Resources", None, "Priority", "Priority"]
    assert [reason for _, reason in found] == reasons


def test_round_gives_devices_of_leaving_job_to_serving() -> None:
    leaves = JobView("j", devices=("n0/0", "n0/1"), phase="running", preemptible=False, busy="leaving")
    model = DeploymentView("m", "v1", max_replicas=2, demand=Demand(inflight=9, last_request_s=9.0))
    given = PlanInput(Policy("serve"), box_of(2), (leaves,), (model,), busy_devices=frozenset(leaves.devices))
    replicas, _, jobs = Round(given, 10.0, SchedulerConfig(target_inflight=1)).count({}, {})
    assert replicas == {"m": 2} and jobs.sizes == {}


def linked(pairs: list[tuple[int, int]], count: int = 8) -> list[Device]:
    peers = [frozenset(f"n0/{a + b - i}" for a, b in pairs if i in (a, b)) for i in range(count)]
    return [Device(f"n0/{i}", "n0", i, "cuda", numa_node=i // 4, linked=peers[i]) for i in range(count)]


def test_free_devices_choose_tightest_node_and_numa_node() -> None:
    free = FreeDevices(box_of(8, nodes=3))
    free.take(["n1/0", "n1/1", "n1/2", "n1/3"])
    assert free.choose(4) == ("n1/4", "n1/5", "n1/6", "n1/7")
    assert free.choose(5) == ("n0/0", "n0/1", "n0/2", "n0/3", "n0/4")
    free = FreeDevices(box_of(8))
    free.take(["n0/0", "n0/1"])
    assert free.choose(4) == ("n0/4", "n0/5", "n0/6", "n0/7")
    assert free.choose(2) == ("n0/2", "n0/3"), "the tightest NUMA node that fits"


def test_free_devices_prefer_nvlink_over_numa() -> None:
    free = FreeDevices(linked([(0, 5), (1, 4), (2, 7), (3, 6)]))
    assert free.choose(2) == ("n0/0", "n0/5")
    free.take(["n0/0"])
    assert free.choose(2) == ("n0/1", "n0/4")
    four = frozenset(free.choose(4) or ())
    assert len({four & frozenset(p) for p in (("n0/1", "n0/4"), ("n0/2", "n0/7"), ("n0/3", "n0/6"))}) == 3


def test_free_devices_prefer_current_devices_of_holder() -> None:
    free = FreeDevices(box_of(8, nodes=2))
    assert free.choose(2, near=("n1/5", "n1/6", "n1/7", "n1/4")) == ("n1/4", "n1/5")
    assert set(free.choose(4, near=("n1/2", "n1/3")) or ()) >= {"n1/2", "n1/3"}


def test_free_devices_choose_within_one_named_node() -> None:
    free = FreeDevices(box_of(8, nodes=3))
    free.take([f"n0/{i}" for i in range(6)] + ["n1/0"])
    assert free.choose(2, nodes=("n1", "n2")) == ("n1/1", "n1/2"), "tighter than n2, and n0 is not named"
    assert free.choose(8, nodes=("n0", "n1")) is None
    assert free.choose(4, nodes=("n0", "n2"), near=("n2/5", "n2/6")) == ("n2/4", "n2/5", "n2/6", "n2/7")
    idle = FreeDevices(box_of(8, nodes=3))
    idle.take([f"n1/{i}" for i in range(8)])
    assert free.choose(3, nodes=("n1", "n2"), only=idle) == ("n2/0", "n2/1", "n2/2"), "nobody has to leave n2"
