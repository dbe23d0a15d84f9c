"""Builds the routing table: the callable names, and the engines that serve them now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from appliance.controller.access.limits import Spending
from appliance.controller.access.model_access import resolve
from appliance.controller.bus.bus import Bus, ModelLoad
from appliance.controller.engines.versions import EngineSizes
from appliance.gateway.core.table import OPEN
from appliance.store import models
from appliance.store.database import Database
from appliance.store.models import AdapterRow, callable_adapters
from appliance.store.rows import DEPLOYMENTS, CanaryRow, ModelRow
from scheduler.core.failures import Failure
from scheduler.core.workload import Demand
from serve.core.sizing import EngineSize
from weights.format.names import policy_of

# Requests for a model whose engine failed are held if its next start is at most this far away, else refused with the
# time of that start. The second bound is for a start that will most likely fail too.
HOLD_BEFORE_S, HOLD_BEFORE_LASTING_S = 10.0, 1.0


@dataclass(slots=True)
class _Served:
    """The version that a replica serves. `owner`: the version's model; `model` is the name under which it is served."""

    model: str
    version: str
    owner: str
    socket: str
    state: str = OPEN  # or "draining"
    takes_adapters: bool = True


@dataclass(frozen=True, slots=True)
class Policy:
    """A model in training. version: of its full weights, which have their own engines; "": it is an adapter, served by
    engines of its base."""

    base: str
    base_version: str
    version: str


