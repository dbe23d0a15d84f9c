"""`run_policy` simulates one policy in virtual time: requests to one model, one job, and the real scheduler."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from benchmarks.simulator import virtual_time
from benchmarks.simulator.cluster import Cluster
from benchmarks.simulator.effects import MODEL, SimEffects, SimStore, VerbTimes
from benchmarks.simulator.engine import EngineModel
from benchmarks.simulator.gateway import Gateway
from benchmarks.simulator.journal import MemoryJournal
from benchmarks.simulator.trace import Requests
from runtime.devices.kinds import KINDS
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import DeploymentView, Device, Policy
from scheduler.loop.loop import SchedulerLoop
from scheduler.plan.autoscaler import Bounds, StandbyLearner

UP_S = 16.0
"""The box runs this long before the first request, with the job running and engines open, because a trace does not
start when a box first boots. Times in a run are the times of the trace plus this."""
_LOOK_EVERY_S = 3600.0
"""Interval of observations: long, because only the loop's own verbs change the simulated world."""


@dataclass(frozen=True)
class Setup:
    """The simulation's inputs. A request meets its targets if its first token comes within `slo_ttft_s` and its further
    tokens take at most `slo_tpot_s` each on average."""

    requests: Requests
    devices: int = 8
    slo_ttft_s: float = 2.0
    slo_tpot_s: float = 0.1
    engine: EngineModel = field(default_factory=EngineModel)
    times: VerbTimes = field(default_factory=VerbTimes)
    config: SchedulerConfig = field(default_factory=SchedulerConfig)

    def inventory(self) -> tuple[Device, ...]:
        kind, names = next(iter(KINDS)), [f"n0/{n}" for n in range(self.devices)]
        return tuple(
            Device(
                name,
                "n0",
                index,
                kind,
                "H100",
                80 * 2**30,
                numa_node=2 * index // self.devices,
                linked=frozenset(names) - {name},
            )
            for index, name in enumerate(names)
        )

    def deployment(self) -> DeploymentView:
        count = len(self.requests)
        prompt, output = sum(self.requests.prompt) / count, sum(self.requests.output) / count
        target = self.engine.target_inflight(tpot_s=self.slo_tpot_s, prompt=prompt, output=output)
        chunk = self.engine.chunk_tokens
        return DeploymentView(
            MODEL,
            "v1",
            max_replicas=self.devices,
            target_inflight=target,
            kv_tokens=self.engine.kv_tokens,
            prefill_tokens_per_s=chunk / self.engine.step_s(target // 2, target * prompt / 2, chunk),
            ttft_target_s=self.slo_ttft_s,
            tpot_target_s=self.slo_tpot_s,
        )

    def meets_targets(self, cluster: Cluster) -> bytearray:
        """Return 1 (met its targets) or 0 for each request, in order of arrival."""
        requests, served, good = cluster.requests, cluster.served, bytearray(len(cluster.requests))
        for n, arrival_s in enumerate(requests.arrival_s):
            first_s, end_s = served.first_token_s[n], served.end_s[n]
            if end_s >= 0:
                tpot_s = (end_s - first_s) / max(requests.output[n] - 1, 1)
                good[n] = first_s - arrival_s <= self.slo_ttft_s and tpot_s <= self.slo_tpot_s
        return good


@dataclass(frozen=True)
class Figures:
    """The result of one policy. trained: (from, until, number of devices). within: for each request, in order of
    arrival, 1 if it met its targets, else 0."""

    requests_served: int
    handovers: int
    trained: list[tuple[float, float, int]]
    within: bytearray
    horizon_s: float

    @property
    def training_gpu_hours(self) -> float:
        return self.trained_device_s(0.0, self.horizon_s) / 3600

    @property
    def slo_attainment(self) -> float:
        return sum(self.within) / len(self.within)

    def trained_device_s(self, from_s: float, until_s: float) -> float:
        """Return the device seconds of training between these times of the trace."""
        return sum(max(min(to_s, until_s) - max(at_s, from_s), 0.0) * devices for at_s, to_s, devices in self.trained)


def run_policy(setup: Setup, policy: Policy) -> Figures:
    """Run one policy over the whole trace, until every request is answered or abandoned."""
    cluster, config = Cluster(setup.requests.later(UP_S), setup.engine), setup.config
    store = SimStore(cluster, setup.deployment(), policy, setup.devices, warm_until_s=UP_S)
    effects = SimEffects(cluster, setup.inventory(), setup.times)
    journal, learner = MemoryJournal(), None
    if policy.kind == "auto":
        learner = StandbyLearner(config, Bounds(setup.devices, 0, setup.devices, setup.slo_ttft_s))
    else:  # a fixed split ignores the demand
        config = config.model_copy(update={"observe_every_s": _LOOK_EVERY_S})
    gateway, handovers_before = Gateway(store, setup.config, learner), 0

    async def life() -> None:
        nonlocal handovers_before
        clock = virtual_time.now_s
        loop = SchedulerLoop(effects, store, journal, clock=clock, config=config)
        running = asyncio.create_task(loop.run())
        while (left_s := UP_S - clock()) > 0:
            await asyncio.sleep(max(left_s, virtual_time.RESOLUTION_S))
        handovers_before = journal.last_id()
        watching = asyncio.create_task(gateway.run(loop, UP_S + setup.requests.horizon_s))
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        effects.close_books()
        loop.stop()
        if watching.done():
            watching.result()  # raises what the policy raised
        watching.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)
        running.result()

    virtual_time.run(life())
    return Figures(
        sum(end_s >= 0 for end_s in cluster.served.end_s),
        journal.last_id() - handovers_before,
        [(from_s - UP_S, to_s - UP_S, devices) for from_s, to_s, devices in effects.trained],
        setup.meets_targets(cluster),
        setup.requests.horizon_s,
    )
