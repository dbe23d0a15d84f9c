"""Plain values that several parts of the controller exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from appliance.store.database import Database
from appliance.store.objects import models
from scheduler.core.workload import AWAKE, PolicyKind

TRAINING_FAILED = "training_failed"
"""The code of a job that failed once it ran."""


SchedulerStatus = dict[str, Any]
"""As `Scheduler.status` makes it.

devices: each with its `holder`, {"kind": "job" | "replica", "id"} or None. memory: "room_bytes" is what a reservation
in the weight store could get now. handover: the id of the one in progress. handovers_ended:
`SqliteJournal.ended`. queue: jobs in order, each {"id",
"position", "phase", "devices", "reason" (a Slurm reason code or None), "message"}. troubles: models whose engines fail,
each {"model", "version", "reason", "message", "not_before_s" (of the next try), "tries", "lasting"}. notes: why
something waits or was abandoned, for users.
"""


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
    """body: the answer's JSON."""

    status: int
    body: Any

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


class ModelStates:
    """What each model does now, in a word, and why its engines fail; from one read of the scheduler's status."""

    def __init__(self, db: Database, status: SchedulerStatus):
        self._hosts = {row.name: row.host for row in models.callable_adapters(db)}
        self._replicas: dict[str, set[str]] = {}
        for replica in status["replicas"]:
            self._replicas.setdefault(replica["model"], set()).add(replica["state"])
        self._troubles = {trouble["model"]: trouble["message"] for trouble in status["troubles"]}

    def word(self, name: str) -> str:
        """serving (an engine is awake), failed (its engines do not start and are retried: `message` says why and when),
        asleep (a process waits with its memory released) or cold (no process)."""
        states = self._replicas.get(self.host(name), set())
        if "open" in states:
            return "serving"
        if self.message(name):
            return "failed"
        if not states.isdisjoint(AWAKE):
            return "serving"
        return "asleep" if "asleep" in states else "cold"

    def message(self, name: str) -> str | None:
        """Why its engines fail and when the next try is; None if they do not fail."""
        return self._troubles.get(self.host(name))

    def host(self, name: str) -> str:
        """The model on whose engines it is served."""
        return self._hosts.get(name, name)
