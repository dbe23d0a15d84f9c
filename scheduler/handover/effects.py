"""Interfaces of the loop: the verbs that change the world, the journal of hand-overs, the store of workloads.

Ray and the simulator implement the verbs. Contract of every verb:
- It returns when its effect holds, not when the request was sent. It returns details for the journal (`bytes`,
  `seconds`, ...) as a mapping, or None.
- It is idempotent: if its effect already holds, it changes nothing and succeeds. The loop repeats verbs after a crash,
  because it cannot know whether the last one was carried out.
- It raises only `EffectFailed` when the effect was not achieved. Partial changes may remain: the
  loop undoes them (see handover.py) and reads the state again through `observe`.
- It ends within a second of the death of the process it waits for (a rank, an engine, a supervisor), with an
  `EffectFailed` that names the dead process and whose fault it was (`blame`).
- It may be cancelled (time limits), with the same consequences as `EffectFailed`.
- Verbs for different targets run concurrently; for one target at most one at a time.

A journal is a log of events, written before and after each step; a write returns when it is durable. The current state
comes from observation, the wanted state from planning. The journal serves to close hand-overs that a crash interrupted,
to give each hand-over a new number, and as a history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from scheduler.core.errors import Blame
from scheduler.core.failures import Failure
from scheduler.core.workload import Build, Device, Holder, ReplicaView, Workload

Detail = Mapping[str, Any] | None
Outcome = Literal["succeeded", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """How and why a job's group ended by itself.

    `step`: the last training step that its ranks reported; a higher step than at the previous failure counts as
    progress. `retryable`: False if a retry cannot help (bad data, invalid configuration). `blame`: whose
    fault it was.
    """

    outcome: Outcome
    step: int = 0
    error: str = ""
    retryable: bool = True
    blame: Blame = "own"


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group of ranks that was started and has not been suspended or stopped.

    `ended`: set if it ended by itself; `stop_group` then cleans up its processes. `run`: the
    incarnation that `start_group` named; "" for a group that this controller found running.
    """

    job_id: str
    devices: tuple[str, ...]
    since_s: float = 0.0
    ended: GroupEnded | None = None
    run: str = ""


@dataclass(frozen=True, slots=True)
class Box:
    """Devices, engines and groups at one moment, read from the processes themselves: an engine or job with a process on
    a device holds it. Never changed in place."""

    devices: Mapping[str, Device] = field(default_factory=dict)
    replicas: Mapping[str, ReplicaView] = field(default_factory=dict)
    groups: Mapping[str, GroupView] = field(default_factory=dict)

    @classmethod
    def of(cls, devices: Iterable[Device], replicas: Iterable[ReplicaView], groups: Iterable[GroupView]) -> Box:
        return cls({d.id: d for d in devices}, {r.id: r for r in replicas}, {g.job_id: g for g in groups})

    @property
    def holders(self) -> dict[str, Holder]:
        """The holder of each device: an engine that is not asleep, or a job."""
        engines = {d: Holder("replica", r.id) for r in self.replicas.values() if r.state != "asleep" for d in r.devices}
        return engines | {d: Holder("job", g.job_id) for g in self.groups.values() for d in g.devices}

    def with_replica(self, replica: ReplicaView) -> Box:
        return replace(self, replicas={**self.replicas, replica.id: replica})

    def with_group(self, group: GroupView) -> Box:
        return replace(self, groups={**self.groups, group.job_id: group})

    def without(self, holder: Holder) -> Box:
        if holder.kind == "job":
            return replace(self, groups={k: g for k, g in self.groups.items() if k != holder.id})
        return replace(self, replicas={k: r for k, r in self.replicas.items() if k != holder.id})


