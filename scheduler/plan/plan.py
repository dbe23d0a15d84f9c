"""plan(plan_input, now) -> allocation: which holder gets which exact devices. Hysteresis is part of the input.

It decides in this order: how many devices serving claims (policy, demand, floor) -> how many training gets (queue) ->
the rest is lent to models with demand or stays with open engines -> exact devices, moving as little as possible: a
holder of unchanged size keeps its devices, a sleeping engine wakes where it sleeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf

from runtime.devices.kinds import kind_of
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import (
    Allocation,
    DeploymentView,
    Hysteresis,
    JobView,
    PlanInput,
    ReplicaState,
    ReplicaView,
    node_of,
)
from scheduler.plan import autoscaler, queue
from scheduler.plan.free_devices import FreeDevices

_ROUNDS = 8
"""How often to recount jobs that got fewer devices side by side; the next plan handles the rest."""
FALLS_ASLEEP_S = 10.0
"""How long a model that needs a replica waits for one of its own that is about to sleep, before it starts a new one."""
_STARVED = "Its devices are lent to the engine that samples its training answers."


def plan(plan_input: PlanInput, now_s: float, config: SchedulerConfig | None = None) -> Allocation:
    """Return the allocation for this input. The same input and time always give the same result."""
    round_ = Round(plan_input, now_s, config or SchedulerConfig())
    jobs = round_.assign()
    round_.keep_open()
    round_.defer()
    round_.let_sleep()
    late = "The previous holder is still releasing its devices."
    reviews = [*round_.reviews, *jobs.reviews]
    return Allocation(
        replicas=tuple(round_.out[r] for r in sorted(round_.out)),
        groups=dict(sorted(round_.groups.items())),
        waiting={**jobs.waiting, **{job_id: late for job_id in jobs.sizes if job_id not in round_.groups}},
        notes=round_.notes,
        hysteresis=round_.hysteresis,
        review_at_s=min((t for t in reviews if t is not None and t > now_s), default=None),
    )


def _set_up_for(deployment: DeploymentView, replica: ReplicaView) -> bool:
    return len(replica.devices) == deployment.tensor_parallel and replica.settings == deployment.settings


class Round:
    """One planning round: first counts, then exact devices, filled by `place` (from scratch each time), then by
    `keep_open`, `defer` and `let_sleep`.

    hysteresis: by model, updated to now. notes: by model, why it gets fewer replicas than needed. reviews: times at
    which a count may change without an event. out: open and sleeping replicas by id. groups: devices by job.
    """

    def __init__(self, plan_input: PlanInput, now_s: float, config: SchedulerConfig):
        self.plan_input, self.now_s, self.config = plan_input, now_s, config
        self.policy = plan_input.policy
        self.jobs = {j.id: j for j in plan_input.jobs}
        self.deployments = {d.model: d for d in plan_input.deployments}
        self.devices = {d.id: d for d in plan_input.devices}
        self.usable = {d.id for d in plan_input.devices if d.usable}
        self.usable_on = Counter(d.node for d in plan_input.devices if d.usable)
        self.total = len(self.usable)
        self.reviews: list[float | None] = []
        self.notes: dict[str, str] = {}
        self.hysteresis: dict[str, Hysteresis] = {}
        self.by_model: dict[str, list[ReplicaView]] = {}
        for replica in plan_input.replicas:
            self.by_model.setdefault(replica.model, []).append(replica)
        # A new engine has to replace these replicas, but no engine may start during a backoff.
        self.outdated = {
            r.id: r
            for r in plan_input.replicas
            if (d := self.deployments.get(r.model)) is not None
            and r.refused == d.version != r.version
            and _set_up_for(d, r)
            and autoscaler.usable(d, now_s)
        }
        self.out: dict[str, ReplicaView] = {}
        self.groups: dict[str, tuple[str, ...]] = {}
        self._remember()

    # --- counts -------------------------------------------------------------------------------------------------

    def count(
        self, limits: Mapping[str, int], side_by_side: Mapping[str, int]
    ) -> tuple[dict[str, int], dict[str, int], queue.Queue]:
        """Return (replicas per model by serving's claim, also with those on lent devices, queue of jobs).

        limits: replicas per model that fit side by side on nodes, if known. side_by_side: devices by job, for jobs that
        cannot get more on one node.
        """
        claimed = self._replicas(self._serving_capacity(), limits, eager=self.policy.kind in ("serve", "split"))
        budget, why = self._training_budget(claimed)
        # A manual mode change takes effect at once; the dwell is only for `auto`, which changes by itself.
        dwell_s = self.config.job_dwell_s if self.policy.kind == "auto" else 0.0
        waiting = self.plan_input.jobs

        def serving_beside(budget: int) -> tuple[dict[str, int], queue.Queue]:
            jobs = queue.allot(waiting, budget, self.now_s, dwell_s, why, self.usable_on, side_by_side)
            lendable = self.total - sum(jobs.sizes.values())
            return self._replicas(lendable, limits, eager=False, base=claimed), jobs

        serving, jobs = serving_beside(budget)
        for job in self._without_engine(serving, jobs):
            left = sum(jobs.sizes.values()) - self.deployments[job.sampled_by].tensor_parallel
            fewer, smaller = serving_beside(left)
            if job.id in smaller.sizes and fewer.get(job.sampled_by):
                serving, jobs, budget = fewer, smaller, left
            elif job.starved:  # job and engine take turns: the job returns when its samples are there
                waiting = tuple(replace(j, lacks=_STARVED) if j is job else j for j in waiting)
                serving, jobs = serving_beside(budget)
        return claimed, serving, jobs

    def _without_engine(self, serving: Mapping[str, int], jobs: queue.Queue) -> list[JobView]:
        """Return the jobs that get devices while the engine that should sample for them gets none."""
        return [
            job
            for job in self.plan_input.jobs
            if job.id in jobs.sizes and not serving.get(job.sampled_by) and job.busy is None
            if job.sampled_by in self.deployments and self.hysteresis[job.sampled_by].replicas
        ]

    def _remember(self) -> None:
        """Update every model's hysteresis to now."""
        is_open = {r.model for r in self.plan_input.replicas if r.state == "open" or r.busy == "coming"}
        # A hand-over takes devices from running jobs, and stops all ranks of these jobs.
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
        """Number of devices that serving may claim before training gets any."""
        total = self.total
        if self.policy.kind == "split":
            return max(total - (self.policy.train_devices or 0), min(self.policy.serving_floor, total))
        if self.policy.kind == "train":
            pinned = sum(d.floor_replicas * d.tensor_parallel for d in self.deployments.values() if d.pinned)
            return min(max(self.policy.serving_floor, pinned), total)
        return total

    def _training_budget(self, replicas: Mapping[str, int]) -> tuple[int, str]:
        """Return how many devices training may have, and a phrase on what holds the other devices."""
        total, policy = self.total, self.policy
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
        """Return how many of these devices no request needs now, in words for owners of jobs: no model is named."""
        needed = {d.model for d in self.deployments.values() if d.demand.requests or d.floor_replicas}
        kept = self._cost({model: count for model, count in replicas.items() if model not in needed})
        if not kept:
            return ""
        least_s, most_s = self.config.give_back_after_s, self.config.give_back_at_latest_s
        return (
            f", {kept} of them for models with recent requests, which release theirs {least_s:g} to "
            f"{most_s:g} s after their last request"
        )

    def _replicas(
        self, capacity: int, limits: Mapping[str, int], *, eager: bool, base: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Return replicas per model within `capacity` devices, including `base`. eager: also plan replicas without
        demand, because the devices belong to serving anyway.
        """
        counts = dict(base or {})
        stuck = sum(len(j.devices) for j in self.jobs.values() if j.keeps_devices(self.now_s))
        left = min(capacity, self.total - stuck) - self._cost(counts)
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
                    f"Needs a replica on {width} device{'s' * (width > 1)}; {max(left, 0)} are left for serving in "
                    f"mode {self.policy.kind}."
                )
        return counts

    def _cost(self, counts: Mapping[str, int]) -> int:
        return sum(n * self.deployments[model].tensor_parallel for model, n in counts.items())

    # --- exact devices ------------------------------------------------------------------------------------------

    def assign(self) -> queue.Queue:
        """Repeat counting and placing until every counted replica and job has devices. Returns the queue of jobs."""
        limits: dict[str, int] = {}
        side_by_side: dict[str, int] = {}
        unplaced: list[str] = []
        for _ in range(len(self.deployments) + _ROUNDS):
            claimed, serving, jobs = self.count(limits, side_by_side)
            unplaced, short = self.place(serving, jobs.sizes), self.short(jobs.sizes)
            # Jobs move for replicas that serving is entitled to, not for replicas on lent devices.
            owed = any(count < claimed.get(model, 0) for model, count in self.placed(unplaced).items())
            if (short or owed) and any(job.movable for job in self.jobs.values()):
                # There are enough devices, but not on one node: move movable jobs if that helps.
                if not self.place(serving, jobs.sizes, keep_jobs=False) and not self.short(jobs.sizes):
                    unplaced = []
                    break
                unplaced = self.place(serving, jobs.sizes)
            if not unplaced and not short:
                break
            # These holders get no devices in this round: others get the devices counted for them.
            limits |= self.placed(unplaced)
            side_by_side |= short
        for model in {*unplaced, *limits}:
            width = self.deployments[model].tensor_parallel
            self.notes[model] = f"No single node has {width} free devices for another replica."
        return jobs

    def placed(self, models: Iterable[str]) -> dict[str, int]:
        """Return the number of placed replicas by model."""
        counts = Counter(r.model for r in self.out.values())
        return {model: counts[model] for model in models}

    def short(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the number of devices by job, for jobs that got fewer on one node than planned."""
        counts = {j: len(self.groups.get(j, ())) for j in sizes if not self.jobs[j].busy}
        return {j: count for j, count in counts.items() if count < sizes[j]}

    def place(self, serving: Mapping[str, int], sizes: Mapping[str, int], *, keep_jobs: bool = True) -> list[str]:
        """Fill `out` and `groups`; return the models with a replica that got no devices.

        serving: replicas per model. sizes: devices per job. keep_jobs: True if jobs of unchanged size keep devices.
        """
        self.out, self.groups, self.new = {}, {}, 0
        coming = [r.devices for r in self.plan_input.replicas if r.busy == "coming"]
        coming += [j.devices for j in self.plan_input.jobs if j.busy == "coming"]
        claimed = {d for devices in coming for d in devices}
        self.deferred = self.plan_input.busy_devices - claimed
        free_ids = self.usable - claimed
        self.free = FreeDevices(self.devices[d] for d in self.devices if d in free_ids)
        held = {d for r in self.plan_input.replicas if r.awake for d in r.devices}
        held |= {d for j in self.plan_input.jobs for d in j.devices}
        held |= self.deferred
        self.unheld = FreeDevices(self.devices[d] for d in self.devices if d in free_ids and d not in held)

        for job_id, size in sizes.items():
            job = self.jobs[job_id]
            keeps = job.busy == "coming" or (len(job.devices) == size and self.usable.issuperset(job.devices))
            if keeps and (keep_jobs or not job.movable):
                self.groups[job_id] = job.devices
                self.take(job.devices)
        for job_id, size in sizes.items():
            if job_id not in self.groups and len(self.usable_on) > 1:
                self.place_job(job_id, size)  # unlike engines, this job cannot move to other devices
        counts = self.keep_replicas(serving)
        unplaced = []
        for model in sorted(serving, key=lambda m: (-self.deployments[m].tensor_parallel, m)):
            unplaced += [model] * (not self.add_replicas(self.deployments[model], serving[model] - counts[model]))
        for job_id, size in sizes.items():
            if job_id not in self.groups:
                self.place_job(job_id, size)
        return unplaced

    def place_job(self, job_id: str, size: int) -> None:
        job = self.jobs[job_id]
        devices = self.free.choose(size, nodes=job.nodes, near=job.devices, only=self.unheld)
        if devices is None and job.movable and len(job.devices) in job.sizes:
            # The devices for its growth are still being released: keep its size until then.
            devices = job.devices if self.free.has(job.devices) else None
        if devices is not None:
            self.groups[job_id] = devices
            self.take(devices)

    def take(self, devices: tuple[str, ...]) -> None:
        self.free.take(devices)
        self.unheld.take(devices)

    def open(self, replica: ReplicaView) -> None:
        self.note_replica(replica, "open")
        self.take(replica.devices)

    def keep_replicas(self, serving: Mapping[str, int]) -> dict[str, int]:
        """Keep open replicas on their devices, the longest open first. Drop at most one outdated replica per model at a
        time, and only while no replica of the model is moving."""
        counts = dict.fromkeys(serving, 0)
        rank = {"coming": 0, None: 1, "leaving": 2}
        moving = {r.model for r in self.plan_input.replicas if r.busy is not None}
        left = Counter(r.model for r in self.outdated.values() if r.awake and r.model not in moving)

        def seniority(r: ReplicaView) -> tuple[int, bool, bool, float, str]:
            return rank[r.busy], r.id in self.outdated, r.state != "open", r.since_s, r.id

        for replica in sorted(self.plan_input.replicas, key=seniority):
            if replica.busy == "coming":
                self.note_replica(replica, "open")
                if replica.model in counts:
                    counts[replica.model] += 1
            elif replica.model not in counts or counts[replica.model] >= serving[replica.model]:
                continue
            elif replica.busy is None and replica.state in ("open", "ready", "draining"):
                left[replica.model] -= replica.id in self.outdated
                keeps = self.fits(replica) or (replica.id in self.outdated and left[replica.model] != 0)
                if keeps and self.free.has(replica.devices):
                    self.open(replica)
                    counts[replica.model] += 1
        return counts

    def fits(self, replica: ReplicaView) -> bool:
        """Whether the replica has, or can change to, the current build of its deployment."""
        return replica.id not in self.outdated and _set_up_for(self.deployments[replica.model], replica)

    def add_replicas(self, deployment: DeploymentView, count: int) -> bool:
        """Add `count` replicas: wake sleeping replicas on their devices, then start new replicas. False if devices are
        lacking."""
        if count <= 0:
            return True
        own = self.by_model.get(deployment.model, [])
        asleep = [r for r in own if r.state == "asleep" and r.busy is None and self.fits(r)]
        asleep.sort(key=lambda r: (not self.unheld.has(r.devices), -r.since_s, r.id))
        if not autoscaler.usable(deployment, self.now_s):
            return True
        falling = [r for r in own if r.busy == "leaving" and self.now_s - r.since_s < FALLS_ASLEEP_S]
        for _ in range(count):
            home = next((r for r in asleep if r.id not in self.out and self.free.has(r.devices)), None)
            if home is not None:
                self.open(home)
                continue
            # A replica that is about to sleep can be woken soon; a new process would take longer.
            soon = next((r for r in falling if self.free.has(r.devices)), None)
            if soon is not None:
                self.take(soon.devices)
                self.reviews.append(soon.since_s + FALLS_ASLEEP_S)
                continue
            devices = self.free.choose(deployment.tensor_parallel, only=self.unheld)
            if devices is None:
                return False
            new_id = f"r{self.plan_input.handover_id}-{self.new}"
            self.new += 1
            self.out[new_id] = ReplicaView(
                new_id, deployment.model, deployment.version, "open", devices, settings=deployment.settings
            )
            self.take(devices)
        return True

    def note_replica(self, replica: ReplicaView, state: ReplicaState) -> None:
        deployment = self.deployments.get(replica.model)
        moves = deployment is not None and not replica.busy and autoscaler.usable(deployment, self.now_s)
        moves = moves and replica.id not in self.outdated
        version = deployment.version if deployment is not None and moves and state == "open" else replica.version
        self.out[replica.id] = replace(replica, state=state, version=version)

    def defer(self) -> None:
        """Drop placements that cannot begin yet because a hand-over is still releasing their devices. `place` counts
        those devices as free, so that the next plan does not undo decisions of this one.
        """
        known = {r.id: r for r in self.plan_input.replicas}
        for replica_id, plan_ in list(self.out.items()):
            replica = known.get(replica_id)
            if plan_.state != "open" or self.deferred.isdisjoint(plan_.devices):
                continue
            if replica is None:
                del self.out[replica_id]
            elif replica.state == "asleep" and not replica.busy:
                self.out[replica_id] = replica
        for job_id, devices in list(self.groups.items()):
            job = self.jobs[job_id]
            if job.busy or self.deferred.isdisjoint(devices):
                continue
            del self.groups[job_id]
            taken = {d for r in self.out.values() if r.state == "open" for d in r.devices}
            taken = taken.union(*self.groups.values())
            stays = job.phase == "running" and job.devices and len(job.devices) in job.sizes
            if stays and self.usable.issuperset(job.devices) and taken.isdisjoint(job.devices):
                self.groups[job_id] = job.devices

    # --- remaining replicas -------------------------------------------------------------------------------------

    def keep_open(self) -> None:
        """Keep engines open while no other holder needs their devices and their idle time has not passed, and outdated
        engines until their replacements are open."""
        counts = Counter(r.model for r in self.out.values() if r.state == "open")
        is_open = {r.id for r in self.plan_input.replicas if r.state == "open"}
        starting = Counter(r.model for r in self.out.values() if r.state == "open" and r.id not in is_open)
        for replica in sorted(self.plan_input.replicas, key=lambda r: (r.since_s, r.id)):
            deployment = self.deployments.get(replica.model)
            if replica.id in self.out or deployment is None or replica.busy or replica.state != "open":
                continue
            if replica.id in self.outdated:
                if starting[replica.model] > 0 and self.free.has(replica.devices):
                    self.open(replica)
                    starting[replica.model] -= 1
                continue
            wanted = self.policy.kind != "train" and counts[replica.model] < deployment.max_replicas
            wanted = wanted and autoscaler.usable(deployment, self.now_s) and not deployment.asleep(self.now_s)
            if wanted and self.fits(replica) and self.free.has(replica.devices):
                self.open(replica)
                counts[replica.model] += 1

    def let_sleep(self) -> None:
        """Put all other living replicas to sleep; stop the least recently used ones beyond the limits: per box, and per
        device whose memory sleeping engines still use."""
        rest = [r for r in self.plan_input.replicas if r.id not in self.out and r.state != "dead"]
        for replica in rest:
            if replica.busy == "leaving":
                self.note_replica(replica, "asleep")
        rest = [r for r in rest if r.busy is None and r.model in self.deployments and self.fits(r)]
        # A "starting" replica without a hand-over is a leftover of a crash: stop it.
        rest = [r for r in rest if r.state != "starting" and self.usable.issuperset(r.devices)]
        used = {m: d.demand.last_request_s or 0.0 for m, d in self.deployments.items()}
        rest.sort(key=lambda r: (-used[r.model], -r.since_s, r.id))
        bound = self.config.max_resident_asleep
        on_node = dict(self.plan_input.max_asleep)
        kinds = {device.id: kind_of(device.kind) for device in self.plan_input.devices}
        on_device: Counter[str] = Counter()
        for replica in rest:
            keeps = [device for device in replica.devices if kinds[device].asleep_bytes]
            node = node_of(replica.devices[0])
            room = min(bound, on_node.get(node, bound)) > 0
            if room and all(on_device[device] < self.config.max_asleep_per_device for device in keeps):
                self.note_replica(replica, "asleep")
                on_device.update(keeps)
                on_node[node] = on_node.get(node, bound) - 1
                bound -= 1
