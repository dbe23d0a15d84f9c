"""What each model does now: one word, and a sentence if its engines fail. Source for `appliance status`, `model list`,
`model show` and `/v1/models`."""

from __future__ import annotations

from appliance.controller.interfaces.records import SchedulerStatus
from appliance.store.database import Database
from appliance.store.objects import adapters
from scheduler.core.workload import AWAKE


class ModelStates:
    """The states from one read of the scheduler's status."""

    def __init__(self, db: Database, status: SchedulerStatus):
        self._hosts = {row.name: row.host for row in adapters.list_callable(db)}
        self._replicas: dict[str, set[str]] = {}
        for replica in status["replicas"]:
            self._replicas.setdefault(replica["model"], set()).add(replica["state"])
        self._troubles = {trouble["model"]: trouble["message"] for trouble in status["troubles"]}

    def word(self, name: str) -> str:
        """serving (an engine is awake), failed (its engines do not start and are retried: `message` says why and when),
        asleep (a process waits with its memory released) or cold (no process)."""
        states = self._replicas.get(self._host(name), set())
        if "open" in states:
            return "serving"
        if self.message(name):
            return "failed"
        if not states.isdisjoint(AWAKE):
            return "serving"
        return "asleep" if "asleep" in states else "cold"

    def message(self, name: str) -> str | None:
        """Why its engines fail and when the next try is; None if they do not fail."""
        return self._troubles.get(self._host(name))

    def _host(self, name: str) -> str:
        """The model on whose engines it is served."""
        return self._hosts.get(name, name)
