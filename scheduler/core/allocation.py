"""The planner's output: who should hold which exact devices, and why the others wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.core.workload import Hysteresis


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The wanted state of a replica: "open" on its devices, or "asleep" on its last devices without holding them.
    `settings`: those that a new engine gets."""

    id: str
    model: str
    version: str
    tensor_parallel: int
    devices: tuple[str, ...]
    state: str
    settings: str = ""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A job's group of ranks, one per device."""

    job_id: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """Who should hold what. A replica not named here should be stopped; a job not named should hold nothing.

    waiting: job id to the sentence why it does not run. notes: model to the sentence why it has fewer replicas than
    needed. hysteresis: input of the next plan. review_at_s: when the answer may change without an event.
    """

    replicas: tuple[ReplicaPlan, ...] = ()
    groups: tuple[GroupPlan, ...] = ()
    waiting: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    hysteresis: dict[str, Hysteresis] = field(default_factory=dict)
    review_at_s: float | None = None

    @property
    def open_replicas(self) -> tuple[ReplicaPlan, ...]:
        return tuple(r for r in self.replicas if r.state == "open")
