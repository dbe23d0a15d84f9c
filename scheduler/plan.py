"""plan(snapshot, now) -> allocation: who should hold which exact devices. Pure, no memory but the one it is handed.

Order of the decision: how many devices serving claims (policy, demand, floor) -> how many training gets (queue) ->
what is left is lent to models with demand or stays with engines that are open -> exact devices, moving as little as
possible: a holder whose size is unchanged keeps its devices, a sleeping engine wakes where it sleeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scheduler import demand as demand_
from scheduler import queue
from scheduler.config import SchedulerConfig
from scheduler.inventory import Holder, Lease, Ledger
from scheduler.placement import Pool
from scheduler.workload import DeploymentView, JobView, ModelMemory, Policy, ReplicaView, Snapshot


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """A replica as it should be: "open" on its devices, or "asleep" at home without holding them."""

    id: str
    model: str
    version: str
    tensor_parallel: int
    devices: tuple[str, ...]
    state: str


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A job's group of ranks, one per device."""

    job_id: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """Who should hold what. A replica not named here should be stopped; a job not named should hold nothing.

    waiting: job id to the sentence why it does not run. notes: model to the sentence why it has fewer replicas than
    asked for. memory: to be handed to the next plan. review_at_s: when time alone may change the answer.
    """

    replicas: tuple[ReplicaPlan, ...] = ()
    groups: tuple[GroupPlan, ...] = ()
    waiting: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    memory: dict[str, ModelMemory] = field(default_factory=dict)
    review_at_s: float | None = None

    @property
    def open_replicas(self) -> tuple[ReplicaPlan, ...]:
        return tuple(r for r in self.replicas if r.state == "open")

    def ledger(self, device_ids: tuple[str, ...]) -> Ledger:
        """The ledger this allocation means. Raises LedgerConflict if two holders share a device."""
        leases = [Lease(f"replica:{r.id}", Holder("replica", r.id), r.devices) for r in self.open_replicas]
        leases += [Lease(f"job:{g.job_id}", Holder("job", g.job_id), g.devices) for g in self.groups]
        return Ledger(device_ids).acquire(*leases)


def plan(snapshot: Snapshot, now_s: float, config: SchedulerConfig | None = None) -> Allocation:
    """The allocation for this snapshot. The same snapshot and time always give the same answer."""
    return _Round(snapshot, now_s, config or SchedulerConfig()).allocation()


