"""The verbs through which the loop touches the world. One implementation uses Ray, one is the simulator's.

Contract of every verb:
- It returns when its effect holds, not when it was asked for; what it returns is detail for the journal (`bytes`,
  `seconds`, ...), a mapping or None.
- It is idempotent: asked again in a world where its effect holds already, it succeeds and changes nothing. The loop
  repeats verbs after a crash, because it cannot know whether the last one was carried out.
- It raises `EffectFailed` and nothing else when the effect could not be had. Whatever it did until then may remain:
  the loop undoes it (handover.py says how) and reads the truth again through `observe`.
- It ends within a second of the death of whatever it waits for (a rank, an engine, a supervisor), with `EffectFailed`
  that says who died and whose fault that is (`blame`).
- It may be cancelled (time limits); the same holds then as after `EffectFailed`.
- Verbs for different targets run concurrently; for one target never more than one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from scheduler.core.errors import Blame
from scheduler.core.inventory import Device, Lease
from scheduler.core.workload import ReplicaState

Detail = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class ReplicaOrder:
    """A replica to be started. `devices`: the ids of its lease, in tensor-parallel rank order."""

    id: str
    model: str
    version: str
    tensor_parallel: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplicaObserved:
    """A replica's engine process as it is. `devices`: where it runs, or where it would wake. `answered`: False where it
    could not be asked now, and this is how it was when it last told."""

    id: str
    model: str
    version: str
    state: ReplicaState
    devices: tuple[str, ...]
    answered: bool = True


@dataclass(frozen=True, slots=True)
class ReplicaDied:
    """An engine process ended without being asked to. `blame`: whose fault that was."""

    replica_id: str
    reason: str
    blame: Blame = "own"


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """A job's group ended by itself: it finished, or failed. Not sent for an end that the loop asked for.

    `lease_id`: which incarnation. `step`: the last training step that is safe (in a snapshot or published);
    more of it than at the previous failure counts as progress. `retryable`: False where trying again cannot help
    (bad data, invalid configuration). `blame`: whose fault a failure was.
    """

    job_id: str
    lease_id: str
    outcome: Literal["succeeded", "failed", "cancelled"]
    step: int = 0
    error: str = ""
    retryable: bool = True
    blame: Blame = "own"


@dataclass(frozen=True, slots=True)
class GroupObserved:
    """A group of ranks that was started and neither suspended nor stopped.

    `ended`: it ended by itself; the same that its GroupEnded event says, until `stop_group` cleans it up. So an end
    that comes while no loop is listening is not lost.
    """

    job_id: str
    devices: tuple[str, ...]
    lease_id: str
    ended: GroupEnded | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """The truth, read from the processes and reservations themselves, never from a record of what was asked."""

    devices: tuple[Device, ...]
    leases: tuple[Lease, ...] = ()
    replicas: tuple[ReplicaObserved, ...] = ()
    groups: tuple[GroupObserved, ...] = ()


@dataclass(frozen=True, slots=True)
class InventoryChanged:
    """Devices or nodes came or went: `observe` tells."""


Event = ReplicaDied | GroupEnded | InventoryChanged


class Effects(Protocol):
    """The verbs. All but `observe` and `next_event` are steps of a hand-over."""

    async def acquire(self, lease: Lease) -> Detail:
        """Reserve exactly these devices for this holder. Held by another lease: EffectFailed. Again: no change."""

    async def release(self, lease_id: str) -> Detail:
        """Give the devices back. Unknown id: no change. Never called while the holder uses them."""

    async def start_replica(self, order: ReplicaOrder, lease_id: str) -> Detail:
        """Start an engine process on the lease's devices and load the version. Ends "ready": healthy, fingerprint
        agreed, taking no requests."""

    async def stop_replica(self, replica_id: str) -> Detail:
        """End the engine process, by force if need be, and clean up after it. Unknown, dead or hung: succeeds."""

    async def open_replica(self, replica_id: str) -> Detail:
        """Put it into the routing table. Dead or asleep: EffectFailed."""

    async def drain_replica(self, replica_id: str) -> Detail:
        """Take it out of the routing table and wait until every request it has is answered, streams included.
        It stays awake. If the engine died meanwhile: EffectFailed."""

    async def sleep_replica(self, replica_id: str) -> Detail:
        """Give back weights and KV memory, keep the process. Only ever called on a drained replica."""

    async def wake_replica(self, replica_id: str, model: str, version: str, lease_id: str) -> Detail:
        """Wake with this version from shared memory, on its own devices. Ends "ready", fingerprint agreed."""

    async def swap_replica(self, replica_id: str, model: str, version: str) -> Detail:
        """Change the version of an awake replica, its requests kept. EffectFailed: the old version serves on, or the
        engine is dead and a ReplicaDied event says so."""

    async def start_group(self, job_id: str, lease: Lease) -> Detail:
        """Start one rank per device, from the job's newest snapshot if it has one. Ends when the ranks are in their
        training loop, or have ended already (a GroupEnded event says so)."""

    async def suspend_group(self, job_id: str) -> Detail:
        """Snapshot of the last step boundary, or of the next if it is near, and end all ranks. If the job finished or
        failed first, that is fine: the group has no process any more, and a GroupEnded event says what happened.
        EffectFailed: no snapshot was made; the group runs on or is dead."""

    async def stop_group(self, job_id: str) -> Detail:
        """End all ranks by force, without a snapshot; earlier snapshots stay. Unknown or ended: succeeds."""

    async def observe(self) -> Observed:
        """The truth. Called at start, after failures and now and then."""

    async def next_event(self) -> Event:
        """The next spontaneous event, in order; waits for one. Events may repeat what `observe` told already."""
