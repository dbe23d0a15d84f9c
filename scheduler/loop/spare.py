"""Says whether users would lose something if the box had to do without a device for a while. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from scheduler.core.allocation import Allocation
from scheduler.core.workload import DeploymentView, PlanInput


@dataclass(frozen=True, slots=True)
class Spare:
    """costs: what somebody would lose, without a full stop; "" if nobody would. asleep: models that would have fewer
    awake engines meanwhile, by how many they have now."""

    costs: str
    asleep: dict[str, int] = field(default_factory=dict)


def spare(
    now: Allocation, then: Allocation, plan_input: PlanInput, now_s: float, idle_for_s: float | None = None
) -> Spare:
    """now, then: the plans with the device and without. A job on fewer devices goes on, and costs nobody.

    idle_for_s: None keeps every awake engine. With a number of seconds, engines may sleep that no demand needs now, but
    the last one of a model only if nobody asked for it for so long.
    """
    deployments = {deployment.model: deployment for deployment in plan_input.deployments}
    awake, left = _awake(now), _awake(then)
    fewer = {model: count for model, count in sorted(awake.items()) if left[model] < count}
    for model, count in fewer.items():
        needed = count if idle_for_s is None else min(now.hysteresis[model].replicas, count)
        idle = left[model] > 0 or idle_for_s is None or _idle_s(deployments[model], now_s) >= idle_for_s
        if left[model] < needed or not idle:
            return Spare(f"{model} would have {left[model]} awake engine{'s' * (left[model] != 1)} instead of {count}")
    running = {group.job_id for group in then.groups}
    for group in now.groups:
        if group.job_id not in running:
            return Spare(f"job {group.job_id} would have to wait")
    return Spare("", fewer)


def _awake(allocation: Allocation) -> Counter[str]:
    return Counter(replica.model for replica in allocation.open_replicas)


def _idle_s(deployment: DeploymentView, now_s: float) -> float:
    last_s = deployment.demand.last_request_s
    return 0.0 if deployment.demand.requests else inf if last_s is None else now_s - last_s