class Effects(Protocol):
    """The verbs. All except `observe` and `changed` are steps of a hand-over."""

    async def start_replica(self, plan: ReplicaView) -> Detail:
        """Start an engine process on the plan's devices, ordered by tensor-parallel rank, and load the version.
        Ends "ready": healthy, fingerprint agreed, taking no requests."""

    async def stop_replica(self, replica_id: str) -> Detail:
        """End the engine process, by force if necessary, and clean up. Succeeds for unknown, dead and hung engines."""

    async def open_replica(self, replica_id: str) -> Detail:
        """Add the replica to the routing table. Raises EffectFailed if it is dead or asleep."""

    async def drain_replica(self, replica_id: str) -> Detail:
        """Remove the replica from the routing table and wait until all its requests, streams included, are answered. It
        stays awake. Raises EffectFailed if the engine dies."""

    async def sleep_replica(self, replica_id: str) -> Detail:
        """Release the memory of weights and KV cache; the process continues. Only for drained replicas."""

    async def wake_replica(self, replica_id: str, model: str, version: str) -> Detail:
        """Wake the replica on its devices, with this version from shared memory. Ends "ready", fingerprint agreed."""

    async def swap_replica(self, replica_id: str, model: str, version: str) -> Detail:
        """Change the version of an awake replica without ending its requests. After EffectFailed, the old version is
        still served, or the engine is dead."""

    async def start_group(self, job_id: str, devices: tuple[str, ...], run: str) -> Detail:
        """Start one rank per device, from the job's newest snapshot if it has one. Returns when the ranks are in their
        training loop, or have already ended."""

    async def suspend_group(self, job_id: str) -> Detail:
        """Snapshot the last step boundary, or the next if it is near, and end all ranks. Also succeeds if the job
        finished first: the detail has "ended", and until `stop_group`, `observe` reports the group without devices.
        After EffectFailed, there is no snapshot, and the group still runs or is dead."""

    async def stop_group(self, job_id: str) -> Detail:
        """End all ranks by force, without a new snapshot. Succeeds for unknown and ended groups."""

    async def observe(self) -> Box:
        """Read the current state. Called at start, after failures and periodically."""

    async def changed(self) -> None:
        """Return when a process has ended by itself, or a node has joined or left. The caller then calls `observe`."""


StepState = Literal["doing", "done", "failed", "skipped"]
HandoverState = Literal["done", "undone", "failed"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step of a hand-over or of its undo. `seq`: number of the step, from 0, in order of start. `chain`: the move it
    belongs to. State "skipped": cancelled while in progress. `undoes`: in an undo, the failed step."""

    seq: int
    chain: str
    verb: str
    target: str
    state: StepState = "doing"
    started_s: float | None = None
    ended_s: float | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    undoes: int | None = None


class Journal(Protocol):
    """The record of all hand-overs. Only the loop writes to it."""

    def last_id(self) -> int:
        """The highest hand-over number ever used; 0 if none."""

    def begin(self, handover_id: int, reason: str, started_s: float, asked_by: str, asked_for: str) -> None:
        """Durably record a new hand-over, before its first step starts. asked_by: requester (name of a key, "box",
        "window <id>" or "scheduler"); asked_for: request."""

    def step(self, handover_id: int, record: StepRecord) -> None:
        """Durably insert or replace the step with this `seq`."""

    def end(self, handover_id: int, state: HandoverState, ended_s: float, error: str = "") -> None:
        """Durably close a hand-over. "done": every chain reached the wanted state. "undone": a chain failed and was
        undone. "failed": an undo failed too; later rounds repair the state."""

    def unfinished(self) -> list[int]:
        """Hand-overs that are not closed, oldest first; at start, those that a crash interrupted."""


class StateStore(Protocol):
    """The store of jobs, deployments and policy. Calls take little time, and writes are durable on return."""

    def load(self, *, free_devices: int) -> Workload:
        """The workload to schedule, given the number of free devices: unfinished jobs, deployments with their demand,
        policy.

        Re-read in every round. A job that a user cancelled or deleted is absent; a job that a user paused has phase
        "paused". The loop itself fills `devices`, `since_s`, `not_before_s`, `failed` and `busy` of jobs.
        """

    def job_running(self, job_id: str, devices: tuple[str, ...]) -> None:
        """Record that the job's ranks now train on these devices."""

    def job_coming(self, job_id: str, devices: tuple[str, ...], answering: int) -> None:
        """Record that the job gets these devices once engines on `answering` of the devices have drained."""

    def job_waiting(self, job_id: str, reason: str) -> None:
        """Record that the job holds no devices; `reason`: a sentence for users. Called again for a new reason."""

    def job_ended(self, job_id: str, outcome: Outcome, error: str) -> None:
        """Record that the job has ended; the next `load` omits it. May be repeated after a crash."""

    def model_trouble(self, model: str, trouble: Failure | None) -> None:
        """Record that replicas of the model fail, with a retry at `trouble.not_before_s`; None: recovered. Open
        replicas stay open."""

    def model_served(self, model: str, build: Build) -> None:
        """Record that an engine of this build has opened: the next `load` returns the build as `served`."""

    def settings_failed(self, model: str, failed: Build, served: Build, reason: str) -> bool:
        """Restore the settings that served last, because no engine starts with the current settings. No effect if these
        were changed meanwhile. False if the settings that served last are gone."""
