"""Decides how many replicas each model should have, and which model gets the next one when devices are scarce.

Growing is immediate, and never below what was learned of the last half hour (`standby.py`). Shrinking starts when the
devices have idled for longer than a hand-over there and back would cost training (the rent exceeds the price), and no
sooner than `give_back_after_s`. An operator's number (`idle_sleep_s`) applies as given: one replica stays awake for
that long after the last request, then all sleep except the minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import DeploymentView, Hysteresis, ReplicaView, Standby


class Slot(NamedTuple):
    """A request for one awake replica: the `nth` (from 0) of its model. wanted: False where no demand needs it, and it
    fills devices that belong to serving anyway."""

    model: str
    nth: int
    wanted: bool


def usable(deployment: DeploymentView, now_s: float) -> bool:
    """Whether new replicas may be started for it. Open ones stay open during its backoff."""
    return deployment.not_before_s <= now_s and deployment.max_replicas > 0


def load(deployment: DeploymentView, config: SchedulerConfig) -> float:
    """Replicas that the requests in flight and held fill: by their number, or by the prompts in caches if those fill
    more, as where prompts differ in size. Prompts that wait are a backlog already.

    While the measured time per further token is above its target, each replica counts as carrying proportionally fewer
    requests, since the time of a decoding step grows with its batch. One evaluation at most doubles the count.
    """
    demand, carried = deployment.demand, float(deployment.target_inflight or config.target_inflight)
    measured_s, wanted_s = demand.tpot_p95_s, deployment.tpot_target_s
    if measured_s and wanted_s and measured_s > wanted_s:
        carried *= max(wanted_s / measured_s, 0.5)
    cached = max(demand.prompt_tokens - demand.waiting_tokens, 0) / deployment.kv_tokens if deployment.kv_tokens else 0
    return max(demand.requests / carried, cached)


def wanted_now(deployment: DeploymentView, now_s: float, config: SchedulerConfig) -> int:
    """Replicas that the present demand needs, without memory of earlier demand."""
    demand, filled = deployment.demand, load(deployment, config)
    count = ceil(filled) if deployment.standby is None else deployment.standby.asked_by_load(filled)
    if deployment.prefill_tokens_per_s and deployment.ttft_target_s and demand.waiting_tokens:
        # Part of the target: the rest covers requests that arrive while a replica wakes.
        backlog_s = demand.waiting_tokens / deployment.prefill_tokens_per_s
        standby = deployment.standby or Standby(deployment.max_replicas)
        count = max(count, standby.asked_by_backlog(backlog_s, deployment.ttft_target_s))
    if now_s < _one_until_s(deployment, config):
        count = max(count, 1)  # short requests come and go between two evaluations
    return min(max(count, deployment.floor_replicas), deployment.max_replicas)


def _one_until_s(deployment: DeploymentView, config: SchedulerConfig) -> float:
    """Until when the last request alone keeps one replica."""
    own_s = deployment.idle_sleep_s
    return deployment.last_s + (min(deployment.idle_after_s, config.give_back_after_s) if own_s is None else own_s)


def follow(
    hysteresis: Hysteresis, want: int, now_s: float, rest_s: Callable[[int], float]
) -> tuple[Hysteresis, float | None]:
    """Grow to `want` at once; shrink to the highest count wanted since fewer would do, once the spare replicas have
    idled for `rest_s` of their number. Also returns when that will be, if nothing changes before."""
    if want >= hysteresis.replicas:
        return replace(hysteresis, replicas=want, low_since_s=None, low_peak=0), None
    since_s = now_s if hysteresis.low_since_s is None else hysteresis.low_since_s
    peak = max(hysteresis.low_peak, want)
    due_s = since_s + rest_s(hysteresis.replicas - peak)
    if due_s > now_s:
        return replace(hysteresis, low_since_s=since_s, low_peak=peak), due_s
    if peak == want:
        return replace(hysteresis, replicas=peak, low_since_s=None, low_peak=0), None
    return replace(hysteresis, replicas=peak, low_since_s=now_s, low_peak=want), now_s + rest_s(peak - want)


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
    if deployment.idle_sleep_s is not None and deployment.asleep(now_s):
        # An operator's number: neither earlier demand nor the cost of a hand-over delays it.
        return replace(hysteresis, replicas=want, low_since_s=None, low_peak=0), []
    standby_until_s = deployment.last_s + min(deployment.idle_after_s, config.give_back_at_latest_s)
    if deployment.standby is not None and now_s < standby_until_s:
        want = max(want, min(deployment.standby.replicas, deployment.max_replicas))

    def rest_s(spare: int) -> float:
        # Rent or buy: idle devices justify a hand-over once they have idled for as long as it costs.
        pays_after_s = switch_device_s / (spare * deployment.tensor_parallel)
        least_s = min(deployment.idle_after_s, config.give_back_after_s)
        return max(least_s, min(pays_after_s, config.give_back_at_latest_s))

    hysteresis, due_s = follow(hysteresis, want, now_s, rest_s)
    return hysteresis, [_one_until_s(deployment, config), standby_until_s, due_s]


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
        out += [Slot(d.model, nth, nth < hysteresis[d.model].replicas) for d in round_]
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
