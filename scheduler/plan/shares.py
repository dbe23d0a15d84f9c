"""Computes how many devices each model and each job gets, from policy, demand and queue; not which ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import inf

from scheduler import autoscaler
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
        self.plan_input, self.now_s, self.config = plan_input, now_s, config
        self.policy: Policy = plan_input.policy
        self.jobs: dict[str, JobView] = {j.id: j for j in plan_input.jobs}
        self.works_on = Counter(d.node for d in plan_input.devices if d.usable)
        self._total = sum(self.works_on.values())
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
        claimed = self._replicas(self._serving_capacity(), limits, eager=self.policy.kind in ("serve", "split"))
        budget, why = self._training_budget(claimed)
        # A manual change of mode takes effect at once; only `auto`, which changes by itself, dwells.
        dwell_s = self.config.job_dwell_s if self.policy.kind == "auto" else 0.0
        waiting = self.plan_input.jobs

        def serving_beside(budget: int) -> tuple[dict[str, int], queue.Queue]:
            jobs = queue.allot(waiting, budget, self.now_s, dwell_s, why, self.works_on, side_by_side)
            lendable = self._total - sum(jobs.sizes.values())
            return self._replicas(lendable, limits, eager=False, base=claimed), jobs

        serving, jobs = serving_beside(budget)
        for job in self._without_engine(serving, jobs):
            left = sum(jobs.sizes.values()) - self.deployments[job.sampled_by].tensor_parallel
            fewer, smaller = serving_beside(left)
            if job.id in smaller.sizes and fewer.get(job.sampled_by):
                serving, jobs, budget = fewer, smaller, left
            elif job.starved:  # by turns: it comes back when its samples are there
                waiting = tuple(replace(j, lacks=_STARVED) if j is job else j for j in waiting)
                serving, jobs = serving_beside(budget)
        return claimed, serving, jobs

    def _without_engine(self, serving: Mapping[str, int], jobs: queue.Queue) -> list[JobView]:
        """Jobs that get devices while the engine that is wanted for their samples gets none."""
        return [
            job
            for job in self.plan_input.jobs
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
        is_open = {r.model for r in self.plan_input.replicas if r.state == "open" or r.busy == "coming"}
        # Devices come from running jobs, and a transfer stops all ranks of both jobs involved.
        stops_s = (
            len(j.devices) * (self.config.job_pause_s if j.pause_s is None else j.pause_s)
            for j in self.jobs.values()
            if j.interruptible
        )
        switch_device_s = 2 * max(stops_s, default=0.0) if self.policy.kind == "auto" else 0.0
        for model, deployment in self.deployments.items():
            hysteresis, reviews = autoscaler.required(
                deployment,
                self.plan_input.hysteresis.get(model, Hysteresis()),
                self.now_s,
                self.config,
                switch_device_s=switch_device_s,
            )
            waits = deployment.demand.requests > 0 and model not in is_open
            since_s = (hysteresis.waiting_since_s or self.now_s) if waits else None
            if since_s != hysteresis.waiting_since_s:
                hysteresis = replace(hysteresis, waiting_since_s=since_s)
            self.hysteresis[model] = hysteresis
            if deployment.idle_after_s < inf:
                reviews.append(deployment.last_s + deployment.idle_after_s)
            self.reviews += [*reviews, deployment.not_before_s]

    def _serving_capacity(self) -> int:
        """Devices that serving may claim before training gets any."""
        total = self._total
        if self.policy.kind == "split":
            return max(total - (self.policy.train_devices or 0), min(self.policy.serving_floor, total))
        if self.policy.kind == "train":
            pinned = sum(d.floor_replicas * d.tensor_parallel for d in self.deployments.values() if d.pinned)
            return min(max(self.policy.serving_floor, pinned), total)
        return total

    def _training_budget(self, replicas: Mapping[str, int]) -> tuple[int, str]:
        """Devices that training may have, and what holds the others."""
        total, policy = self._total, self.policy
        kept, floor = self._serving_capacity(), min(policy.serving_floor, total)
        if policy.kind == "serve":
            return 0, "mode serve gives training no devices"
        if policy.kind == "split":
            short = total - kept < (policy.train_devices or 0)
            why = f", because the serving floor keeps {floor} of {total} devices" if short else ""
            return total - kept, f"mode split gives training {total - kept}{why}"
        if policy.kind == "train":
            return total - kept, f"mode train keeps {kept} of {total} devices for serving"
        if floor > (claimed := self._cost(replicas)):
            return total - floor, f"the serving floor keeps {floor} of {total} devices"
        return total - claimed, f"serving needs {claimed} of {total} devices now{self._of_idle(replicas)}"

    def _of_idle(self, replicas: Mapping[str, int]) -> str:
        """How many of those devices no request needs now. It names no model, because the owner of a job reads it."""
        needed = {d.model for d in self.deployments.values() if d.demand.requests or d.floor_replicas}
        kept = self._cost({model: count for model, count in replicas.items() if model not in needed})
        if not kept:
            return ""
        least_s, most_s = self.config.give_back_after_s, self.config.give_back_at_latest_s
        return (
            f", {kept} of them for models that were asked a moment ago, which give theirs back {least_s:g} to "
            f"{most_s:g} s after their last request"
        )

    def _stuck(self) -> int:
        """Devices of jobs that keep theirs whatever is planned."""
        return sum(len(j.devices) for j in self.jobs.values() if j.keeps_devices(self.now_s))

    def _replicas(
        self, capacity: int, limits: Mapping[str, int], *, eager: bool, base: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Replicas per model within `capacity` devices, on top of `base`.

        eager: also replicas without demand (the devices belong to serving anyway).
        """
        counts = dict(base or {})
        left = min(capacity, self._total - self._stuck()) - self._cost(counts)
        wishes = autoscaler.slots(
            tuple(self.deployments.values()), self.plan_input.replicas, self.hysteresis, self.now_s, self.config
        )
        if left <= 0:
            turns = [r.since_s for r in self.plan_input.replicas if r.state == "open"]
            turns += [d.demand.last_request_s or 0.0 for d in self.deployments.values()]
            self.reviews += [since_s + self.config.turn_s for since_s in turns]
        for model, nth, wanted in wishes:
            width, have = self.deployments[model].tensor_parallel, counts.get(model, 0)
            if nth < have or not (wanted or eager) or nth >= limits.get(model, nth + 1):
                continue
            if nth == have and width <= left:
                counts[model] = nth + 1
                left -= width
                self.notes.pop(model, None)
            elif wanted and model not in self.notes:
                self.notes[model] = (
                    f"Wants a replica on {width} device{'s' * (width > 1)}; {max(left, 0)} are left for serving in "
                    f"mode {self.policy.kind}."
                )
        return counts

    def _cost(self, counts: Mapping[str, int]) -> int:
        return sum(n * self.deployments[model].tensor_parallel for model, n in counts.items())
