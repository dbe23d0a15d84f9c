"""The world from the hand-over's point of view: devices, holders, engines and groups of ranks at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scheduler.core.inventory import Device, Ledger
from scheduler.core.workload import ReplicaView
from scheduler.handover.effects import Observed


@dataclass(frozen=True, slots=True)
class GroupView:
    """An existing group of ranks. `ended`: its work is over, only its lease and processes remain."""

    job_id: str
    devices: tuple[str, ...]
    since_s: float = 0.0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Box:
    """Devices, ledger, replicas and groups at one moment. Steps turn one box into the next."""

    devices: Mapping[str, Device]
    ledger: Ledger
    replicas: Mapping[str, ReplicaView] = field(default_factory=dict)
    groups: Mapping[str, GroupView] = field(default_factory=dict)

    @classmethod
    def of(cls, observed: Observed, now_s: float) -> Box:
        """Raises LedgerConflict if the observed state has a device with two holders."""
        return cls(
            devices={d.id: d for d in observed.devices},
            ledger=Ledger(d.id for d in observed.devices).acquire(*observed.leases),
            replicas={r.id: replace(r, since_s=now_s, answered=True) for r in observed.replicas},
            groups={g.job_id: GroupView(g.job_id, g.devices, now_s, g.ended is not None) for g in observed.groups},
        )
