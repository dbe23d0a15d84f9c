"""Defines the verbs through which the loop changes the world. Implemented with Ray and by the simulator.

Contract of every verb:
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
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from scheduler.core.errors import Blame
from scheduler.core.inventory import Device, Holder
from scheduler.core.workload import ReplicaView

Detail = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """How a job's group ended by itself.

    `step`: the last training step that is safe (in a snapshot or published); a higher value than at the previous
    failure counts as progress. `retryable`: False if a retry cannot help (bad data, invalid configuration). `blame`:
    whose fault it was.
    """

    outcome: Literal["succeeded", "failed", "cancelled"]
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
