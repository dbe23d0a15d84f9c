"""Decides how many replicas each model should have, and which model gets the next one when devices are scarce.

Growing is immediate, and never below what was learned of the last half hour (`standby.py`). Shrinking starts when the
devices have idled for longer than a hand-over there and back would cost training (the rent exceeds the price), and no
sooner than `give_back_after_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from scheduler.autoscale.idle import IdlePolicy
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import DeploymentView, Hysteresis, ReplicaView, Standby


@dataclass(frozen=True, slots=True)
class Slot:
    """A request for one awake replica: the `nth` (from 0) of its model."""

    model: str
    nth: int
    tensor_parallel: int
    wanted: bool
    """False: no demand needs it; it fills devices that belong to serving anyway."""


def usable(deployment: DeploymentView, now_s: float) -> bool:
    """Whether new replicas may be started for it. Open ones stay open during its backoff."""
    return deployment.not_before_s <= now_s and deployment.max_replicas > 0


def by_concurrency(deployment: DeploymentView, config: SchedulerConfig) -> int:
    """Replicas needed for the number of requests in flight and held.

    While the measured time per further token is above its target, each replica counts as carrying proportionally fewer
    requests, since the time of a decoding step grows with its batch. One evaluation at most doubles the count.
    """
    return ceil(load(deployment, config))


def load(deployment: DeploymentView, config: SchedulerConfig) -> float:
    """Replicas that the requests in flight and held fill: by their number, or by what is in caches if that fills more.
    Where prompts differ in size, ten long ones fill a cache that holds a hundred in the mean."""
    return max(deployment.demand.requests / _carried(deployment, config), _caches(deployment))


def running(deployment: DeploymentView, part: float, config: SchedulerConfig) -> float:
    """The same of the requests that have a first token. part: their share of the requests in flight and held."""
    return max(part * deployment.demand.requests / _carried(deployment, config), _caches(deployment))


def _caches(deployment: DeploymentView) -> float:
    """Caches that the prompts of requests with a first token fill. Those that wait are a backlog of prompts already."""
    tokens = deployment.demand.prompt_tokens - deployment.demand.waiting_tokens
    return max(tokens, 0) / deployment.kv_tokens if deployment.kv_tokens else 0.0


def _carried(deployment: DeploymentView, config: SchedulerConfig) -> float:
    target = float(deployment.target_inflight or config.target_inflight)
    measured_s, wanted_s = deployment.demand.tpot_p95_s, deployment.tpot_target_s
    if measured_s and wanted_s and measured_s > wanted_s:
        target *= max(wanted_s / measured_s, 0.5)
    return target


def wanted_now(deployment: DeploymentView, now_s: float, config: SchedulerConfig) -> int:
    """Replicas that the present demand needs, without memory of earlier demand."""
    demand = deployment.demand
    count = by_concurrency(deployment, config)
    if deployment.standby is not None:
        count = deployment.standby.asked_by_load(load(deployment, config))
    if deployment.prefill_tokens_per_s and deployment.ttft_target_s and demand.waiting_tokens:
        # Part of the target: the rest covers requests that arrive while a replica wakes.
        backlog_s = demand.waiting_tokens / deployment.prefill_tokens_per_s
        standby = deployment.standby or Standby(deployment.max_replicas)
        count = max(count, standby.asked_by_backlog(backlog_s, deployment.ttft_target_s))
    one_until_s = IdlePolicy(config).one_until_s(deployment)
    if one_until_s is not None and now_s < one_until_s:
        count = max(count, 1)  # short requests come and go between two evaluations
    return min(max(count, deployment.floor_replicas), deployment.max_replicas)


def required(
    deployment: DeploymentView,
    hysteresis: Hysteresis,
    now_s: float,
    config: SchedulerConfig,
    *,
    switch_device_s: float = 0.0,
) -> tuple[Hysteresis, list[float | None]]:
    """The replicas this model should have now (in the returned hysteresis), and times at which to re-evaluate without
    an event.

    switch_device_s: device seconds of training that releasing devices and taking them again would cost.
    """
    want = wanted_now(deployment, now_s, config)
    idle = IdlePolicy(config)
    reviews = [idle.one_until_s(deployment), end_s := idle.floor_until_s(deployment)]
    if deployment.standby is not None and end_s is not None and end_s > now_s:
        want = max(want, min(deployment.standby.replicas, deployment.max_replicas))
    if want >= hysteresis.replicas:
        return replace(hysteresis, replicas=want, low_since_s=None, low_peak=0), reviews
    since_s = now_s if hysteresis.low_since_s is None else hysteresis.low_since_s
    # When an operator's idle time runs out, all replicas sleep, whatever demand came before.
    peak = want if idle.operator_says_sleep(deployment, now_s) else max(hysteresis.low_peak, want)
    # Rent or buy: idle devices justify a hand-over once they have idled for as long as it costs.
    spare_devices = (hysteresis.replicas - peak) * deployment.tensor_parallel
    pays_after_s = switch_device_s / spare_devices if spare_devices else 0.0
    due_s = since_s + idle.give_back_after_s(deployment, pays_after_s, now_s)
    if due_s > now_s:
        return replace(hysteresis, low_since_s=since_s, low_peak=peak), [*reviews, due_s]
    # To the highest count needed since then, not the current one.
    if peak == want:
        return replace(hysteresis, replicas=peak, low_since_s=None, low_peak=want), reviews
    found = replace(hysteresis, replicas=peak, low_since_s=now_s, low_peak=want)
    return found, [*reviews, now_s + idle.lower_for_s(deployment)]


def slots(
    deployments: Sequence[DeploymentView],
    replicas: Iterable[ReplicaView],
    hysteresis: Mapping[str, Hysteresis],
    now_s: float,
    config: SchedulerConfig,
) -> list[Slot]:
    """Every requested replica, most urgent first: the first of each asked model before the second of any. Versions that
    are asked by names of their own are further ones of their model, and share its turn: it had as many turns as names.

    Among first replicas: pinned; models whose turn it is; models that waited longer than a turn (longest first); models
    whose turn is over; models that began to wait; models that want only their minimum. Among later ones: pinned, then
    by name. Replicas that no demand needs come last.
    """
    open_since: dict[str, float] = {}
    opened: dict[str, int] = {}
    for replica in replicas:
        if replica.state == "open" or (replica.busy == "coming"):
            opened[replica.model] = opened.get(replica.model, 0) + 1
            open_since[replica.model] = min(replica.since_s, open_since.get(replica.model, replica.since_s))

    families = {d.family for d in deployments if d.model in open_since}

    def first_rank(d: DeploymentView) -> tuple[int, float, str]:
        asked = d.demand.requests > 0
        waiting_s = hysteresis[d.model].waiting_since_s
        if d.pinned:
            return 0, 0.0, d.model
        if not asked:
            return (5, 0.0, d.model) if d.model in open_since else (6, 0.0, d.model)
        if d.model in open_since:
            return (1 if now_s - open_since[d.model] < config.turn_s else 3), open_since[d.model], d.model
        if waiting_s is not None and now_s - waiting_s >= config.turn_s:
            # Its model has had its turn where another version of it is open. Negative, so before the open one; the
            # version that has waited longest comes first.
            return (3, waiting_s - now_s, d.model) if d.family in families else (2, waiting_s, d.model)
        return 4, now_s if waiting_s is None else waiting_s, d.model

    def later_rank(d: DeploymentView) -> tuple[bool, str]:
        # Use neither turns nor requests here: a model that has a replica does not wait, and an order that changes with
        # time moved the second replicas of three models back and forth forever.
        return not d.pinned, d.model

    most = {d.model: d.max_replicas if usable(d, now_s) else opened.get(d.model, 0) for d in deployments}
    able = _models_first(sorted((d for d in deployments if most[d.model]), key=first_rank), now_s - config.turn_s)
    out: list[Slot] = []
    for nth in range(max(most.values(), default=0)):
        if nth == 1:
            able.sort(key=later_rank)
        # A model without demand gets no replica; one with demand may fill devices that belong to serving anyway.
        round_ = [d for d in able if nth < most[d.model] and hysteresis[d.model].replicas > 0]
        if not round_:
            break
        out += [Slot(d.model, nth, d.tensor_parallel, nth < hysteresis[d.model].replicas) for d in round_]
    out.sort(key=lambda slot: not slot.wanted)  # a needed third replica comes before a second that only fills
    return out


def _models_first(ranked: Sequence[DeploymentView], since_s: float) -> list[DeploymentView]:
    """The first of each model's versions, then their others; all of them before models that nobody has asked since."""
    first = {deployment.family: deployment for deployment in reversed(ranked)}

    def asked(d: DeploymentView) -> bool:
        # A moment's pause is no end: each short request to a model beside two asked versions cost two hand-overs.
        return d.pinned or d.demand.requests > 0 or (d.demand.last_request_s or 0.0) > since_s

    # A request for a model's second version waited for ever behind another model's minimum that nobody asked for.
    return sorted(ranked, key=lambda d: (not asked(d), first[d.family] is not d))
