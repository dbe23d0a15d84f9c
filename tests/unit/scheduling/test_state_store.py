"""What the scheduler reads from the database and the traffic, and what it writes back."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest

from appliance.controller.bus.bus import Bus
from appliance.controller.devices.mode import Mode, write_mode
from appliance.controller.engines.routing_table import Traffic
from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.scheduling.state_store import LEARN_EVERY_S, DemandLearning, QueuedDemand, job_host_bytes
from appliance.gateway.core.table import bucket
from appliance.store import jobs, models, rows
from appliance.store.database import Database
from appliance.store.rows import JOB_EVENTS, CanaryRow, JobJudgeRow, VersionRow, WindowRow
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Build, Demand, DeploymentView, Policy
from scheduler.loop.mode_schedule import Window
from tests.unit.scheduling.fakes import NO_ROUTING, states_of
from weights.format.names import policy_name

PUBLISHED = {"event": "published", "version": "step-5", "step": 5, "path": "/p", "bytes": 9, "seconds": 0.1, "epoch": 1}


@pytest.fixture
def refreshed():
    return []


@pytest.fixture
def states(db, events, refreshed):
    note = {"models_changed": lambda: refreshed.append(1), "trouble": lambda model, trouble: refreshed.append(1)}
    routing = SimpleNamespace(**{**vars(NO_ROUTING), **note})
    demand = lambda model: Demand(held=3 if model == "starter" else 0)  # noqa: E731
    return states_of(db, events, 1, 2, routing=routing, demand=demand)


def test_load_includes_validated_jobs_until_they_are_cancelled(states, add_model, add_job, db):
    add_model()
    add_job("ftjob-new", phase="validating")
    add_job("ftjob-paused", wanted="pause")
    add_job("ftjob-run", allowed_sizes=[1, 2, 4])
    add_job("ftjob-gone", wanted="cancel")
    add_job("ftjob-ends", phase="running", wanted="cancel")
    seen = {job.id: job for job in states.load(free_devices=0).jobs}
    assert set(seen) == {"ftjob-paused", "ftjob-run"}
    assert seen["ftjob-paused"].phase == "paused"
    assert seen["ftjob-run"].sizes == (1, 2, 4)
    assert jobs.get(db, "ftjob-gone").phase == "cancelled"
    assert jobs.get(db, "ftjob-ends").phase == "running", "until its ranks are gone"


def test_job_phase_follows_actions_of_the_loop(states, add_job, db):
    add_job()
    states.job_running("ftjob-1", ("n0/0", "n0/1"))
    assert (jobs.get(db, "ftjob-1").phase, jobs.get(db, "ftjob-1").devices) == ("running", ["n0/0", "n0/1"])
    states.job_waiting("ftjob-1", "serving needs the devices")
    assert jobs.get(db, "ftjob-1").phase == "queued", "no snapshot was made, so it begins anew"
    jobs.update(db, "ftjob-1", snapshot={"step": 4, "path": "/s"})
    states.job_running("ftjob-1", ("n0/0",))
    states.job_waiting("ftjob-1", "serving needs the devices")
    row = jobs.get(db, "ftjob-1")
    assert (row.phase, row.step, row.reason) == ("suspended", 4, "serving needs the devices")
    states.job_ended("ftjob-1", "failed", "rank 3 died")
    assert jobs.get(db, "ftjob-1").error["message"] == "rank 3 died"
    states.job_running("ftjob-1", ("n0/0",))
    assert jobs.get(db, "ftjob-1").phase == "failed", "an ended job never changes"


def test_queued_job_has_one_event_for_its_wait_and_one_for_its_devices(states, add_job, db):
    add_job()
    for free in (1, 0, 1):
        states.job_waiting("ftjob-1", f"Needs 2 devices; {free} of training's 4 are left by jobs ahead of it.")
    states.job_coming("ftjob-1", ("n0/0", "n0/1"), 1)
    gets, waits = [one.message for one in JOB_EVENTS.page(db, {"job_id": "ftjob-1"}, limit=50).data]
    assert "Needs 2 devices; 1 of" in waits and "n0/0, n0/1" in gets and jobs.get(db, "ftjob-1").reason == gets


def test_succeeded_job_is_callable_at_once(states, events, add_model, add_job, db, refreshed):
    add_model()
    add_job(phase="running")
    events.ingest("ftjob-1", PUBLISHED)
    states.job_ended("ftjob-1", "succeeded", "")
    assert jobs.get(db, "ftjob-1").phase == "succeeded" and refreshed == [1]
    assert "ft:starter:local::ftjob-1" in {d.model for d in states.load(free_devices=0).deployments}


def test_load_has_settings_of_jobs_models_and_windows(states, add_model, add_job, db):
    add_model()
    rows.DEPLOYMENTS.update(db, "starter", max_replicas=1, min_replicas=1, ttft_p95_s=1.5, tpot_p95_ms=80, pinned=1)
    add_job(allowed_sizes=[2], deadline_s=9.0, preemptible=0, owner="alice", priority=3)
    write_mode(db, Mode("train", serving_floor=2, since_s=50.0))
    rows.WINDOWS.insert(db, WindowRow("win_1", "0 22 * * *", "UTC", "split", 1.0, None, 3600.0, 6))
    load = states.load(free_devices=0)
    (model,) = load.deployments
    assert (model.max_replicas, model.min_replicas, model.ttft_target_s, model.pinned) == (1, 1, 1.5, True)
    assert model.tpot_target_s == 0.08
    (job,) = load.jobs
    assert (job.sizes, job.deadline_s, job.preemptible, job.owner) == ((2,), 9.0, False, "alice")
    assert (load.policy, load.policy_since_s) == (Policy("train", None, 2), 50.0)
    assert load.windows == (Window("0 22 * * *", Policy("split", 6, 1), "UTC", None, 3600.0, "win_1"),)


def test_restart_requeues_jobs_without_live_ranks(states, add_job, db):
    add_job("ftjob-on", phase="running")
    add_job("ftjob-off", phase="running")
    add_job("ftjob-saved", phase="running", snapshot={"step": 7, "path": "/s"})
    states.after_restart(adopted={"ftjob-on"})
    phases = {name: jobs.get(db, f"ftjob-{name}").phase for name in ("on", "off", "saved")}
    assert phases == {"on": "running", "off": "queued", "saved": "suspended"}


def test_adapters_of_old_base_versions_get_own_engines(states, add_model, add_adapter, db):
    add_model()
    add_adapter("ft:a")
    add_adapter("ft:b")
    models.insert_version(db, VersionRow("starter", "v2", "here", 10, 1.0, disk_path="/models/starter/v2"))
    models.activate(db, "starter", "v2")
    views = {view.model: view for view in states.load(free_devices=0).deployments}
    assert {(v.model, v.version) for v in views.values()} == {("starter", "v2"), ("starter@v1", "v1")}
    assert views["starter@v1"].idle_limit_s and not views["starter@v1"].pinned


def test_load_adds_deployment_for_running_canary(states, add_model, db):
    add_model()
    rows.DEPLOYMENTS.update(db, "starter", tensor_parallel=2, pinned=1)
    models.insert_version(db, VersionRow("starter", "v2", "here", 10, 1.0, disk_path="/models/starter/v2"))
    rows.CANARIES.put(db, CanaryRow("starter", "v2", "v1", 0.1, 1.0))
    _, canary = states.load(free_devices=0).deployments
    assert (canary.model, canary.version, canary.tensor_parallel) == ("starter@v2", "v2", 2)
    assert (canary.min_replicas, canary.pinned, canary.demand.held) == (1, False, 0)
    rows.CANARIES.update(db, "starter", state="rolled_back", ended_s=2.0)
    assert [view.model for view in states.load(free_devices=0).deployments] == ["starter"]


def test_failed_settings_are_reverted_with_a_note(db, states, add_model, refreshed):
    add_model()
    old, new = Build("v1", 1, ""), Build("v1", 1, "digest")
    assert states.load(free_devices=0).deployments[0].served == Build()
    states.model_served("starter", old)
    models.add_settings(db, "starter", {"max_num_seqs": 4}, new.settings, "someone", 1.0)
    (view,) = states.load(free_devices=0).deployments
    assert (view.build, view.served) == (new, old)
    assert states.settings_failed("starter", new, old, "the engine refused")
    row = models.current_settings(db, "starter")
    (view,) = states.load(free_devices=0).deployments
    assert (row.number, row.settings, row.by_whom) == (2, {}, "box") and view.build == old
    assert row.note == "no engine starts with settings 1, so those before, 0, serve again: the engine refused"
    assert models.settings_in_force(db) == {"starter": row} and row.note and refreshed
    (told,) = rows.AUDIT.page(db).data
    assert (told.action, told.target, told.key_id) == ("model.settings", "starter", None)
    assert told.detail == {"failed": 1, "back_to": 0, "reason": "the engine refused"}
    assert states.settings_failed("starter", new, old, "again"), "they are in force no more"
    assert models.current_settings(db, "starter") == row
    models.add_settings(db, "starter", {"max_num_seqs": 4}, new.settings, "someone", 2.0)
    assert not models.settings_in_force(db)["starter"].note, "what a person set is not the box's"
    assert not states.settings_failed("starter", new, Build("v1", 1, "kept no more"), "the engine refused")


def test_job_waits_while_the_store_is_full(db, events, add_model, add_job):
    add_model()
    add_job("ftjob-new", estimate={"memory": {"store_bytes": 14 * 10**6, "host_bytes": {"1": 5, "8": 20}}})
    room = [10 * 10**6]
    states = states_of(db, events, store=SimpleNamespace(room_bytes=lambda: room[0]))
    (view,) = states.load(free_devices=0).jobs
    assert "need 14.0 MB, 10.0 MB can be allocated now" in view.lacks
    jobs.update(db, "ftjob-new", snapshot={"step": 3, "path": "/p"})
    assert states.load(free_devices=0).jobs[0].lacks == "", "it has begun"
    jobs.update(db, "ftjob-new", snapshot=None)
    room[0] = 20 * 10**6
    assert states.load(free_devices=0).jobs[0].lacks == ""


def test_job_host_bytes_has_only_allowed_sizes(add_job):
    memory = {"store_bytes": 1, "host_bytes": {"1": 5, "2": 9, "8": 20}}
    row = add_job(estimate={"memory": memory}, allowed_sizes=[1, 2])
    assert job_host_bytes(row) == {1: 5, 2: 9} and job_host_bytes(add_job("ftjob-2", allowed_sizes=None)) == {1: 0}


def test_job_sizes_are_limited_by_host_memory(db, events, add_job):
    add_job("ftjob-new", allowed_sizes=[1, 2])
    (view,) = states_of(db, events, job_sizes=lambda row: (1, 8)).load(free_devices=0).jobs
    assert view.sizes == (1,)


NO_POLICIES: Mapping[str, str] = MappingProxyType({})
OPEN = {"starter": {"replicas": [{"id": "r1", "state": "open"}]}}


class Asked(QueuedDemand):
    """QueuedDemand on a box whose gateways have sent no load reports."""

    def __init__(
        self, db: Database, folder: Path, lines: tuple[str, ...] = (), policies: Mapping[str, str] = NO_POLICIES
    ) -> None:
        self.bus = Bus(folder / "bus.sock", ControllerConfig(), first_generation=1)
        hosts, self.reported = {"adapter": "starter", **policies}, Demand()
        routing = SimpleNamespace(
            host=lambda name: hosts.get(name, name), demand=lambda model: self.reported, policies=policies
        )
        super().__init__(db, self.bus, routing, SimpleNamespace(models=lines))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "has_job", "others_ask", "free", "wakes"),
    [
        ("serve", True, False, 0, True),
        ("split", True, True, 1, True),
        ("serve", False, True, 0, False),
        ("auto", False, False, 8, True),
        ("auto", True, False, 8, False),
        ("train", False, False, 8, False),
    ],
)
async def test_batch_lines_wake_model_only_on_unneeded_devices(
    db, tmp_path, add_model, add_job, mode, has_job, others_ask, free, wakes
):
    write_mode(db, Mode(mode, 1))
    if has_job:
        add_model()
        add_job()
    asked = Asked(db, tmp_path, lines=("starter",))
    others = {"other": SimpleNamespace(inflight=1, held=0)} if others_ask else {}
    asked.bus.load = lambda: SimpleNamespace(models=others)
    assert asked.demands(free)("starter").held == wakes


async def test_batch_lines_wake_model_and_keep_it_awake(db, tmp_path):
    asked = Asked(db, tmp_path, lines=("adapter",))
    demand = asked.demands(1)
    assert demand("starter").held == 1, "an adapter, by its base's engines"
    assert demand("other") == Demand()
    asked.reported = Demand(inflight=3)
    assert demand("starter") == Demand(inflight=3), "people speak for themselves"
    asked.reported = Demand()
    asked.bus.publish(models=OPEN | {"adapter": OPEN["starter"]})
    awake = asked.demands(1)("starter")
    assert awake.requests == 0 and awake.last_request_s is not None


@pytest.mark.parametrize("method", ["reinforcement", "distillation"])
async def test_running_job_keeps_queried_model_awake_in_every_mode(db, tmp_path, add_model, add_job, method):
    add_model()
    job = add_job(phase="running", method=method)
    jobs.insert_judge(db, JobJudgeRow(job.id, {"teacher": "starter"}))
    policies = {policy_name(job.id): "starter"} if method == "reinforcement" else {}
    asked = Asked(db, tmp_path, policies=policies)
    assert asked.demands(0)("starter") == Demand(), "nothing is asked yet"
    lines = tuple(policies) or ("starter",)
    assert Asked(db, tmp_path, lines, policies).demands(0)("starter").held == 1
    asked.bus.publish(models=OPEN)
    awake = asked.demands(0)("starter")
    assert awake.requests == 0 and awake.last_request_s is not None
    jobs.set_phase(db, job.id, "suspended")
    assert asked.demands(0)("starter") == Demand(), "its devices are wanted"


RATE, PROMPT_TOKENS = 1000.0, 50  # one prompt takes a replica 50 / 1000 = 0.05 s
BEGAN_S = 1000.0
MODEL = DeploymentView("m", "v1", max_replicas=8, ttft_target_s=2.0)


class Box:
    """A learner of demand, with simulated traffic and a fake clock."""

    def __init__(self) -> None:
        self.now_s, self.traffic, self.model = BEGAN_S, Traffic(("m", "adapter"), RATE), MODEL
        self.arrived = 0
        self.learning = DemandLearning(
            lambda model: self.traffic, self.take_arrivals, SchedulerConfig(), 8, lambda: self.now_s
        )

    def take_arrivals(self) -> dict[str, Counter[int]]:
        return {"m": Counter({bucket(PROMPT_TOKENS, 1.0): self.arrived})}

    def live(self, minutes: float, work_per_s) -> DeploymentView:
        """Simulate traffic for `minutes`. work_per_s(now_s): replica-seconds of work that arrive per second."""
        due, end_s = 0.0, self.now_s + minutes * 60
        while self.now_s < end_s:
            self.now_s += LEARN_EVERY_S
            due += work_per_s(self.now_s) * LEARN_EVERY_S * RATE / PROMPT_TOKENS
            self.arrived, due = int(due), due % 1
            seen = self.seen()
        return seen

    def seen(self) -> DeploymentView:
        return self.learning.learned((self.model,))[0]


@pytest.fixture
def box() -> Box:
    return Box()


def test_learned_standby_rises_only_after_bursts(box):
    quiet = box.live(2, lambda t: 0.3)
    assert quiet.prefill_tokens_per_s == RATE and quiet.standby.replicas <= 2
    assert box.live(10, lambda t: 8.0 if t % 60 < 2 else 0.1).standby.replicas >= 4
    box.model = DeploymentView("m", "v1", max_replicas=2, ttft_target_s=2.0)
    assert box.seen().standby.replicas <= 2, "with other bounds a new learner"


def test_learned_standby_is_none_without_rate_or_target(box):
    box.traffic = Traffic(("m",), None)
    unknown = box.live(1, lambda t: 3.0)
    assert unknown.standby is None and unknown.prefill_tokens_per_s is None
    box.traffic = Traffic(("m",), RATE)
    assert box.live(1, lambda t: 0.3).standby.replicas <= 2, "what came before the rate was known is no burst"
    box.model = DeploymentView("m", "v1", max_replicas=8)
    assert box.seen().standby is None


def test_learning_for_unlimited_model_simulates_few_replica_counts():
    box = Box()
    box.model = DeploymentView("m", "v1", max_replicas=65536, ttft_target_s=2.0)
    box.live(0.1, lambda now_s: 0.1)
    assert len(box.learning._learners["m"]._shadows) < 200
