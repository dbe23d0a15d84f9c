"""The controller's interfaces to the rest of the box. The app runs against these protocols; tests use simulators."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypedDict

from appliance.store.rows import ModelRow, VersionRow
from scheduler.core.workload import Policy, PolicyKind
from serve.core.model_settings import ModelSettings
from serve.core.sizing import EngineSize


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
    or was abandoned); `serving_floor` devices that serving keeps if a mode sets no number; `bounds` the dwell times (s)
    and the resulting limit on hand-overs per hour; `queue` jobs in order, each {"id", "position", "phase", "devices",
    "reason" (a Slurm reason code or None), "message" (a sentence)}; `plan_s` duration of the last plan; `troubles` the
    models whose engines fail, each {"model", "version", "reason", "message" (a sentence), "not_before_s" (of the next
    try), "tries", "lasting"}; `reloads` model to why its engines are started anew instead of loading a version while
    they run."""

    devices: list[DeviceStatus]
    replicas: list[ReplicaStatus]
    memory: dict[str, int | None]
    handover: str | None
    serving_floor: int
    bounds: dict[str, float]
    queue: list[dict[str, Any]]
    troubles: list[dict[str, Any]]
    notes: list[str]
    reloads: dict[str, str]
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


class SchedulerPort(Protocol):
    """The loop that decides who holds which devices. It reads the wanted state from the store; calls here wake it."""

    def nudge(self, reason: str, by: str = "") -> None:
        """The store changed (a job, a model, the mode): plan soon. Never blocks, never raises.

        by: the person who asked; the resulting hand-overs carry the name.
        """

    def status(self) -> SchedulerStatus:
        """The current state, from memory: no waiting."""

    async def set_mode(self, mode: Mode) -> str | None:
        """The mode was just written to the store. Returns once the loop has planned for it: the id of the hand-over
        that implements it, or None when nothing has to move."""

    def reset_failures(self, model: str) -> None:
        """This model was changed: if its engines failed, retry at once."""

    def explain(self, policy: Policy | None) -> dict[str, Any]:
        """What would be done under this policy (None: the current one), and why (`scheduler.loop.explain`). Changes
        nothing."""

    async def wait_handover(self, handover_id: str) -> None:
        """Returns when nothing is left to do for the mode whose first hand-over this was (its row in the store says how
        that one ended), and at once for another hand-over."""

    async def converge_model(self, model: str) -> dict[str, Any]:
        """The model's active version changed in the store: swap its replicas to it, and return the measurements
        ({"replicas", "pause_s", "seconds", "bytes", "how"}).
        Raises SwapFailed if a replica serves another version; the reason is that of this model's hand-overs."""

    async def withdraw(self, model: str) -> None:
        """The model's rows are gone from the store: returns when no replica of it is left."""

    async def unload_adapters(self, names: list[str]) -> None:
        """The rows of these adapters ("NAME@VERSION") are gone: returns when no engine has them loaded. Raises
        OperationFailed if their requests run for too long."""

    async def profile_engine(self, model: str, steps: int) -> dict[str, Any]:
        """Where the time of the next steps of an engine of this model goes (EngineControl.profile), within a minute.
        Raises OperationFailed if none is awake, or it fails."""

    async def profile_job(self, job_id: str, steps: int) -> None:
        """Have the job profile its next steps; an event of the job tells of it. Raises OperationFailed if it does not
        run."""


@dataclass(frozen=True, slots=True)
class ModelStats:
    """An importer's findings about a model; `info` may hold more (layers, hidden size, tokenizer facts).
    adapter_rank: of a LoRA adapter; None for a whole model."""

    name: str
    version: str
    arch: str
    params: int
    bytes: int
    task: Literal["generate", "embed"]
    source: str
    disk_path: str | None
    max_model_len: int | None = None
    info: dict[str, Any] = field(default_factory=dict)
    adapter_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a long operation: `done` of `total` (None: unknown) in `unit`s, and the current activity."""

    done: float
    total: float | None
    unit: str
    message: str


Report = Callable[[Progress], None]


class AdapterFound(NamedTuple):
    """name: what it would be called. base: what it says it was trained on, "" if it does not say.
    revision: its commit, for one on a hub."""

    name: str
    base: str
    revision: str | None = None


class AdapterBase(NamedTuple):
    """A version that an adapter is to be served on: its files, and the largest rank that its engines take (0: none)."""

    model: str
    version: str
    path: str
    rank_limit: int


class VersionPaths(NamedTuple):
    """Paths of a version's bytes; None where they are absent. kind: "version" or "adapter"."""

    version: str
    disk_path: str | None
    shm_path: str | None
    kind: str = "version"


