"""The routing table: which names can be called, and which engines answer them now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from appliance.controller.bus import Bus
from appliance.store import deployments, job_records, models
from appliance.store.database import Database
from appliance.store.deployments import given_up
from scheduler.workload import Demand


@dataclass(frozen=True, slots=True)
class _Served:
    model: str
    version: str
    socket: str
    state: str  # "open" or "draining"


class BusRouting:
    """Implements `scheduler.ray_replicas.Routing` on the bus; `refresh` after models came or went."""

    def __init__(self, bus: Bus, db: Database, hold_s: float, max_model_len: int | None = None):
        """max_model_len: what the box's engines are limited to, in tokens; None: each model's own context."""
        self._bus, self._db, self._hold_s, self._max_model_len = bus, db, hold_s, max_model_len
        self._replicas: dict[str, _Served] = {}

    async def open(self, replica_id: str, model: str, version: str, socket_path: str) -> None:
        self._replicas[replica_id] = _Served(model, version, socket_path, "open")
        await self._bus.wait_applied(self.refresh())

    async def drain(self, replica_id: str) -> None:
        served = self._replicas.get(replica_id)
        if served is not None:
            self._replicas[replica_id] = _Served(served.model, served.version, served.socket, "draining")
        self.refresh()
        await self._bus.wait_drained(replica_id)

    def is_open(self, replica_id: str) -> bool:
        served = self._replicas.get(replica_id)
        return served is not None and served.state == "open"

    def close(self, replica_id: str) -> None:
        if self._replicas.pop(replica_id, None) is not None:
            self.refresh()

    def refresh(self) -> int:
        """Publish the table as the store and the replicas have it now; returns its generation."""
        contexts = {row.id: row.max_model_len for row in models.list_callable(self._db)}
        contexts |= {row.name: contexts.get(row.model) for row in job_records.list_checkpoints(self._db)}
        return self._bus.set_models(
            {
                name: self._model(name, *rest) | {"max_model_len": self._context(contexts.get(name))}
                for name, rest in self._callable().items()
            }
        )

    def demand(self, model: str) -> Demand:
        """What the gateways report of a model, for the planner."""
        load = self._bus.load()
        row = load.models.get(model)
        if row is None:
            return Demand()
        waiting = sum(
            load.replicas[replica_id].waiting_tokens
            for replica_id, served in self._replicas.items()
            if served.model == model and replica_id in load.replicas
        )
        return Demand(row.inflight, row.held, waiting, row.last_request_s, row.ttft_p95_s)

    def _callable(self) -> dict[str, tuple[str, str, float]]:
        """Name to (version, task, seconds to hold): models with a deployment, and checkpoints of fine-tuning jobs.

        Nobody waits for a model that was given up on: its requests are refused at once.
        """
        rows = {row.id: row for row in models.list_callable(self._db)}
        found = {
            row.model: (
                rows[row.model].active_version,
                rows[row.model].task,
                0.0 if given_up(row, rows[row.model].active_version) else self._hold_s,
            )
            for row in deployments.list_all(self._db)
            if row.model in rows
        }
        for checkpoint in job_records.list_checkpoints(self._db):
            task = rows[checkpoint.model].task if checkpoint.model in rows else "generate"
            found[checkpoint.name] = (checkpoint.version, task, self._hold_s)
        return found

    def _context(self, model_tokens: int | None) -> int | None:
        # As serve.sizing gives it to the engine.
        return min(filter(None, (self._max_model_len, model_tokens)), default=None)

    def _model(self, name: str, version: str, task: str, hold_s: float) -> dict[str, Any]:
        replicas = [
            {"id": replica_id, "socket": served.socket, "version": served.version, "state": served.state}
            for replica_id, served in sorted(self._replicas.items())
            if served.model == name
        ]
        state = "ready" if any(replica["state"] == "open" for replica in replicas) else "asleep"
        return {"version": version, "state": state, "replicas": replicas, "task": task, "hold_s": hold_s}
