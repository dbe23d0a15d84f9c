"""What gateways report becomes standby in the planner's view of the deployments."""

from __future__ import annotations

import math
import random

import pytest

from appliance.controller.bus import demand_learning
from appliance.controller.bus.arrivals import Arrivals
from appliance.controller.bus.demand_learning import LOOK_S, DemandLearning, Traffic
from appliance.controller.bus.load import Arrived, Load, Report, parse_report, total
from appliance.controller.scheduling.state_store import BoxSize
from appliance.gateway.observe.load import BUCKETS_PER_DOUBLING, SHORTEST_S
from appliance.store.records import deployments, standby
from scheduler.autoscale.shadow import Seen
from scheduler.autoscale.standby import StandbyLearner
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Demand, DeploymentView
from tests.unit.scheduling.fakes import routing_of, states_of

RATE = 1000.0
PROMPT_TOKENS = 50  # 0.05 replica-seconds


class ReportedBus:
    """Takes reports as the bus does; tables go nowhere."""

    def __init__(self):
        self._arrivals, self._reports = Arrivals(0.0), {}

    def set_models(self, table):
        return 1

    def heard(self, report: Report) -> None:
        self._reports[report.gateway] = report
        self._arrivals.heard(report)

    def load(self) -> Load:
        return total(list(self._reports.values()), self._arrivals.totals)


class Box:
    """Gateway workers on one side, the scheduler's view of the store on the other, a clock in between."""

    def __init__(self, db, events, rate: float | None = RATE):
        self.now_s, self.rate, self._db, self._events = 1.0, rate, db, events
        self.begin()

    def begin(self) -> None:
        """As a box that has just started."""
        self.bus = ReportedBus()
        routing = routing_of(self.bus, self._db)
        routing.refresh()
        self.standbys = DemandLearning(
            routing.traffic, SchedulerConfig(), 8, lambda: self.now_s, self._db, lambda: 1e9 + self.now_s
        )
        self._states = states_of(
            self._db, self._events, BoxSize(1, 8, 8), demand=routing.demand, learned=self.standbys.learned
        )
        self._counts: dict[str, int] = {}
        self._began_s: dict[str, float] = {}

    def arrive(self, worker: str, requests: int) -> None:
        self._counts[worker] = self._counts.get(worker, 0) + requests
        self.report(worker)

    def report(self, worker: str, inflight: int = 0) -> None:
        count = self._counts.setdefault(worker, 0)
        row = {
            "inflight": inflight,
            "arrived_requests": count,
            "arrived_prompt_tokens": count * PROMPT_TOKENS,
            "prefill_tokens_per_s": self.rate,
        }
        began_s = self._began_s.setdefault(worker, self.now_s)
        self.bus.heard(
            parse_report(
                {"gateway": worker, "generation": 1, "started_s": began_s, "replicas": {}, "models": {"starter": row}}
            )
        )

    def restart(self, worker: str) -> None:
        self._counts[worker], self._began_s[worker] = 0, self.now_s

    def seen(self) -> DeploymentView:
        (view,) = self._states.load(free_devices=0).deployments
        return view

    def live(self, minutes: float, work_per_s, workers=("g-0", "g-1"), restart_every_s: float | None = None):
        """Requests at this rate of work (replica-seconds per second), shared out over the workers."""
        rng, seen = random.Random(3), self.seen()
        due, end_s, restart_s = 0.0, self.now_s + minutes * 60, self.now_s
        while self.now_s < end_s:
            self.now_s += LOOK_S
            due += work_per_s(self.now_s) * LOOK_S * RATE / PROMPT_TOKENS
            if restart_every_s is not None and self.now_s - restart_s >= restart_every_s:
                self.restart(rng.choice(workers))
                restart_s = self.now_s
            came, due = int(due), due % 1
            first = rng.randint(0, came)
            for worker, count in zip(workers, (first, came - first), strict=True):
                self.arrive(worker, count)
            self.standbys.learned((seen,))  # the rows of the store do not change meanwhile, and reading them is slow
        self.now_s += LOOK_S
        return self.seen()


@pytest.fixture
def box(db, events, add_model):
    add_model()
    deployments.update(db, "starter", ttft_p95_s=2.0)
    return Box(db, events)


def flat(t: float) -> float:
    return 0.3


def bursts(t: float) -> float:
    return 8.0 if t % 60 < 2 else 0.1


def test_bursts_raise_standby_and_flat_load_keeps_it_low(box):
    quiet = box.live(2, flat)
    assert quiet.prefill_tokens_per_s == RATE and quiet.standby.replicas <= 2
    assert box.live(10, bursts).standby.replicas >= 4


def test_restarts_of_workers_are_no_bursts(box):
    assert box.live(2, flat, restart_every_s=7.0).standby.replicas <= 2


