"""Engine specs for unit tests."""

from typing import Any

from serve.core.spec import ReplicaSpec


def spec(**changes: Any) -> ReplicaSpec:
    """Spec of an engine on one host device, with `changes`."""
    order: dict[str, Any] = {
        "replica_id": "r1",
        "model": "m",
        "version": "v1",
        "version_path": "/dev/shm/appliance-1/versions/m/v1",
        "socket_path": "/dev/shm/appliance-1/run/r/r1.sock",
        "devices": (3,),
        "kind": "cpu",
        "shm_root": "/dev/shm/appliance-1",
        "kv_cache_bytes": 1 << 20,
    }
    return ReplicaSpec(**order | changes)
