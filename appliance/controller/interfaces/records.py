"""Plain values that several parts of the controller exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from scheduler.core.workload import PolicyKind

TRAINING_FAILED = "training_failed"
"""The code of a job that failed once it ran."""


class DeviceStatus(TypedDict):
    """One device; `holder` is {"kind": "job" | "replica", "id"} or None."""

    id: str
    node: str
    index: int
    kind: str
    name: str
    memory_bytes: int
    health: str
    holder: dict[str, str] | None


class ReplicaStatus(TypedDict):
    id: str
    model: str
    version: str
    state: str
    devices: list[str]
    inflight: int
    rss_bytes: int


class SchedulerStatus(TypedDict):
    """`memory` is {"budget_bytes", "used_bytes", "room_bytes"} of the weight store, the last what a reservation could
    get now, "host_bytes", the host's total, "reserve_bytes", what is kept of it for others, and "asleep_per_device",
    the engines that may sleep on one; `handover` the id of the one in progress; `notes` for users (why something waits
    or was abandoned); `serving_floor` devices that serving keeps if a mode sets no number; `queue` jobs in order, each
    {"id", "position", "phase", "devices", "reason" (a Slurm reason code or None), "message" (a sentence)}; `plan_s`
    duration of the last plan; `troubles` the models whose engines fail, each {"model", "version", "reason", "message"
    (a sentence), "not_before_s" (of the next try), "tries", "lasting"}."""

    devices: list[DeviceStatus]
    replicas: list[ReplicaStatus]
    memory: dict[str, int | None]
    handover: str | None
    serving_floor: int
    queue: list[dict[str, Any]]
    troubles: list[dict[str, Any]]
    notes: list[str]
    plan_s: float


@dataclass(frozen=True, slots=True)
class Mode:
    """How devices are divided; stored under box["mode"], see `appliance.controller.devices.mode`.

    serving_floor None: the box's default. by: who set it.
    """

    policy: PolicyKind
    train_devices: int | None = None
    since_s: float = 0.0
    serving_floor: int | None = None
    by: str = ""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """body: the answer's JSON. version: of the replica that gave it, empty if none did."""

    status: int
    body: Any
    version: str = ""

    @property
    def error(self) -> str:
        """The message of an error; empty for an answer."""
        if self.status == 200:
            return ""
        return str(self._error.get("message") or f"The request failed with status {self.status}.")

    @property
    def code(self) -> str | None:
        return None if self.status == 200 else self._error.get("code")

    @property
    def _error(self) -> dict[str, Any]:
        return (self.body.get("error") if isinstance(self.body, dict) else None) or {}
