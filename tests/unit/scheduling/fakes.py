"""Stand-ins for dependencies of the scheduler's state store and of the routing table."""

from types import SimpleNamespace
from typing import Any

from appliance.controller.engines.routing_table import BusRouting
from appliance.controller.jobs.events import JobEvents
from appliance.controller.scheduling.state_store import SqliteStateStore
from appliance.store.database import Database
from scheduler.core.workload import Demand
from scheduler.devices.discovery import HOME_NODE

UNKNOWN_SIZES = SimpleNamespace(
    size=lambda row, version: SimpleNamespace(max_model_len=row.max_model_len, kv_tokens=None, max_num_seqs=None)
)
NO_ROUTING = SimpleNamespace(
    models_changed=lambda: None,
    refresh=lambda: None,
    trouble=lambda model, trouble: None,
    inflight=lambda _: 0,
    keep_policies=lambda is_kept: None,
    policies={},
    policy_adapters=dict,
    host=lambda name: name,
)

ENOUGH = SimpleNamespace(room_bytes=lambda: 1 << 60)


def routing_of(bus: Any, db: Database, sizes: Any = UNKNOWN_SIZES) -> BusRouting:
    """Build a routing table that does not publish keys."""
    return BusRouting(bus, db, sizes, SimpleNamespace(publish_keys=lambda: None))  # type: ignore[arg-type]


def states_of(
    db: Database,
    events: JobEvents,
    serving_floor: int = 1,
    max_replicas: int = 1,
    *,
    routing: Any = NO_ROUTING,
    demand: Any = lambda model: Demand(),
    learned: Any = lambda deployments: deployments,
    store: Any = ENOUGH,
    job_sizes: Any = lambda row: (),
    starved: Any = lambda row: False,
) -> SqliteStateStore:
    """Build a state store for a box with enough memory; `store` and `job_sizes` can limit the memory."""
    wishes, learning = SimpleNamespace(demands=lambda free_devices: demand), SimpleNamespace(learned=learned)
    enough = SimpleNamespace(
        waits_for=lambda row: "", job_nodes=lambda row: (HOME_NODE,), job_sizes=job_sizes, max_asleep=dict
    )
    return SqliteStateStore(db, events, serving_floor, max_replicas, routing, wishes, learning, enough, store, starved)  # type: ignore[arg-type]
