"""Interfaces of the loop: the verbs that change the world, the journal of hand-overs, the store of workloads.

Ray and the simulator implement the verbs. Contract of every verb:
- It returns when its effect holds, not when it was requested; its return value is detail for the journal (`bytes`,
  `seconds`, ...), a mapping or None.
- It is idempotent: if its effect already holds, it succeeds and changes nothing. The loop repeats verbs after a crash,
  because it cannot know whether the last one was carried out.
- It raises `EffectFailed` and nothing else when the effect was not achieved. Partial changes may remain: the
  loop undoes them (see handover.py) and reads the state again through `observe`.
- It ends within a second of the death of the process it waits for (a rank, an engine, a supervisor), with
  `EffectFailed` that says what died and whose fault that is (`blame`).
- It may be cancelled (time limits); then the same holds as after `EffectFailed`.
- Verbs for different targets run concurrently; for one target at most one at a time.

A journal is a log of events, written before and after each step; a write returns when it is durable. The loop needs it
neither for the current state (it observes) nor for the wanted state (it plans), but to close what a crash left open, to
never reuse a number, and as a history.
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
    """How a job's group ended by itself.

    `step`: the last training step that is safe (in a snapshot or published); a higher value than at the previous
    failure counts as progress. `retryable`: False if a retry cannot help (bad data, invalid configuration). `blame`:
    whose fault it was.
    """

    outcome: Outcome
    step: int = 0
    error: str = ""
    retryable: bool = True
    blame: Blame = "own"


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group of ranks that was started and neither suspended nor stopped.

    `ended`: it ended by itself, and only its processes remain, until `stop_group` cleans them up. `run`: which
    incarnation, as `start_group` named it; "" of one that this controller found running.
    """

    job_id: str
    devices: tuple[str, ...]
    since_s: float = 0.0
    ended: GroupEnded | None = None
    run: str = ""


@dataclass(frozen=True, slots=True)
class Box:
    """Devices, engines and groups at one moment, as read from the processes themselves; whoever has a process on a
    device holds it. Never changed in place."""

    devices: Mapping[str, Device] = field(default_factory=dict)
    replicas: Mapping[str, ReplicaView] = field(default_factory=dict)
    groups: Mapping[str, GroupView] = field(default_factory=dict)

    @classmethod
    def of(cls, devices: Iterable[Device], replicas: Iterable[ReplicaView], groups: Iterable[GroupView]) -> Box:
        return cls({d.id: d for d in devices}, {r.id: r for r in replicas}, {g.job_id: g for g in groups})

    @property
    def holders(self) -> dict[str, Holder]:
        """By device: the engine that is not asleep, or the job."""
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
    """The verbs. All but `observe` and `changed` are steps of a hand-over."""

    async def start_replica(self, plan: ReplicaView) -> Detail:
        """Start an engine process on the plan's devices, in this order by tensor-parallel rank, and load the version.
        Ends "ready": healthy, fingerprint agreed, taking no requests."""

    async def stop_replica(self, replica_id: str) -> Detail:
        """End the engine process, by force if necessary, and clean up. Unknown, dead or hung: succeeds."""

    async def open_replica(self, replica_id: str) -> Detail:
        """Add it to the routing table. Dead or asleep: EffectFailed."""

    async def drain_replica(self, replica_id: str) -> Detail:
        """Remove it from the routing table and wait until all its requests are answered, streams included. It stays
        awake. If the engine died in the meantime: EffectFailed."""

    async def sleep_replica(self, replica_id: str) -> Detail:
        """Release weights and KV memory, keep the process. Only called on a drained replica."""

    async def wake_replica(self, replica_id: str, model: str, version: str) -> Detail:
        """Wake with this version from shared memory, on its own devices. Ends "ready", fingerprint agreed."""

    async def swap_replica(self, replica_id: str, model: str, version: str) -> Detail:
        """Change the version of an awake replica, keeping its requests. EffectFailed: the old version is still served,
        or the engine is dead."""

    async def start_group(self, job_id: str, devices: tuple[str, ...], run: str) -> Detail:
        """Start one rank per device, from the job's newest snapshot if it has one. Ends when the ranks are in their
        training loop, or have already ended."""

    async def suspend_group(self, job_id: str) -> Detail:
        """Snapshot the last step boundary, or the next if it is near, and end all ranks. If the job finished
        first, it succeeds too: the detail has "ended", and `observe` shows the group, on no device, until `stop_group`.
        EffectFailed: no snapshot was made; the group still runs or is dead."""

    async def stop_group(self, job_id: str) -> Detail:
        """End all ranks by force, without a snapshot; earlier snapshots stay. Unknown or ended: succeeds."""

    async def observe(self) -> Box:
        """Read the current state. Called at start, after failures and periodically."""

    async def changed(self) -> None:
        """Wait until a process has ended by itself, or a node has come or gone: call `observe`."""