def test_each_request_is_learned_once_however_many_report_and_ask(box, monkeypatch):
    box.seen()  # as the controller does before any gateway has come
    fed = []
    monkeypatch.setattr(
        "scheduler.autoscale.standby.StandbyLearner.seen",
        lambda self, now_s, seen: fed.append(len(seen.works_s)),
    )
    box.arrive("g-0", 3)
    box.arrive("g-1", 4)
    box.now_s += LOOK_S
    box.seen()
    box.report("g-0")
    box.seen()
    box.now_s += LOOK_S
    box.restart("g-0")
    box.arrive("g-0", 5)
    box.seen()
    assert fed == [7, 5], "and a second look within the same moment learns nothing"


def test_without_a_rate_or_a_target_the_planners_floor_stands(box, db):
    box.rate = None
    unknown = box.live(0.1, bursts)
    assert unknown.standby is None and unknown.prefill_tokens_per_s is None
    box.rate = RATE
    box.now_s += LOOK_S
    box.report("g-0")
    box.report("g-1")
    assert box.seen().standby is not None
    deployments.update(db, "starter", ttft_p95_s=None)
    assert box.seen().standby is None


def test_traffic_before_the_rate_was_known_is_no_burst(box):
    box.rate = None
    box.live(1, lambda t: 3.0)
    box.rate = RATE
    assert box.live(1, flat).standby.replicas <= 2


def test_other_bounds_are_learned_anew(box, db):
    assert box.live(10, bursts).standby.replicas >= 4
    deployments.update(db, "starter", max_replicas=2)
    assert box.seen().standby.replicas <= 2


def test_what_leaves_the_table_is_forgotten(db):
    """Of each name that was ever asked for something stayed."""
    traffic, clock = {"base": Traffic({})}, iter(range(100))
    learning = DemandLearning(lambda model: traffic[model], SchedulerConfig(), 8, lambda: float(next(clock)), db)
    deployment = DeploymentView("base", 1, tensor_parallel=1)
    for number in range(20):
        traffic["base"] = Traffic({"base": Arrived(3), f"ft:base:{number}": Arrived(100)})
        learning.learned((deployment,))
    assert learning._counted.keys() == {"base", "ft:base:19"}
    learning.learned(())
    assert not learning._counted


def test_a_restarted_controller_goes_on_with_what_was_learned(box):
    assert box.live(10, bursts).standby.replicas >= 4
    box.begin()
    box.now_s += 5
    box.report("g-0")
    assert box.seen().standby.replicas >= 4, "what was stored within the last minute"


def test_what_was_learned_with_another_target_or_cannot_be_read_is_learned_anew(box, db, caplog):
    assert box.live(10, bursts).standby.replicas >= 4
    deployments.update(db, "starter", ttft_p95_s=3.0)
    assert box.seen().standby.replicas <= 1
    deployments.update(db, "starter", ttft_p95_s=2.0)
    db.execute("UPDATE standby SET state = '{}'")
    box.begin()
    box.report("g-0")
    assert box.seen().standby.replicas <= 1
    assert "learned again" in caplog.text


def test_what_was_learned_goes_with_the_deployment(box, db):
    box.live(2, flat)
    assert standby.find(db, "starter") is not None
    db.execute("DELETE FROM deployments WHERE model = 'starter'")
    assert standby.find(db, "starter") is None


def test_prompts_that_the_measured_rate_says_are_too_long_count_once_they_are_late(monkeypatch):
    heard: list[Seen] = []

    class Heard(StandbyLearner):
        def seen(self, now_s, seen):
            heard.append(seen)
            return super().seen(now_s, seen)

    monkeypatch.setattr(demand_learning, "StandbyLearner", Heard)
    now_s, late = 0.0, 2 + math.ceil(BUCKETS_PER_DOUBLING * math.log2(2.0 / SHORTEST_S))
    counts = {"requests": 4, "prompt_tokens": 4 * 3000, "prompts": {30: 4}}
    traffic = {"m": Arrived(**counts)}
    learning = DemandLearning(lambda model: Traffic(traffic, RATE, 1), SchedulerConfig(), 8, lambda: now_s)
    demand = Demand(inflight=4, waiting_tokens=3000)
    deployment = DeploymentView("m", "v1", max_replicas=8, ttft_target_s=2.0, demand=demand)
    for first_tokens in ({}, {late: 1}, {late: 6}):
        traffic["m"] = Arrived(**counts, first_tokens=first_tokens)
        learning.learned((deployment,))
        now_s += LOOK_S
    assert [(seen.late, seen.hopeless) for seen in heard] == [(0, 0), (0, 1), (2, 3)], "two more are late than too long"
    assert heard[-1].running == pytest.approx(0.75 * heard[-1].load), "one of the four waits for its prompt"
    now_s += 600.0
    traffic["m"] = Arrived(**counts, first_tokens={late: 7})
    learning.learned((deployment,))
    assert (heard[-1].late, heard[-1].hopeless) == (1, 0), "those too long were answered long ago"
