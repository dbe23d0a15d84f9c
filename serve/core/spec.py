"""Defines the spec of one replica, which travels as JSON from the scheduler to the forked engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from runtime.devices.kinds import KINDS
from serve.core import segments
from serve.core.errors import InvalidReplicaSpec

TASKS = ("generate", "embed")
DTYPES = ("auto", "bfloat16", "float16", "float32")
_LISTS = ("devices", "extra_args", "adapter_roots", "numa_nodes")
# struct sockaddr_un.sun_path holds 108 bytes including the final NUL.
MAX_SOCKET_PATH_BYTES = 107
# vLLM names its inner sockets by a UUID inside the scratch directory.
INNER_SOCKET_BYTES = 38


@dataclass(frozen=True)
class ReplicaSpec:
    """One vLLM engine on one or more devices.

    `devices` are local device indexes on the replica's `node`; `tensor_parallel` of them are used.
    `kv_cache_bytes` is per worker and required: the meaning of vLLM's own memory fraction differs between versions.
    `max_model_len` None takes the model's own. `version_path` is a HF checkpoint directory on tmpfs. One batch holds at
    most `adapter_slots` LoRA adapters of rank up to `adapter_max_rank` (0: none); `adapters_resident` stay loaded. The
    engine searches `adapter_roots` in order for `<name>/<version>`, then asks the box at the socket `adapter_source`
    ("": it does not ask). `otlp_endpoint` is the base URL of an OTLP/HTTP collector that gets a span of every request
    ("": no spans). `numa_nodes` are those of the devices, and the engine's processes run on them; None or empty:
    anywhere. `gpu_memory_fraction` of a GPU must be free when the engine starts. `settings` names the model's own
    settings ("": none); `chat_template` and `system_prompt` are texts ("": the checkpoint's, and none);
    `own_tool_parser`, `own_reasoning_parser`: those of the model's family parse its tool calls and its reasoning, if
    there are such.
    Raises InvalidReplicaSpec.
    """

    replica_id: str
    model: str
    version: str
    version_path: str
    socket_path: str
    devices: tuple[int, ...]
    kind: str
    shm_root: str
    kv_cache_bytes: int
    tensor_parallel: int = 1
    dtype: str = "bfloat16"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    task: str = "generate"
    threads_per_worker: int = 1
    extra_args: tuple[str, ...] = ()
    adapter_slots: int = 0
    adapter_max_rank: int = 0
    adapters_resident: int = 0
    adapter_roots: tuple[str, ...] = ()
    adapter_source: str = ""
    otlp_endpoint: str = ""
    gpu_memory_fraction: float = 0.92
    node: str = "n0"
    numa_nodes: tuple[int | None, ...] = ()
    settings: str = ""
    chat_template: str = ""
    system_prompt: str = ""
    own_tool_parser: bool = True
    own_reasoning_parser: bool = True

    def __post_init__(self) -> None:
        for field in ("replica_id", "model", "version"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise InvalidReplicaSpec(field, value, "a non-empty string")
        for field in ("version_path", "socket_path", "shm_root"):
            if not Path(getattr(self, field)).is_absolute():
                raise InvalidReplicaSpec(field, getattr(self, field), "an absolute path")
        limit = MAX_SOCKET_PATH_BYTES - INNER_SOCKET_BYTES
        if len(self.socket_path.encode()) > limit:
            raise InvalidReplicaSpec(
                "socket_path",
                self.socket_path,
                f"at most {limit} bytes, so that vLLM's sockets below it stay within a Unix socket's limit",
            )
        for field, allowed in (("kind", KINDS), ("task", TASKS), ("dtype", DTYPES)):
            if getattr(self, field) not in allowed:
                raise InvalidReplicaSpec(field, getattr(self, field), f"one of {', '.join(allowed)}")
        if not 0 < self.gpu_memory_fraction <= 1:
            raise InvalidReplicaSpec("gpu_memory_fraction", self.gpu_memory_fraction, "above 0 and at most 1")
        for field in ("tensor_parallel", "max_num_seqs", "kv_cache_bytes", "threads_per_worker"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidReplicaSpec(field, value, "a whole number of at least 1")
        if self.adapter_slots and (self.adapter_max_rank < 1 or self.adapters_resident < self.adapter_slots):
            raise InvalidReplicaSpec(
                "adapters_resident",
                (self.adapter_max_rank, self.adapters_resident),
                f"a rank of at least 1, and at least the {self.adapter_slots} adapters of one batch",
            )
        if self.max_model_len is not None and self.max_model_len < 1:
            raise InvalidReplicaSpec("max_model_len", self.max_model_len, "a whole number of at least 1, or null")
        if len(self.devices) < self.tensor_parallel or len(set(self.devices)) != len(self.devices):
            raise InvalidReplicaSpec(
                "devices", self.devices, f"at least {self.tensor_parallel} different indexes (one per worker)"
            )

    @property
    def scratch_path(self) -> str:
        """Private directory of the running engine, for vLLM's inner sockets and rendezvous files."""
        return str(Path(self.socket_path).with_suffix(".d"))

    @property
    def segment_prefix(self) -> str:
        """Name prefix of all segments that the engine creates in /dev/shm."""
        return segments.prefix_of(self.socket_path)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReplicaSpec:
        """Inverse of `to_json`. Raises InvalidReplicaSpec on unknown or missing fields."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise InvalidReplicaSpec(unknown[0], data[unknown[0]], f"only the fields {', '.join(sorted(known))}")
        values = dict(data)
        for field in _LISTS:
            if field in values:
                values[field] = tuple(values[field])
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidReplicaSpec("fields", sorted(data), str(error)) from error

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values only."""
        lists = {field: list(getattr(self, field)) for field in _LISTS}
        return {**asdict(self), **lists}
