"""Devices, and who may hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.devices.kinds import HOST

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
