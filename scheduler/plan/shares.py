"""Computes how many devices each model and each job gets, from policy, demand and queue; not which ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import inf

from scheduler.autoscale import demand as demand_
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import DeploymentView, Hysteresis, JobView, PlanInput, Policy
from scheduler.plan import queue

_STARVED = "Its devices are lent to the engine that writes the answers it learns from."


class Shares:
    """The device counts of one planning round.

    hysteresis: every model's, updated to now. notes: model to why it gets fewer replicas than needed. reviews: times at
    which a number may change without an event.
    """

    def __init__(self, plan_input: PlanInput, now_s: float, config: SchedulerConfig):
        self._plan_input, self._now_s, self._config = plan_input, now_s, config
        self._policy: Policy = plan_input.policy
        self._jobs: dict[str, JobView] = {j.id: j for j in plan_input.jobs}
        self._works_on = Counter(d.node for d in plan_input.devices if d.usable)
        self._total = sum(self._works_on.values())
        self.deployments: dict[str, DeploymentView] = {d.model: d for d in plan_input.deployments}
        self.reviews: list[float | None] = []
        self.notes: dict[str, str] = {}
        self.hysteresis: dict[str, Hysteresis] = {}
        self._remember()

    def count(
        self, limits: Mapping[str, int], side_by_side: Mapping[str, int]
    ) -> tuple[dict[str, int], dict[str, int], queue.Queue]:
        """(replicas per model that serving is entitled to, those plus lent ones, devices per job).

        limits: replicas per model for which there are devices side by side, if known. side_by_side:
        devices by job, for jobs that can get no more on one node.
        """
        claimed = self._replicas(self._serving_capacity(), limits, eager=self._policy.kind in ("serve", "split"))
        budget, why = self._training_budget(claimed)
        # A manual change of mode takes effect at once; only `auto`, which changes by itself, dwells.
        dwell_s = self._config.job_dwell_s if self._policy.kind == "auto" else 0.0
        waiting = self._plan_input.jobs

        def serving_beside(budget: int) -> tuple[dict[str, int], queue.Queue]:
            given = queue.allot(waiting, budget, self._now_s, dwell_s, why, self._works_on, side_by_side)
            lendable = self._total - sum(given.sizes.values())
            return self._replicas(lendable, limits, eager=False, base=claimed), given

        serving, jobs = serving_beside(budget)
        for job in self._without_engine(serving, jobs):
            left = sum(jobs.sizes.values()) - self.deployments[job.sampled_by].tensor_parallel
            fewer, smaller = serving_beside(left)
            if job.id in smaller.sizes and fewer.get(job.sampled_by):
                serving, jobs, budget = fewer, smaller, left
            elif job.starved:  # by turns: it comes back when its samples are there
                waiting = tuple(replace(one, lacks=_STARVED) if one is job else one for one in waiting)
                serving, jobs = serving_beside(budget)
        return claimed, serving, jobs

    def _without_engine(self, serving: Mapping[str, int], jobs: queue.Queue) -> list[JobView]:
        """Jobs that get devices while the engine that is wanted for their samples gets none."""
        return [
            job
            for job in self._plan_input.jobs
            if job.id in jobs.sizes and not serving.get(job.sampled_by) and job.busy is None
            if job.sampled_by in self.deployments and self.hysteresis[job.sampled_by].replicas
        ]

    def note_no_room(self, models: Collection[str]) -> None:
        """Note that these models got fewer devices than their planned replicas need."""
        for model in models:
            width = self.deployments[model].tensor_parallel
            self.notes[model] = f"No node has {width} free devices side by side for another replica."

    def _remember(self) -> None:
        """Update every model's hysteresis to now."""
        is_open = {r.model for r in self._plan_input.replicas if r.state == "open" or r.busy == "coming"}
        # Devices come from running jobs, and a transfer stops all ranks of both jobs involved.
        stops_s = (
            len(j.devices) * (self._config.job_pause_s if j.pause_s is None else j.pause_s)
            for j in self._jobs.values()
            if j.interruptible
        )
        switch_device_s = 2 * max(stops_s, default=0.0) if self._policy.kind == "auto" else 0.0
        for model, deployment in self.deployments.items():
            hysteresis, reviews = demand_.required(
                deployment,
                self._plan_input.hysteresis.get(model, Hysteresis()),
                self._now_s,
                self._config,
                switch_device_s=switch_device_s,
            )
            waits = deployment.demand.requests > 0 and model not in is_open
            since_s = (hysteresis.waiting_since_s or self._now_s) if waits else None
            if since_s != hysteresis.waiting_since_s:
                hysteresis = replace(hysteresis, waiting_since_s=since_s)
            self.hysteresis[model] = hysteresis
            if deployment.idle_after_s < inf:
                reviews.append(deployment.last_s + deployment.idle_after_s)
            self.reviews += [*reviews, deployment.not_before_s]

    def _serving_capacity(self) -> int:
        """Devices that serving may claim before training gets any."""
        total = self._total
        if self._policy.kind == "split":
            return max(total - (self._policy.train_devices or 0), min(self._policy.serving_floor, total))
        if self._policy.kind == "train":
            pinned = sum(d.floor_replicas * d.tensor_parallel for d in self.deployments.values() if d.pinned)
            return min(max(self._policy.serving_floor, pinned), total)
        return total

    def _training_budget(self, replicas: Mapping[str, int]) -> tuple[int, str]:
        total, policy, claimed = self._total, self._policy, self._cost(replicas)
        floor = min(policy.serving_floor, total)
        if policy.kind == "serve":
            return 0, "mode serve gives training no devices"
        if policy.kind == "split":
            share = policy.train_devices or 0
            given = min(share, total - floor)
            why = f", because the serving floor keeps {floor} of {total} devices" if given < share else ""
            return given, f"mode split gives training {given}{why}"
        if policy.kind == "train":
            kept = self._serving_capacity()
            return total - kept, f"mode train keeps {kept} of {total} devices for serving"
        if floor > claimed:
            return total - floor, f"the serving floor keeps {floor} of {total} devices"
        return total - claimed, f"serving needs {claimed} of {total} devices now{self._of_idle(replicas)}"

    def _of_idle(self, replicas: Mapping[str, int]) -> str:
        """What of that nobody asks now. It names no model, because the owner of a job reads it."""
        idle = (self.deployments[model] for model in replicas)
        kept = sum(
            replicas[d.model] * d.tensor_parallel for d in idle if not d.demand.requests and not d.floor_replicas
        )
        if not kept:
            return ""
        least_s, most_s = self._config.give_back_after_s, self._config.give_back_at_latest_s
        return (
            f", {kept} of them for models that were asked a moment ago, which give theirs back {least_s:g} to "
            f"{most_s:g} s after their last request"
        )

    def _stuck(self) -> int:
        """Devices of jobs that keep theirs whatever is planned."""
        return sum(len(j.devices) for j in self._jobs.values() if j.keeps_devices(self._now_s))

    def _replicas(
        self, capacity: int, limits: Mapping[str, int], *, eager: bool, base: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Replicas per model within `capacity` devices, on top of `base`.

        eager: also replicas without demand (the devices belong to serving anyway).
        """
        counts = dict(base or {})
        left = min(capacity, self._total - self._stuck()) - self._cost(counts)
        wishes = demand_.slots(
            tuple(self.deployments.values()), self._plan_input.replicas, self.hysteresis, self._now_s, self._config
        )
        if left <= 0:
            turns = [r.since_s for r in self._plan_input.replicas if r.state == "open"]
            turns += [d.demand.last_request_s or 0.0 for d in self.deployments.values()]
            self.reviews += [since_s + self._config.turn_s for since_s in turns]
        for slot in wishes:
            if slot.nth < counts.get(slot.model, 0) or not (slot.wanted or eager):
                continue
            if slot.nth >= limits.get(slot.model, slot.nth + 1):
                continue
            if slot.nth == counts.get(slot.model, 0) and slot.tensor_parallel <= left:
                counts[slot.model] = slot.nth + 1
                left -= slot.tensor_parallel
                self.notes.pop(slot.model, None)
            elif slot.wanted and slot.model not in self.notes:
                self.notes[slot.model] = (
                    f"Wants a replica on {slot.tensor_parallel} device{'s' * (slot.tensor_parallel > 1)}; "
                    f"{max(left, 0)} are left for serving in mode {self._policy.kind}."
                )
        return counts

    def _cost(self, counts: Mapping[str, int]) -> int:
        return sum(n * self.deployments[model].tensor_parallel for model, n in counts.items())
