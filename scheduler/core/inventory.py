"""Devices, and the ledger of who holds them.

Invariant, by construction: the ledger maps each device to at most one lease. No ledger can violate this: entries are
added only by `acquire`, which raises instead, and a ledger is immutable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from runtime.devices.kinds import HOST
from scheduler.core.errors import DeviceHeld, InvalidWorkload, LeaseMismatch, UnknownDevice

Health = Literal["ok", "draining"]
CORDONED = "cordoned"
"""Why a device drains whose cordon the loop has read; who cordoned it is in the store."""
NodeChange = Literal["joined", "left", "lost"]
"""What happened to a node with its devices. left: in order, when nobody held them any more."""


@dataclass(frozen=True, slots=True)
class Device:
    """One whole accelerator (or one logical CPU device).

    `id` is "<node>/<index>", `kind` a row of runtime.devices.kinds. `numa_node` is None if unknown. `linked`
    names devices of the same node with a direct link. `health`: "ok"; "draining" (its holder must leave, because of a
    cordon or because its node leaves). `uuid` and `unfit`: as in runtime.devices.kind.Found, when the node began.
    """

    id: str
    node: str
    index: int
    kind: str = HOST.name
    name: str = ""
    memory_bytes: int = 0
    numa_node: int | None = None
    linked: frozenset[str] = frozenset()
    health: Health = "ok"
    health_reason: str = ""
    uuid: str = ""
    unfit: str = ""

    @property
    def usable(self) -> bool:
        return self.health == "ok"


def node_of(device_id: str) -> str:
    """The node's name in a device's id, "n1" of "n1/0"."""
    return device_id.partition("/")[0]


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """What may hold devices: a replica or a job's group of ranks."""

    kind: Literal["replica", "job"]
    id: str

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"


@dataclass(frozen=True, slots=True)
class Lease:
    """A holder's right to exact devices. A lease is immutable: other devices mean another lease with another id."""

    id: str
    holder: Holder
    device_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.device_ids or len(set(self.device_ids)) != len(self.device_ids):
            raise InvalidWorkload(f"devices of lease {self.id}", self.device_ids, "one or more different device ids")


class Ledger:
    """Immutable map from device to lease. `acquire` and `release` return a new ledger."""

    __slots__ = ("_lease_of", "_leases")
    _lease_of: MappingProxyType[str, str | None]
    _leases: MappingProxyType[str, Lease]

    def __init__(self, device_ids: Iterable[str]):
        object.__setattr__(self, "_lease_of", MappingProxyType(dict.fromkeys(device_ids)))
        object.__setattr__(self, "_leases", MappingProxyType({}))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a ledger never changes: acquire() and release() return a new one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a ledger never changes")

    @classmethod
    def _of(cls, lease_of: dict[str, str | None], leases: dict[str, Lease]) -> Ledger:
        ledger = cls.__new__(cls)
        object.__setattr__(ledger, "_lease_of", MappingProxyType(lease_of))
        object.__setattr__(ledger, "_leases", MappingProxyType(leases))
        return ledger

    def acquire(self, *wanted: Lease) -> Ledger:
        """The ledger with these leases added, all or none; a lease that exists already changes nothing.

        Raises:
            UnknownDevice: a device id that the ledger was not made for.
            DeviceHeld: a device that another lease holds.
            LeaseMismatch: a known lease id with other devices or another holder.
        """
        # proxy.copy() copies the underlying dict directly; dict(proxy) looks up key by key.
        lease_of, leases = self._lease_of.copy(), self._leases.copy()
        for lease in wanted:
            known = leases.get(lease.id)
            if known is not None:
                if known != lease:
                    raise LeaseMismatch(lease.id, f"{lease.holder} on {lease.device_ids}", str(known))
                continue
            for device_id in lease.device_ids:
                if device_id not in lease_of:
                    raise UnknownDevice(device_id, len(lease_of))
                if (held_by := lease_of[device_id]) is not None:
                    raise DeviceHeld(device_id, lease.id, held_by)
                lease_of[device_id] = lease.id
            leases[lease.id] = lease
        return Ledger._of(lease_of, leases)

    def release(self, lease_id: str) -> Ledger:
        """The ledger without this lease; an unknown lease id changes nothing."""
        if lease_id not in self._leases:
            return self
        lease_of, leases = self._lease_of.copy(), self._leases.copy()
        for device_id in leases.pop(lease_id).device_ids:
            lease_of[device_id] = None
        return Ledger._of(lease_of, leases)

    def resized(self, device_ids: Iterable[str]) -> Ledger:
        """The ledger over another set of devices (nodes join and leave). Held devices stay in it."""
        lease_of: dict[str, str | None] = dict.fromkeys(device_ids)
        lease_of.update({d: lease for d, lease in self._lease_of.items() if lease is not None})
        return Ledger._of(lease_of, self._leases.copy())

    def lease(self, lease_id: str) -> Lease | None:
        return self._leases.get(lease_id)

    def lease_on(self, device_id: str) -> Lease | None:
        """Raises UnknownDevice."""
        if device_id not in self._lease_of:
            raise UnknownDevice(device_id, len(self._lease_of))
        lease_id = self._lease_of[device_id]
        return None if lease_id is None else self._leases[lease_id]

    def of(self, holder: Holder) -> Lease | None:
        """The lease of a holder (the first by id, if a crash left two)."""
        return min((le for le in self._leases.values() if le.holder == holder), key=lambda le: le.id, default=None)

    @property
    def leases(self) -> Mapping[str, Lease]:
        return self._leases

    @property
    def device_ids(self) -> tuple[str, ...]:
        return tuple(self._lease_of)

    @property
    def free(self) -> frozenset[str]:
        return frozenset(d for d, lease in self._lease_of.items() if lease is None)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._lease_of == other._lease_of and self._leases == other._leases

    def __hash__(self) -> int:
        return hash((frozenset(self._lease_of.items()), frozenset(self._leases.items())))

    def __repr__(self) -> str:
        held = ", ".join(f"{le.id}: {le.holder} on {'+'.join(le.device_ids)}" for le in self._leases.values())
        return f"Ledger({len(self._lease_of)} devices; {held or 'nothing held'})"