class ModelOps(Protocol):
    """Long operations on model files; rows in the store are the controller's responsibility.

    All raise OperationFailed for errors that a user can act on. `report` may be called from any thread.
    """

    async def import_model(self, source: str, *, name: str | None, revision: str | None, report: Report) -> ModelStats:
        """Import a checkpoint directory or hub repository `source`, checked, as a new version. `name` None: derive it
        from the source."""

    async def find_adapter(self, source: str, *, name: str | None, revision: str | None) -> AdapterFound | None:
        """What the directory or hub repository `source` says of itself if it is a LoRA adapter's; None for everything
        else."""

    async def import_adapter(
        self, source: str, *, found: AdapterFound, base: AdapterBase, report: Report
    ) -> ModelStats:
        """Import the adapter that `find_adapter` found as a new version of its name, checked against the base that it
        is to be served on."""

    async def verify(self, name: str, paths: list[VersionPaths], report: Report) -> dict[str, Any]:
        """Compare bytes with checksums in every tier; returns {"versions": [{"version", "path", "tensors", "bytes"}],
        "unsealed": copies without checksums yet, "tensors", "bytes"}. Raises OperationFailed naming file and tensor of
        every damaged copy."""

    async def verify_tiers(self, report: Report) -> dict[str, Any]:
        """The same for all versions, adapters and snapshots; returns {"copies", "unsealed", "tensors", "bytes"}."""

    async def remove(self, name: str, paths: list[VersionPaths]) -> None:
        """Delete the bytes of these versions. Idempotent."""

    def let_go(self, name: str) -> None:
        """No engine serves this name any more: the box no longer needs its bytes in shared memory."""


class KeySink(Protocol):
    """Receives the set of live keys (the bus, for the gateways)."""

    table_bytes: int
    """Length of the table that the gateways get."""

    def bytes_of(self, owner: str, names: Collection[str]) -> int:
        """How much of it an owner takes by these names of models and checkpoints: their rows, those of their versions,
        whom they are shared with, and the lists of the owner's keys."""

    def keys_changed(self, keys: dict[str, dict[str, Any]]) -> None:
        """keys: SHA-256 in hex -> {"id", "name", "scopes"} and those of "models", "requests_per_minute",
        "tokens_per_minute", "spent_until_s", "spent_quota" that limit the key; replaces the previous set."""

    async def caught_up(self) -> None:
        """Returns when the gateways route by everything that was published until now, or after a short time."""


class EngineSizer(Protocol):
    """What an engine of a model takes and how long its context is, as it would be started now."""

    def size(self, model: ModelRow, version: VersionRow | None, tensor_parallel: int | None = None) -> EngineSize:
        """version: None takes the active one. tensor_parallel: None takes the deployment's. Bytes are per device."""

    def context(self, model: ModelRow, version: VersionRow | None = None) -> int | None:
        """Tokens that one request may have; None if the model does not say."""

    def spec_fields(self, model: ModelRow, version: VersionRow | None, tensor_parallel: int) -> dict[str, Any]:
        """Fields of the ReplicaSpec of an engine. Raises serve.core.sizing.NotServable."""

    def sized(
        self, model: ModelRow, version: VersionRow | None, tensor_parallel: int, settings: ModelSettings
    ) -> EngineSize:
        """What `size` would be with these settings."""

    def asleep_bytes(self, model: ModelRow, version: VersionRow | None) -> int:
        """Host memory of one that sleeps, on logical CPU devices."""


class SettingsCheck(Protocol):
    """Asks vLLM itself whether it would start an engine with these settings."""

    async def refused(self, model: ModelRow, version: VersionRow, devices: int, settings: ModelSettings) -> str:
        """Why not, "" if it would. Raises OperationFailed if it cannot be asked now."""


class TierPort(Protocol):
    """Where the bytes of versions and snapshots are, from shared memory to the remote tier."""

    def status(self) -> Callable[[], list[dict[str, Any]]]:
        """As of now, and what it returns is called on any thread: per tier, nearest first, {"name", "where",
        "versions", "snapshots", "bytes", "limit_bytes", "backlog", "backlog_bytes", "busy", "damaged", "last_error",
        "last_error_s"}."""

    def tiers_of_version(self, model: str, version: str) -> list[str]:
        """Names of the tiers that have a version."""

    def nudge(self) -> None:
        """The set of versions to keep has changed."""


@dataclass(frozen=True, slots=True)
class BatchCapacity:
    """How many requests of rollouts a model's engines may process now. why: what keeps them few, or none."""

    lines: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """body: the answer's JSON. version: of the replica that gave it, empty if none did. silent: it did not answer in
    time, and was left."""

    status: int
    body: Any
    version: str = ""
    silent: bool = False


class LineReturned(Exception):
    """A request got no answer: its engine was wanted for something else (`yielded`), or died. Send it again."""

    def __init__(self, reason: str, *, yielded: bool):
        super().__init__(reason)
        self.yielded = yielded


TRAINING_FAILED = "training_failed"
"""The code of a job that failed once it ran."""


class NodePort(Protocol):
    """The nodes of the box, where a route asks them itself (`scheduler.ray.nodes.Nodes`)."""

    async def poll(self) -> list[dict[str, Any]]:
        """Each node as it answers now, as the admin API shows it."""


class SamplingEngines(Protocol):
    """Engines for the rollouts of jobs, on the capacity that interactive requests leave idle."""

    def room(self, model: str, version: str) -> BatchCapacity:
        """Of the engines that have this version of the model's weights, for all jobs together."""

    async def sample(self, model: str, version: str, body: dict[str, Any], request_id: str) -> EngineAnswer:
        """The answer of one of those engines to a request of serve.core.sampling. The model that it names may be one in
        training, which no other request reaches. Raises LineReturned."""

    async def interrupt(self, request_ids: Collection[str]) -> None:
        """Those of these requests of `sample` that run answer with what they have, as soon as their engine has heard
        it; for one that does not nothing changes."""

    def wants(self, models: list[str]) -> None:
        """These models may be woken if that disturbs nobody, in place of those that were wanted before."""

    async def changed(self, timeout_s: float) -> None:
        """Returns when room may have changed, or after this time."""