@dataclass(frozen=True, slots=True)
class _Callable:
    """A callable name. of: its model, whose owners may use the name; "" for a model in training. canary: version that
    takes a share of its requests. pins: for `MODEL@VERSION`, the model that engines serve; else None."""

    of: str
    version: str
    task: str
    adapter: AdapterRow | None = None
    canary: CanaryRow | None = None
    pins: str | None = None

    @property
    def host(self) -> str | None:
        """The model whose engines serve this name; None: the name's own engines."""
        return self.adapter.host if self.adapter is not None else self.pins


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of one model. names: the model's name and its adapters' names. prefill_tokens_per_s, kv_tokens: rate and
    cache of one replica, None if unknown."""

    names: tuple[str, ...] = ()
    prefill_tokens_per_s: float | None = None
    kv_tokens: int | None = None


class BusRouting:
    """Implements `scheduler.ray.effects.Routing` on the bus; call `refresh` after models were added or removed."""

    def __init__(self, bus: Bus, db: Database, sizes: EngineSizes, spending: Spending):
        self._bus, self._db, self._engine_sizes, self._spending = bus, db, sizes, spending
        self._troubles: dict[str, Failure] = {}
        self._replicas: dict[str, _Served] = {}
        self._avoided: set[str] = set()  # includes closed replicas: engines may hang before a controller starts
        self._names: dict[str, _Callable] = {}
        self._guests: dict[str, list[str]] = {}  # {model: other names that its engines serve}
        self._sizes: dict[str, EngineSize] = {}  # {model: size of its engines}
        self.policies: dict[str, Policy] = {}

    async def open(self, replica_id: str, model: str, version: str, socket_path: str) -> None:
        match = resolve(self._db, model)
        self._replicas[replica_id] = _Served(model, version, match.model.id if match else model, socket_path)
        await self.wait_applied()

    async def drain(self, replica_id: str) -> None:
        if (served := self._replicas.get(replica_id)) is not None:
            served.state = "draining"
        self.refresh()
        await self._bus.wait_drained(replica_id)

    async def withhold_adapters(self, replica_id: str) -> None:
        if (served := self._replicas.get(replica_id)) is not None:
            served.takes_adapters = False
        await self.wait_applied()

    def offer_adapters(self, replica_id: str) -> None:
        if (served := self._replicas.get(replica_id)) is not None:
            served.takes_adapters = True
        self.refresh()

    def avoid(self, replica_id: str, avoided: bool) -> None:
        if avoided != (replica_id in self._avoided):
            self._avoided ^= {replica_id}
            self.refresh()

    def version(self, replica_id: str) -> str:
        """Return the version that a replica serves; "" unless the replica is open."""
        served = self._replicas.get(replica_id)
        return served.version if served is not None and served.state == OPEN else ""

    def open_engines(self) -> dict[str, tuple[str, str]]:
        """Return {replica: (model, socket)} of replicas that answer requests and are alive."""
        return {
            replica_id: (served.model, served.socket)
            for replica_id, served in self._replicas.items()
            if served.state == OPEN and replica_id not in self._avoided
        }

    def close(self, replica_id: str) -> None:
        self._avoided.discard(replica_id)
        if self._replicas.pop(replica_id, None) is not None:
            self.refresh()

    def trouble(self, model: str, trouble: Failure | None) -> None:
        """Publish why the model's engines do not start; None: they start."""
        self._troubles.pop(model, None)
        if trouble is not None:
            self._troubles[model] = trouble
        self.refresh()

    def models_changed(self) -> None:
        """Publish the callable models and keys: a key may call the models that its owner's jobs made."""
        self.refresh()
        self._spending.publish_keys()

    def refresh(self) -> int:
        """Publish the table from the current store and replicas; returns its generation."""
        rows = {row.id: row for row in models.list_all(self._db, "active_version IS NOT NULL")}
        self._names, self._guests = self._callable(rows), {}
        for name, row in self._names.items():
            if row.host is not None:
                self._guests.setdefault(row.host, []).append(name)
        self._sizes = {name: self._engine_sizes.size(row, None) for name, row in rows.items()}
        audiences = models.audiences(self._db)
        silent = models.without_chat_template(self._db)
        in_force = models.settings_in_force(self._db) if silent else {}
        with_template = {name for name, row in in_force.items() if row.settings.get("chat_template")}
        table = {}
        for name, row in self._names.items():
            chats = (row.of, row.version) not in silent or row.of in with_template
            table[name] = self._model(name, row) | {"owners": audiences.get(row.of, []), "chats": chats}
        return self._bus.publish(models=table)

    async def offer_policy(self, name: str, base: str, base_version: str, version: str) -> None:
        """Have the gateway serve a model in training to the box itself."""
        if self.policies.get(name) != (policy := Policy(base, base_version, version)):
            self.policies[name] = policy
            self.refresh()
        await self._bus.wait_applied(self._bus.generation)  # wait also if the gateway has not applied an earlier offer

    def keep_policies(self, is_kept: Callable[[str], bool]) -> None:
        """Withdraw all other models in training."""
        kept = {name: policy for name, policy in self.policies.items() if is_kept(name)}
        if kept != self.policies:
            self.policies = kept
            self.refresh()

    def policy_adapters(self) -> dict[str, AdapterRow]:
        """Models in training that are adapters, by name."""
        adapters = {}
        for name, policy in self.policies.items():
            base = None if policy.version else models.find(self._db, policy.base)
            if base is not None and base.active_version is not None:
                adapters[name] = AdapterRow(name, name, "", base.id, policy.base_version, base.active_version)
        return adapters

    async def wait_applied(self) -> None:
        """Return when the gateway routes by the current table."""
        await self._bus.wait_applied(self.refresh())

    def host(self, name: str) -> str:
        """Return the model whose engines serve a name: the name's own model, except for adapters."""
        row = self._names.get(name)
        return (row.host if row is not None else None) or name

    def demand(self, model: str) -> Demand:
        """Return the demand for a model and its adapters, from the gateway's report, for the planner."""
        rows = self._loads(self._served_by(model))
        return Demand(
            sum(row.inflight for row in rows),
            sum(row.held for row in rows),
            sum(row.waiting_prompt_tokens for row in rows),
            max((row.last_request_s for row in rows if row.last_request_s is not None), default=None),
            max((row.tpot_p95_s for row in rows if row.tpot_p95_s is not None), default=None),
            # Tokens to compute, excluding tokens in the prefix cache.
            round(sum(row.prompt_tokens * (1.0 if row.computed_part is None else row.computed_part) for row in rows)),
        )

    def traffic(self, model: str) -> Traffic:
        """Return the names that a model's engines serve, and a replica's rate of computing prompts."""
        names = self._served_by(model)
        rows, size = self._loads(names), self._sizes.get(model)
        rates = [row.prefill_tokens_per_s for row in rows if row.prefill_tokens_per_s]
        return Traffic(names, min(rates, default=None), size.kv_tokens if size is not None else None)

    def _served_by(self, model: str) -> tuple[str, ...]:
        """Return the names that a model's engines serve."""
        return model, *self._guests.get(model, ())

    def _loads(self, names: tuple[str, ...]) -> list[ModelLoad]:
        reported = self._bus.load().models
        return [reported[name] for name in names if name in reported]

    def _callable(self, rows: Mapping[str, ModelRow]) -> dict[str, _Callable]:
        """Return the callable names: models with a deployment, their canaries, checkpoints of jobs, `MODEL@VERSION` of
        versions that are active or served by an engine, and models in training."""
        guests = {row.name: row for row in callable_adapters(self._db)}
        deployed = [row.model for row in DEPLOYMENTS.list_all(self._db) if row.model in rows]
        callables = {}
        for name in deployed:
            callables[name] = _Callable(name, rows[name].active_version or "", rows[name].task, guests.get(name))
        for name, model, version in models.checkpoint_names(self._db):
            task = rows[model].task if model in rows else "generate"
            callables[name] = _Callable(model, version, task, guests.get(name))
        for canary in models.running_canaries(self._db):
            stable = callables.get(canary.model)
            if stable is not None:
                callables[canary.model] = replace(stable, canary=canary)
                callables[canary.name] = replace(stable, version=canary.version, adapter=guests.get(canary.name))
        for name in deployed:
            row = replace(callables[name], canary=None, pins=name)
            for version in {row.version, *(r.version for r in self._replicas.values() if r.model == name)}:
                callables.setdefault(f"{name}@{version}", replace(row, version=version))
        for name, adapter in self.policy_adapters().items():
            callables[name] = _Callable("", adapter.base_version, "generate", adapter)
        for name, policy in self.policies.items():
            if policy.version and policy.base in rows:
                callables[name] = _Callable("", policy.version, "generate")
        return callables

    def _model(self, name: str, row: _Callable) -> dict[str, Any]:
        """Return a row in the form of `appliance.gateway.core.table.Model`."""
        replicas = [
            {
                "id": replica_id,
                "socket": served.socket,
                "version": row.version if row.adapter else served.version,
                "state": served.state,
                "avoid": replica_id in self._avoided,
            }
            for replica_id, served in sorted(self._replicas.items())
            if _answers(served, name, row)
        ]
        policy, canary = self.policies.get(name), row.canary
        size = self._sizes.get(policy.base if policy is not None else row.of)
        trouble, failure = self._troubles.get(row.host or name), None
        version = row.adapter.base_version if row.adapter else row.version
        if trouble is not None and trouble.version == version and all(replica["state"] != OPEN for replica in replicas):
            failure = {
                "reason": trouble.reason,
                "next_try_s": trouble.not_before_s,
                "hold_before_s": HOLD_BEFORE_LASTING_S if trouble.lasting else HOLD_BEFORE_S,
            }
        return {
            "version": row.version,
            "replicas": replicas,
            "task": row.task,
            "max_model_len": size.max_model_len if size is not None else None,
            "slots": size.max_num_seqs if size is not None else None,
            "host": row.host or "",
            "trouble": failure,
            "trained_from": policy.base if policy is not None else "",
            # Requests for an adapter in training name its version themselves.
            "adapter": row.adapter.engine_name if row.adapter and policy is None else "",
            "pins": row.pins if row.pins and not row.adapter else "",
            "canary": {"name": canary.name, "share": canary.share, "since_s": canary.created_s} if canary else None,
        }


def _answers(served: _Served, name: str, row: _Callable) -> bool:
    """Return whether a replica can take requests for `name`. An adapter fits only its training's base weights."""
    adapter = row.adapter
    if adapter is not None:
        if policy_of(name) is not None and not served.socket.startswith("/"):
            return False  # ranks write a policy only to the shared memory of their own machine
        return served.takes_adapters and (served.owner, served.version) == (adapter.base, adapter.base_version)
    if row.pins is not None:
        return (served.model, served.version) == (row.pins, row.version)
    return served.model == name and (policy_of(name) is None or served.version == row.version)
