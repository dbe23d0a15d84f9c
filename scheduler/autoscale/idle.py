"""Decides how long a model without requests stays awake; the only place that does.

An operator's number (`idle_sleep_s`) applies as given: one replica stays awake for that long after the last request,
then all sleep except the minimum. Without it, the box's settings hold a replica for as long as the hysteresis of `auto`
needs (`give_back_after_s`), and it sleeps only when the devices are wanted. Models that nobody deployed have the box's
own limit (`idle_limit_s`): they sleep then at the latest, and may release their devices earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import DeploymentView


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """How long idle models and replicas stay awake. Times are seconds of the planner's clock."""

    config: SchedulerConfig

    def one_until_s(self, deployment: DeploymentView) -> float | None:
        """Until when the last request alone keeps one replica; None: there was none."""
        own_s = deployment.idle_sleep_s
        return _after(deployment, self.lower_for_s(deployment) if own_s is None else own_s)

    def lower_for_s(self, deployment: DeploymentView) -> float:
        """Minimum time that demand must stay lower before a replica is given back. A model's own number does not extend
        it: that number concerns whether one is awake, not how many."""
        return min(_sleep_after_s(deployment), self.config.give_back_after_s)

    def give_back_after_s(self, deployment: DeploymentView, switch_s: float, now_s: float) -> float:
        """How long demand must stay lower if a hand-over there and back costs as much as idling for `switch_s`."""
        if self.operator_says_sleep(deployment, now_s):
            return 0.0
        return max(self.lower_for_s(deployment), min(switch_s, self.config.give_back_at_latest_s))

    def floor_until_s(self, deployment: DeploymentView) -> float | None:
        """Until when a model keeps the standby learned from its traffic; None: it never had a request."""
        return _after(deployment, min(_sleep_after_s(deployment), self.config.give_back_at_latest_s))

    def sleep_at_s(self, deployment: DeploymentView) -> float | None:
        """When the replicas sleep even if nobody wants their devices; None: never for that reason."""
        after_s = _sleep_after_s(deployment)
        return None if after_s == inf else _after(deployment, after_s)

    def asleep(self, deployment: DeploymentView, now_s: float) -> bool:
        """Whether that time has come."""
        at_s = self.sleep_at_s(deployment)
        return at_s is not None and not deployment.demand.requests and now_s >= at_s

    def operator_says_sleep(self, deployment: DeploymentView, now_s: float) -> bool:
        """The same, by the operator's number: no hand-over cost delays it."""
        return deployment.idle_sleep_s is not None and self.asleep(deployment, now_s)

    def awake(self, deployment: DeploymentView) -> tuple[float | None, str]:
        """Until when a model without requests stays awake (None: no time limit ends it), and why, without a full stop.
        The mode's share for serving takes precedence."""
        if least := deployment.floor_replicas:
            return None, f"at least {least} {'is' if least == 1 else 'are'} kept awake (pinned or min_replicas)"
        own_s, limit_s = deployment.idle_sleep_s, deployment.idle_limit_s
        if own_s is not None:
            return self.sleep_at_s(deployment), f"its idle_sleep_s is {own_s:g} s"
        kept = "it has no idle_sleep_s" if limit_s is None else "nobody deployed it"
        lower_s = self.lower_for_s(deployment)
        return self.sleep_at_s(deployment), (
            f"{kept}; if others want them, its devices may be given back after {lower_s:g} s of lower demand"
        )


def _sleep_after_s(deployment: DeploymentView) -> float:
    own_s, limit_s = deployment.idle_sleep_s, deployment.idle_limit_s
    return own_s if own_s is not None else inf if limit_s is None else limit_s


def _after(deployment: DeploymentView, seconds: float) -> float | None:
    last_s = deployment.demand.last_request_s
    return None if last_s is None else last_s + seconds
