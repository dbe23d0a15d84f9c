"""Simulates real traces with simulated engines and jobs, and the same scheduler that runs the box.

`run_policy` runs one policy in virtual time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from benchmarks.simulator import virtual_time
from benchmarks.simulator.cluster import Cluster
from benchmarks.simulator.effects import MODEL, SimEffects, SimModel, SimStore, VerbTimes, elastic_job
from benchmarks.simulator.engine import EngineModel
from benchmarks.simulator.gateway import Gateway, Reports
from benchmarks.simulator.journal import MemoryJournal
from benchmarks.simulator.trace import Requests
from runtime.devices.kinds import hardware_first
from scheduler.autoscale.standby import StandbyLearner
from scheduler.core.config import SchedulerConfig
from scheduler.core.inventory import Device
from scheduler.core.workload import DeploymentView, Policy
from scheduler.loop.loop import SchedulerLoop

UP_S = 16.0
"""The box runs this long before the first request, with the elastic job running and engines open, because a trace does
not start when a box first boots. Times inside a run are later than those of the trace by this much."""


_LOOK_EVERY_S = 3600.0
"""How often a loop observes a simulated world that only the loop's own verbs change."""


@dataclass(frozen=True)
class Setup:
    """The simulation's inputs. A request meets its targets if its first token comes within `slo_ttft_s` and its further
    tokens take at most `slo_tpot_s` each on average. also: the requests of further models on the same devices, by name;
    each engine serves one model."""

    requests: Requests
    also: dict[str, Requests] = field(default_factory=dict)
    nodes: int = 1
    gpus_per_node: int = 8
    slo_ttft_s: float = 2.0
    slo_tpot_s: float = 0.1
    hold_s: float = 600.0
    min_replicas: int = 0
    engine: EngineModel = field(default_factory=EngineModel)
    times: VerbTimes = field(default_factory=VerbTimes)
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    seed: int = 0

    @property
    def devices(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def horizon_s(self) -> float:
        """From the first arrival to the last, of any model."""
        return max(requests.horizon_s for requests in self.named().values())

    def named(self) -> dict[str, Requests]:
        """Each model's requests, the first one's first."""
        return {MODEL: self.requests, **self.also}

    def inventory(self) -> tuple[Device, ...]:
        per = self.gpus_per_node
        return tuple(
            Device(
                f"n{n}/{i}",
                f"n{n}",
                i,
                hardware_first()[0].name,
                "H100",
                80 * 2**30,
                numa_node=2 * i // per,
                linked=frozenset(f"n{n}/{k}" for k in range(per) if k != i),
            )
            for n in range(self.nodes)
            for i in range(per)
        )

    def deployment(self, name: str = MODEL) -> DeploymentView:
        requests = self.named()[name]
        count = len(requests)
        prompt, output = sum(requests.prompt) / count, sum(requests.output) / count
        target = self.engine.target_inflight(tpot_s=self.slo_tpot_s, prompt=prompt, output=output)
        chunk = self.engine.chunk_tokens
        return DeploymentView(
            name,
            "v1",
            min_replicas=self.min_replicas,
            max_replicas=self.devices,
            target_inflight=target,
            kv_tokens=self.engine.kv_tokens,
            prefill_tokens_per_s=chunk / self.engine.step_s(target // 2, target * prompt / 2, chunk),
            ttft_target_s=self.slo_ttft_s,
            tpot_target_s=self.slo_tpot_s,
        )

    def learner(self) -> StandbyLearner:
        return StandbyLearner(
            self.config, self.devices, least=self.min_replicas, most=self.devices, target_s=self.slo_ttft_s
        )


@dataclass(frozen=True)
class Figures:
    """The result of one policy."""

    requests_served: int
    training_gpu_hours: float
    handovers: int
    trained: list[tuple[float, float, int]] = field(default_factory=list, compare=False)
    """From, until, on how many devices."""
    within: dict[str, bytearray] = field(default_factory=dict, compare=False)
    """For each model a 1 or 0 for each request in the order of arrival: 1 if it met its targets."""

    @property
    def slo_attainment(self) -> float:
        return sum(map(sum, self.within.values())) / sum(map(len, self.within.values()))

    def trained_device_s(self, from_s: float, until_s: float) -> float:
        """Device seconds of training between these times of the trace."""
        return sum(max(min(to_s, until_s) - max(at_s, from_s), 0.0) * devices for at_s, to_s, devices in self.trained)


def run_policy(setup: Setup, policy: Policy) -> Figures:
    """Run one policy over the whole trace, and on until every request is answered or abandoned."""
    auto = policy.kind == "auto"
    models: dict[str, SimModel] = {}
    for n, (name, requests) in enumerate(setup.named().items()):
        cluster = Cluster(requests.later(UP_S), setup.engine, hold_s=setup.hold_s, seed=setup.seed + n)
        models[name] = SimModel(cluster, setup.deployment(name))
    until_s = UP_S + setup.horizon_s
    jobs = [elastic_job(setup.devices)]
    store = SimStore(models, policy, jobs)
    store.warm_until_s = UP_S
    effects = SimEffects(models, setup.inventory(), store.jobs, setup.times)
    effects.counted_s = (UP_S, until_s)
    journal = MemoryJournal()
    reports = [Reports(model, setup.config, setup.learner() if auto else None) for model in models.values()]
    # One model alone has what a fixed split leaves to serving, whatever its demand; several share it.
    listens = auto or len(models) > 1
    gateway = Gateway(reports, setup.config, listens)
    handovers_before = 0
    # If nobody listens to the demand, only job submissions and ends happen, and the loop is notified of those.
    config = setup.config if listens else setup.config.model_copy(update={"observe_every_s": _LOOK_EVERY_S})

    async def life() -> None:
        nonlocal handovers_before
        clock = virtual_time.now_s
        loop = SchedulerLoop(effects, store, journal, clock=clock, config=config)
        running = asyncio.create_task(loop.run())
        while (left_s := UP_S - clock()) > 0:
            await asyncio.sleep(max(left_s, virtual_time.RESOLUTION_S))
        handovers_before = journal.last_id()
        watching = asyncio.create_task(
            gateway.run(loop, until_s, sorted(j.view.submitted_s for j in store.jobs.values()))
        )
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        effects.close_books()
        loop.stop()
        if watching.done():
            watching.result()  # raises what the policy raised
        watching.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)
        running.result()

    virtual_time.run(life())
    ended, within = 0, {}
    for name, model in models.items():
        requests, served = model.cluster.requests, model.cluster.served
        good = within[name] = bytearray(len(requests))
        for n, arrival_s in enumerate(requests.arrival_s):
            first_s, end_s = served.first_token_s[n], served.end_s[n]
            if end_s >= 0:
                ended += 1
                tpot_s = (end_s - first_s) / max(requests.output[n] - 1, 1)
                good[n] = first_s - arrival_s <= setup.slo_ttft_s and tpot_s <= setup.slo_tpot_s
    trained = [(from_s - UP_S, to_s - UP_S, devices) for from_s, to_s, devices in effects.trained]
    hours = effects.training_device_s / 3600
    return Figures(ended, hours, journal.last_id() - handovers_before, trained, within)