class _Round:
    """The working values of one planning round, read from top to bottom in `allocation`."""

    def __init__(self, snapshot: Snapshot, now_s: float, config: SchedulerConfig):
        self.now_s, self.config, self.snapshot = now_s, config, snapshot
        self.policy: Policy = snapshot.policy
        self.devices = {d.id: d for d in snapshot.devices}
        self.works = {d.id for d in snapshot.devices if d.usable}
        self.works_on = Counter(d.node for d in snapshot.devices if d.usable)
        self.deployments: dict[str, DeploymentView] = {d.model: d for d in snapshot.deployments}
        self.jobs: dict[str, JobView] = {j.id: j for j in snapshot.jobs}
        self.reviews: list[float] = []
        self.notes: dict[str, str] = {}
        self.by_model: dict[str, list[ReplicaView]] = {}
        for replica in snapshot.replicas:
            self.by_model.setdefault(replica.model, []).append(replica)
        self.limits: dict[str, int] = {}
        self.out: dict[str, ReplicaPlan] = {}
        self.groups: dict[str, GroupPlan] = {}

    def allocation(self) -> Allocation:
        self.remember()
        for _ in range(len(self.deployments) + 1):
            serving, jobs = self.count()
            self.out, self.groups = {}, {}
            unplaced = self.place(serving, jobs.sizes, keep_jobs=True)
            if not unplaced:
                break
            if self.owed(unplaced) and any(self.movable(j) for j in self.snapshot.jobs):
                # Enough devices but not side by side: move the jobs that may be moved, if that helps.
                self.out, self.groups = {}, {}
                if not (moved := self.place(serving, jobs.sizes, keep_jobs=False)):
                    unplaced = moved
                    break
                self.out, self.groups = {}, {}
                unplaced = self.place(serving, jobs.sizes, keep_jobs=True)
            # Not to be had in this round: what they were counted for goes to others.
            placed = Counter(r.model for r in self.out.values())
            for model in set(unplaced):
                self.limits[model] = placed[model]
        if jobs.review_at_s is not None:
            self.reviews.append(jobs.review_at_s)
        for model in {*unplaced, *self.limits}:
            width = self.deployments[model].tensor_parallel
            self.notes[model] = f"No node has {width} free devices side by side for another replica."
        waiting = dict(jobs.waiting)
        self.keep_open()
        self.defer()
        for job_id in jobs.sizes.keys() - self.groups.keys():
            waiting[job_id] = "Its devices are still being given back by their last holder."
        self.let_sleep()
        return Allocation(
            replicas=tuple(self.out[r] for r in sorted(self.out)),
            groups=tuple(self.groups[j] for j in sorted(self.groups)),
            waiting=waiting,
            notes=self.notes,
            memory=self.memory,
            review_at_s=min((t for t in self.reviews if t > self.now_s), default=None),
        )

    # --- how many -----------------------------------------------------------------------------------------------

    def count(self) -> tuple[dict[str, int], queue.Queue]:
        """Replicas per model and devices per job."""
        serving = self.serving_counts(self.serving_capacity(), eager=self.policy.kind in ("serve", "split"))
        self.claimed = serving
        budget, why = self.training_budget(self.cost(serving))
        # A person's change of mode takes hold at once; only `auto`, which changes by itself, dwells.
        dwell_s = self.config.job_dwell_s if self.policy.kind == "auto" else 0.0
        jobs = queue.allot(self.snapshot.jobs, budget, len(self.works), self.now_s, dwell_s, why, self.works_on)
        lendable = len(self.works) - sum(jobs.sizes.values())
        return self.serving_counts(lendable, eager=False, base=serving), jobs

    def owed(self, unplaced: list[str]) -> bool:
        """Whether serving has a claim on a replica without devices; a lent one is not worth moving a job."""
        placed = Counter(r.model for r in self.out.values())
        return any(placed[model] < self.claimed.get(model, 0) for model in unplaced)

    def remember(self) -> None:
        """Bring every model's memory up to now."""
        is_open = {r.model for r in self.snapshot.replicas if r.state == "open" or r.busy == "coming"}
        self.memory: dict[str, ModelMemory] = {}
        # Devices come from the jobs that run, and stop all ranks of the job they come from and go to.
        largest = max((len(j.devices) for j in self.jobs.values() if j.preemptible and j.phase == "running"), default=0)
        switch_device_s = 2 * self.config.job_pause_s * largest if self.policy.kind == "auto" else 0.0
        for model, deployment in self.deployments.items():
            memory, review_s = demand_.required(
                deployment,
                self.snapshot.memory.get(model, ModelMemory()),
                self.now_s,
                self.config,
                switch_device_s=switch_device_s,
            )
            waits = deployment.demand.requests > 0 and model not in is_open
            since_s = memory.waiting_since_s
            self.memory[model] = replace(memory, waiting_since_s=(since_s or self.now_s) if waits else None)
            if review_s is not None:
                self.reviews.append(review_s)
            if deployment.not_before_s > self.now_s:
                self.reviews.append(deployment.not_before_s)
            last = deployment.demand.last_request_s
            if deployment.idle_sleep_s is not None and last is not None:
                self.reviews.append(last + deployment.idle_sleep_s)

    def serving_capacity(self) -> int:
        """Devices that serving may claim before training is asked."""
        total = len(self.works)
        if self.policy.kind == "split":
            return max(total - (self.policy.train_devices or 0), min(self.policy.serving_floor, total))
        if self.policy.kind == "train":
            pinned = sum(d.floor_replicas * d.tensor_parallel for d in self.deployments.values() if d.pinned)
            return min(max(self.policy.serving_floor, pinned), total)
        return total

    def training_budget(self, claimed: int) -> tuple[int, str]:
        total, policy = len(self.works), self.policy
        floor = min(policy.serving_floor, total)
        if policy.kind == "serve":
            return 0, "mode serve gives training no devices"
        if policy.kind == "split":
            share = policy.train_devices or 0
            return min(share, total - floor), f"mode split gives training {share}"
        if policy.kind == "train":
            kept = self.serving_capacity()
            return total - kept, f"mode train keeps {kept} of {total} devices for serving"
        kept = max(claimed, floor)
        return total - kept, f"serving needs {kept} of {total} devices now"

    def stuck(self) -> int:
        """Devices of jobs that must not be preempted or that a hand-over in flight is giving to training."""
        return sum(
            len(j.devices)
            for j in self.jobs.values()
            if j.busy == "coming" or (j.phase == "running" and not j.preemptible and j.wants_devices(self.now_s))
        )

    def serving_counts(self, capacity: int, *, eager: bool, base: Mapping[str, int] | None = None) -> dict[str, int]:
        """Replicas per model within `capacity` devices, on top of `base`.

        eager: also the replicas that nothing asks for (the devices belong to serving anyway).
        """
        counts = dict(base or {})
        left = min(capacity, len(self.works) - self.stuck()) - self.cost(counts)
        wishes = demand_.slots(
            tuple(self.deployments.values()), self.snapshot.replicas, self.memory, self.now_s, self.config
        )
        self.reviews += [
            r.since_s + self.config.turn_s for r in self.snapshot.replicas if r.state == "open" and left <= 0
        ]
        for slot in wishes:
            if slot.nth < counts.get(slot.model, 0) or not (slot.wanted or eager):
                continue
            if slot.nth >= self.limits.get(slot.model, slot.nth + 1):
                continue
            if slot.nth == counts.get(slot.model, 0) and slot.tensor_parallel <= left:
                counts[slot.model] = slot.nth + 1
                left -= slot.tensor_parallel
                self.notes.pop(slot.model, None)
            elif slot.wanted and slot.model not in self.notes:
                self.notes[slot.model] = (
                    f"Wants a replica on {slot.tensor_parallel} device{'s' * (slot.tensor_parallel > 1)}; "
                    f"{max(left, 0)} are left for serving in mode {self.policy.kind}."
                )
        return counts

    def cost(self, counts: Mapping[str, int]) -> int:
        return sum(n * self.deployments[model].tensor_parallel for model, n in counts.items())

    # --- which exactly ------------------------------------------------------------------------------------------

    def movable(self, job: JobView) -> bool:
        return job.preemptible and job.phase == "running" and job.busy is None

    def place(self, serving: Mapping[str, int], sizes: Mapping[str, int], *, keep_jobs: bool) -> list[str]:
        """Fill `out` and `groups`; answers the models with a replica that found no devices."""
        self.new = 0
        coming = [r.devices for r in self.snapshot.replicas if r.busy == "coming"]
        coming += [j.devices for j in self.snapshot.jobs if j.busy == "coming"]
        claimed = {d for devices in coming for d in devices}
        self.deferred = self.snapshot.busy_devices - claimed
        free_ids = self.works - claimed
        self.pool = Pool(self.devices[d] for d in self.devices if d in free_ids)
        held = {d for r in self.snapshot.replicas if r.awake for d in r.devices}
        held |= {d for j in self.snapshot.jobs for d in j.devices}
        held |= self.deferred
        self.idle_pool = Pool(self.devices[d] for d in self.devices if d in free_ids and d not in held)

        for job_id, size in sizes.items():
            job = self.jobs[job_id]
            keeps = job.busy == "coming" or (len(job.devices) == size and self.works.issuperset(job.devices))
            if keeps and (keep_jobs or not self.movable(job)):
                self.groups[job_id] = GroupPlan(job_id, job.devices)
                self.take(job.devices)
        for job_id, size in sizes.items():
            if job_id not in self.groups and self.bound(self.jobs[job_id]):
                self.place_job(job_id, size)  # engines can be elsewhere, it cannot
        counts = self.keep_replicas(serving)
        unplaced = []
        for model in sorted(serving, key=lambda m: (-self.deployments[m].tensor_parallel, m)):
            unplaced += [model] * (not self.add_replicas(self.deployments[model], serving[model] - counts[model]))
        for job_id, size in sizes.items():
            if job_id not in self.groups:
                self.place_job(job_id, size)
        return unplaced

    def bound(self, job: JobView) -> bool:
        """Whether not just any devices will do: it needs all of them on one of several nodes."""
        return bool(job.nodes) and len(self.works_on) > 1

    def place_job(self, job_id: str, size: int) -> None:
        job = self.jobs[job_id]
        devices = self.pool.choose(size, nodes=job.nodes, near=job.devices, only=self.idle_pool)
        if devices is None and self.movable(job) and len(job.devices) in job.sizes:
            # What it should grow onto is still being given back: stay, rather than stop for nothing.
            devices = job.devices if self.pool.has(job.devices) else None
        if devices is not None:
            self.groups[job_id] = GroupPlan(job_id, devices)
            self.take(devices)

    def take(self, devices: tuple[str, ...]) -> None:
        self.pool.take(devices)
        self.idle_pool.take(devices)

    def keep_replicas(self, serving: Mapping[str, int]) -> dict[str, int]:
        """Open replicas that stay where they are, the longest open first."""
        counts = dict.fromkeys(serving, 0)
        rank = {"coming": 0, None: 1, "leaving": 2}

        def seniority(r: ReplicaView) -> tuple[int, bool, float, str]:
            return rank[r.busy], r.state != "open", r.since_s, r.id

        for replica in sorted(self.snapshot.replicas, key=seniority):
            if replica.busy == "coming":
                self.note_replica(replica, "open")
                if replica.model in counts:
                    counts[replica.model] += 1
            elif replica.model not in counts or counts[replica.model] >= serving[replica.model]:
                continue
            elif replica.busy is None and replica.state in ("open", "ready", "draining"):
                if self.fits(replica) and self.pool.has(replica.devices):
                    self.note_replica(replica, "open")
                    self.take(replica.devices)
                    counts[replica.model] += 1
        return counts

    def fits(self, replica: ReplicaView) -> bool:
        return len(replica.devices) == self.deployments[replica.model].tensor_parallel

    def add_replicas(self, deployment: DeploymentView, count: int) -> bool:
        """`count` more replicas: sleeping ones where they sleep, then new ones. False when one finds no devices."""
        if count <= 0:
            return True
        own = self.by_model.get(deployment.model, [])
        asleep = [r for r in own if r.state == "asleep" and r.busy is None and self.fits(r)]
        asleep.sort(key=lambda r: (not self.idle_pool.has(r.devices), -r.since_s, r.id))
        # A replica on its way to sleep can be woken in a moment; a new process would cost more than that wait.
        falling = 0
        for replica in own:
            recent = replica.busy == "leaving" and self.now_s - replica.since_s < self.config.await_sleep_s
            if falling < count and recent and self.pool.has(replica.devices):
                falling += 1
                self.take(replica.devices)
                self.reviews.append(replica.since_s + self.config.await_sleep_s)
        for nth in range(count):
            home = next((r for r in asleep if r.id not in self.out and self.pool.has(r.devices)), None)
            if home is not None and demand_.usable(deployment, self.now_s):
                self.note_replica(home, "open")
                self.take(home.devices)
                continue
            if not demand_.usable(deployment, self.now_s) or count - nth <= falling:
                return True
            devices = self.pool.choose(deployment.tensor_parallel, single_node=True, only=self.idle_pool)
            if devices is None:
                return False
            new_id = f"r{self.snapshot.epoch}-{self.new}"
            self.new += 1
            self.out[new_id] = ReplicaPlan(
                new_id, deployment.model, deployment.version, deployment.tensor_parallel, devices, "open"
            )
            self.take(devices)
        return True

    def note_replica(self, replica: ReplicaView, state: str) -> None:
        deployment = self.deployments.get(replica.model)
        moves = deployment is not None and not replica.busy and demand_.usable(deployment, self.now_s)
        version = deployment.version if deployment is not None and moves and state == "open" else replica.version
        self.out[replica.id] = ReplicaPlan(
            replica.id, replica.model, version, len(replica.devices), replica.devices, state
        )

    def defer(self) -> None:
        """Drop what cannot begin yet because a hand-over in flight still gives its devices back.

        Until then the plan is the one it will be, so nothing is decided now that would be taken back then.
        """
        for replica in self.snapshot.replicas:
            plan_ = self.out.get(replica.id)
            if plan_ is not None and replica.state == "asleep" and not replica.busy and plan_.state == "open":
                if not self.deferred.isdisjoint(plan_.devices):
                    self.out[replica.id] = replace(plan_, state="asleep", version=replica.version)
        known = {r.id for r in self.snapshot.replicas}
        for replica_id, plan_ in list(self.out.items()):
            if replica_id not in known and not self.deferred.isdisjoint(plan_.devices):
                del self.out[replica_id]
        for job_id, group in list(self.groups.items()):
            job = self.jobs[job_id]
            if job.busy or self.deferred.isdisjoint(group.devices):
                continue
            del self.groups[job_id]
            taken = {d for r in self.out.values() if r.state == "open" for d in r.devices}
            taken |= {d for g in self.groups.values() for d in g.devices}
            stays = job.phase == "running" and job.devices and len(job.devices) in job.sizes
            if stays and self.works.issuperset(job.devices) and taken.isdisjoint(job.devices):
                self.groups[job_id] = GroupPlan(job_id, job.devices)

    # --- what is left -------------------------------------------------------------------------------------------

    def keep_open(self) -> None:
        """Engines that are open and in nobody's way stay open, until their own idle time puts them to sleep."""
        eager = self.policy.kind in ("serve", "split", "auto")
        counts = Counter(r.model for r in self.out.values() if r.state == "open")
        for replica in sorted(self.snapshot.replicas, key=lambda r: (r.since_s, r.id)):
            deployment = self.deployments.get(replica.model)
            if replica.id in self.out or deployment is None or replica.busy or replica.state != "open":
                continue
            if not eager or counts[replica.model] >= deployment.max_replicas or not self.fits(replica):
                continue
            if demand_.usable(deployment, self.now_s) and not demand_.idle(deployment, self.now_s):
                if self.pool.has(replica.devices):
                    self.note_replica(replica, "open")
                    self.take(replica.devices)
                    counts[replica.model] += 1

    def let_sleep(self) -> None:
        """Everything else that lives sleeps; the least recently used beyond the bound are stopped."""
        rest = [r for r in self.snapshot.replicas if r.id not in self.out and r.state != "dead"]
        for replica in rest:
            if replica.busy == "leaving":
                self.note_replica(replica, "asleep")
        rest = [r for r in rest if r.busy is None and r.model in self.deployments and self.fits(r)]
        # "starting" with nobody waiting for it is what a crash leaves behind: not to be trusted, stopped.
        rest = [r for r in rest if r.state != "starting" and self.works.issuperset(r.devices)]
        used = {m: d.demand.last_request_s or 0.0 for m, d in self.deployments.items()}
        rest.sort(key=lambda r: (-used[r.model], -r.since_s, r.id))
        for replica in rest[: self.config.max_resident_asleep]:
            self.note_replica(replica, "asleep")