StepState = Literal["doing", "done", "failed", "skipped"]
HandoverState = Literal["done", "undone", "failed"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, or one step of an undo. `seq`: numbers the steps of a hand-over from 0 as they begin. `chain`: the move
    that it is of. skipped: cancelled while in progress. `undoes`: of an undo, the step whose failure caused it."""

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
    """Where hand-overs are recorded. Only the loop writes."""

    def last_id(self) -> int:
        """The highest hand-over number ever used; 0 if none."""

    def begin(self, handover_id: int, reason: str, started_s: float, asked_by: str, asked_for: str) -> None:
        """Durably record a new hand-over, before its first step starts. asked_by: a key's name, "box", "window <id>" or
        "scheduler"; asked_for: what that asked for."""

    def step(self, handover_id: int, record: StepRecord) -> None:
        """Durably insert or replace the step with this `seq`."""

    def end(self, handover_id: int, state: HandoverState, ended_s: float, error: str = "") -> None:
        """Durably close a hand-over. done: every chain reached the wanted state. undone: some chain failed and was
        undone. failed: some undo failed too; later rounds repair the rest."""

    def unfinished(self) -> list[int]:
        """Hand-overs without an end, oldest first: after a start, those that a crash interrupted."""


class StateStore(Protocol):
    """The store of jobs, deployments and policy. Calls are short and durable when they return."""

    def load(self, *, free_devices: int) -> Workload:
        """Everything to schedule now, where nobody holds this many devices: unfinished jobs, deployments with their
        demand, the policy.

        Re-read in every round. A job that a person cancelled or deleted is absent; a job to be paused has phase
        "paused". The loop itself fills `devices`, `since_s`, `not_before_s`, `failed` and `busy` of jobs.
        """

    def job_running(self, job_id: str, devices: tuple[str, ...]) -> None:
        """Its ranks train on these devices now."""

    def job_coming(self, job_id: str, devices: tuple[str, ...], answering: int) -> None:
        """It gets these devices: its ranks start once the engines on `answering` of them have finished."""

    def job_waiting(self, job_id: str, reason: str) -> None:
        """It holds no devices; `reason` is one sentence for users. Called again when the reason changes."""

    def job_ended(self, job_id: str, outcome: Outcome, error: str) -> None:
        """It has ended; the next `load` omits it. May be repeated after a crash."""

    def model_trouble(self, model: str, trouble: Failure | None) -> None:
        """Its replicas fail and are retried at `trouble.not_before_s`; open ones stay open. None: the trouble is
        over."""

    def model_served(self, model: str, build: Build) -> None:
        """An engine with the model's version, devices and settings has opened: the next `load` has it as `served`."""

    def settings_failed(self, model: str, failed: Build, served: Build, reason: str) -> bool:
        """No engine starts with these settings: put those that served in force again, unless they were changed
        meanwhile. False if those that served are gone."""
