"""Defines the replica spec, which the scheduler sends as JSON to the forked engine."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, model_validator
from pydantic.dataclasses import dataclass

# struct sockaddr_un.sun_path holds 108 bytes including the final NUL; vLLM's inner sockets in the scratch directory are
# named by a UUID, 38 bytes with the slash.
MAX_SOCKET_PATH_BYTES = 107 - 38
SEGMENTS = Path("/dev/shm")
"""Where engines create segments outside the box's folder; their names let any surviving process remove them."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ReplicaSpec:
    """One vLLM engine on one or more devices. Raises pydantic.ValidationError.

    version_path: a HF checkpoint directory on tmpfs. kind: the devices' kind. host: this machine's address on the box's
    network, where the engine listens too ("": only on the socket). devices: device indexes on the replica's `node`; the
    engine uses `tensor_parallel` of them. kv_cache_bytes: bytes per worker. gpu_memory_fraction: share of a
    GPU that must be free at the start. max_model_len: context in tokens (None: the model's length). task: "generate" or
    "embed". numa_nodes: the devices' NUMA nodes, where the engine runs (empty or None: anywhere).

    adapter_slots: LoRA adapters of rank up to `adapter_max_rank` in one batch (0: none); `adapters_resident` of them
    stay loaded. Engines look up adapters in `adapter_roots`, as `<root>/<name>/<version>`, then at the socket
    `adapter_source` ("": never). otlp_endpoint: base URL of an OTLP/HTTP collector of spans ("": no spans).

    settings: digest of the model's settings ("": none). chat_template: text ("": the checkpoint's template).
    system_prompt: text ("": none). tool_parser, reasoning_parser: vLLM's name or "none" ("": the family's parser).
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
    host: str = ""
    numa_nodes: tuple[int | None, ...] = ()
    settings: str = ""
    chat_template: str = ""
    system_prompt: str = ""
    tool_parser: str = ""
    reasoning_parser: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> ReplicaSpec:
        if len(self.socket_path.encode()) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(
                f"socket_path is {self.socket_path}, expected at most {MAX_SOCKET_PATH_BYTES} bytes, so that vLLM's "
                "longer socket paths fit too"
            )
        if len(self.devices) < self.tensor_parallel or len(set(self.devices)) != len(self.devices):
            raise ValueError(f"devices are {self.devices}, expected at least {self.tensor_parallel} different indexes")
        return self

    @property
    def scratch_path(self) -> str:
        """The running engine's private directory for vLLM's inner sockets and rendezvous files."""
        return str(Path(self.socket_path).with_suffix(".d"))

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON values."""
        return asdict(self)


def segment_prefix_of(socket_path: str | Path) -> str:
    """Return the name prefix of all /dev/shm segments of the engine that listens on this socket."""
    path = Path(socket_path)
    return f"{_folder_prefix(path.parent)}{hashlib.sha256(path.name.encode()).hexdigest()[:6]}."


def _folder_prefix(sockets: Path) -> str:
    return f"appliance-{hashlib.sha256(str(sockets).encode()).hexdigest()[:8]}."


def remove_segments_of(socket_path: str | Path) -> None:
    """Remove the /dev/shm segments of the dead engine that listened on this socket."""
    for segment in SEGMENTS.glob(f"{segment_prefix_of(socket_path)}*"):
        segment.unlink(missing_ok=True)


def remove_segments_below(sockets: Path) -> None:
    """Remove the /dev/shm segments of dead engines whose sockets were in this folder; no such engine may still run."""
    for segment in SEGMENTS.glob(f"{_folder_prefix(sockets)}*"):
        segment.unlink(missing_ok=True)
