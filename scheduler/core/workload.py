"""Devices and their holders; the planner's input (frozen views of jobs, deployments, replicas and policy, filled by the
store and the loop) and output.

Times (`_s`) are seconds since the epoch by the box's clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, get_args

from runtime.devices.kinds import HOST
from scheduler.core.errors import Blame

Health = Literal["ok", "draining"]
CORDONED = "cordoned"
"""Reason of a device that drains because the loop has read its cordon; the store has the author of the cordon."""
NodeChange = Literal["joined", "left", "lost"]
"""What happened to a node and its devices. left: orderly, after all holders had left."""


@dataclass(frozen=True, slots=True)
class Device:
    """One whole accelerator (or one logical CPU device).

    `id` is "<node>/<index>", `kind` a row of runtime.devices.kinds. `numa_node` is None if unknown. `linked`
    names devices of the same node with a direct link. `health`: "ok"; "draining" (its holder must leave: the device is
    cordoned or its node is leaving). `uuid`, `unfit`: fields of runtime.devices.kind.Found, read when the node started.
    """

    id: str
    node: str
    index: int
    kind: str = HOST.name
    name: str = ""
    memory_bytes: int = 0
    numa_node: int | None = None
    linked: frozenset[str] = frozenset()
    health: Health = "ok"
    health_reason: str = ""
    uuid: str = ""
    unfit: str = ""

    @property
    def usable(self) -> bool:
        return self.health == "ok"


def node_of(device_id: str) -> str:
    """Return the node name in a device id: "n1" for "n1/0"."""
    return device_id.partition("/")[0]


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """A holder of devices: a replica or a job's group of ranks."""

    kind: Literal["replica", "job"]
    id: str

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"


JobPhase = Literal["wanted", "running", "suspended", "paused"]
ReplicaState = Literal["starting", "ready", "open", "draining", "asleep", "dead"]
PolicyKind = Literal["serve", "train", "split", "auto"]
POLICIES: tuple[PolicyKind, ...] = get_args(PolicyKind)
AWAKE: frozenset[ReplicaState] = frozenset({"starting", "ready", "open", "draining"})
"""States in which an engine has its devices."""
Busy = Literal["coming", "leaving"] | None
PATIENT = 0.5
"""Share of the time-to-first-token target that the backlog may take before another replica is woken."""
FULL = 0.8
"""Load of a replica at which another is woken (1: as many requests as it carries): requests differ in size, so caches
may be full, and new requests late, before the load is 1."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How devices are divided between serving and training.

    serve: all to serving. train: all to training except `serving_floor`. split: at most `train_devices` to training,
    the rest to serving. auto: serving gets what its demand needs (and at least the floor while models can use it),
    training the rest. Devices that training cannot use are lent to models with demand.
    """

    kind: PolicyKind = "auto"
    train_devices: int | None = None
    serving_floor: int = 0


@dataclass(frozen=True, slots=True)
class JobView:
    """A training job that is not over.

    phase: "wanted" (never ran, or waits for a restart), "running", "suspended" (has a snapshot), "paused" (by a user;
    it gets no devices until resumed). `devices`: ids of its devices now, or after the hand-over in progress (`busy`
    "coming"). `sizes`: device counts it may run at, ascending. `priority`: higher runs first. `not_before_s`: end of
    backoff. `lacks`: sentence naming what the box lacks to start the job, or "". `failed`: last failure. `pause_s`:
    measured seconds that a change of size costs on each device; None: the scheduler's setting. `nodes`: nodes it may
    run on (one at a time); empty: any. `sampled_by`: deployment that samples its training answers; `starved`: True
    while it waits for these samples.
    """

    id: str
    sizes: tuple[int, ...] = (1,)
    _: KW_ONLY
    nodes: tuple[str, ...] = ()
    priority: int = 0
    submitted_s: float = 0.0
    preemptible: bool = True
    phase: JobPhase = "wanted"
    lacks: str = ""
    deadline_s: float | None = None
    owner: str = ""
    remaining_device_s: float | None = None
    devices: tuple[str, ...] = ()
    since_s: float = 0.0
    not_before_s: float = 0.0
    failed: str = ""
    busy: Busy = None
    pause_s: float | None = None
    sampled_by: str = ""
    starved: bool = False

    def wants_devices(self, now_s: float) -> bool:
        return self.phase != "paused" and not self.lacks and self.not_before_s <= now_s

    @property
    def interruptible(self) -> bool:
        """Whether the job runs and may be suspended for others. A hand-over costs as much as the dearest of such jobs.
        Also true while a hand-over moves the job, so that the hand-over does not change this cost."""
        return self.phase == "running" and self.preemptible

    @property
    def movable(self) -> bool:
        """Whether a plan may take the job's devices now: it is interruptible, and no hand-over moves it."""
        return self.interruptible and self.busy is None

    def keeps_devices(self, now_s: float) -> bool:
        """Whether no plan may take the job's devices: a hand-over is starting it, or it runs, wants devices and must
        not be suspended. False while the job is being suspended or ended."""
        if self.busy is not None:
            return self.busy == "coming"
        runs = self.phase == "running" and bool(self.devices)
        return runs and not self.preemptible and self.wants_devices(now_s)


@dataclass(frozen=True, slots=True)
class Demand:
    """Current demand for a model, reported by the gateways.

    inflight: requests at replicas. held: requests waiting at gateways for a replica. waiting_tokens: known prompt
    tokens of requests without a first token. prompt_tokens: prompt tokens of all requests at engines. tpot_p95_s:
    recent seconds per token after the first token, None if unknown.
    """

    inflight: int = 0
    held: int = 0
    waiting_tokens: int = 0
    last_request_s: float | None = None
    tpot_p95_s: float | None = None
    prompt_tokens: int = 0

    @property
    def requests(self) -> int:
        return self.inflight + self.held


@dataclass(frozen=True, slots=True)
class Standby:
    """How many replicas stay awake. replicas: number always awake. backlog_share: share of the latency target that a
    backlog may take before more replicas wake."""

    replicas: int
    backlog_share: float = PATIENT

    def for_load(self, load: float) -> int:
        """Number of replicas to keep awake for this load (1.0 fills one replica), without an upper bound."""
        return math.ceil(load / FULL)

    def for_backlog(self, backlog_s: float, target_s: float) -> int:
        """Number of replicas needed for a backlog of so many replica-seconds, without an upper bound."""
        return math.ceil(backlog_s / (self.backlog_share * target_s))


@dataclass(frozen=True, slots=True)
class Build:
    """The version, tensor-parallel size and settings with which an engine starts."""

    version: str = ""
    tensor_parallel: int = 1
    settings: str = ""


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """A model that may be served.

    `version`: the active one. `target_inflight`: requests per replica (None: the scheduler's setting).
    `idle_sleep_s`: seconds, set by an operator, that one replica stays awake after the last request; None: replicas
    sleep only when another holder needs the devices. `idle_limit_s`: seconds without a request after which
    models that no user deployed sleep, if `idle_sleep_s` is None.
    `kv_tokens`: capacity of the KV cache of one replica, None if unknown.
    `prefill_tokens_per_s`, `ttft_target_s`: measured rate of one replica and target for the time to first token; if
    both are known, waiting tokens also raise the replica count. `tpot_target_s`: target per further token; while the
    measured time is above it, a replica counts as carrying fewer requests.
    `standby`: replicas to keep awake, learned from the traffic (None: the planner learns it from its own rounds).
    `pinned`: `min_replicas` (at least 1) replicas have priority over all others and never release devices to training.
    `settings`: identifies the settings of its engines; an engine with other settings is replaced.
    `not_before_s`: end of backoff. `failed`: last failure. `served`: build of the engine that opened last; Build() if
    no engine has opened yet; None: not recorded.
    """

    model: str
    version: str
    tensor_parallel: int = 1
    min_replicas: int = 0
    max_replicas: int = 1
    demand: Demand = field(default_factory=Demand)
    target_inflight: int | None = None
    kv_tokens: int | None = None
    prefill_tokens_per_s: float | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    standby: Standby | None = None
    idle_sleep_s: float | None = None
    idle_limit_s: float | None = None
    pinned: bool = False
    failed: str = ""
    not_before_s: float = 0.0
    settings: str = ""
    served: Build | None = None

    @property
    def build(self) -> Build:
        return Build(self.version, self.tensor_parallel, self.settings)

    @property
    def floor_replicas(self) -> int:
        return max(self.min_replicas, 1 if self.pinned and self.max_replicas else 0)

    @property
    def idle_after_s(self) -> float:
        """Seconds without a request after which the replicas sleep even if no other holder needs their devices."""
        return next((s for s in (self.idle_sleep_s, self.idle_limit_s) if s is not None), math.inf)

    @property
    def last_s(self) -> float:
        """Time of the model's last request; -inf if it never had a request."""
        return -math.inf if self.demand.last_request_s is None else self.demand.last_request_s

    def asleep(self, now_s: float) -> bool:
        """Whether `idle_after_s` has passed since the last request. False if the model never had a request."""
        known = self.demand.last_request_s is not None
        return known and not self.demand.requests and now_s >= self.last_s + self.idle_after_s


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """An engine process. `devices`: the devices it holds; asleep, the only devices it can wake on.

    state: "starting", "ready" (awake, takes no requests yet), "open", "draining" (awake, takes no new requests),
    "asleep", "dead". `since_s`: when the state began. `settings`: settings at its start. `answered`: False if it did
    not answer the observation; then the other fields mean nothing. `refused`: a version that running engines of the
    model cannot load; a new engine replaces this engine. `failed`, `blame`: why it died, and whose fault it was.
    """

    id: str
    model: str
    version: str
    state: ReplicaState
    devices: tuple[str, ...]
    since_s: float = 0.0
    busy: Busy = None
    settings: str = ""
    answered: bool = True
    refused: str = ""
    failed: str = ""
    blame: Blame = "own"

    @property
    def awake(self) -> bool:
        return self.state in AWAKE

    @property
    def build(self) -> Build:
        return Build(self.version, len(self.devices), self.settings)


@dataclass(frozen=True, slots=True)
class Workload:
    """Content of the store, re-read in every round.

    policy: the mode that a user set at `policy_since_s`. cordoned: UUIDs or ids of devices to vacate. windows: mode
    windows (`scheduler.loop.mode_schedule.Window`); the policy changes when a window starts or ends. max_asleep: by
    node, how many sleeping engines fit in host memory; nodes not listed use the configured number.
    """

    policy: Policy
    jobs: tuple[JobView, ...] = ()
    deployments: tuple[DeploymentView, ...] = ()
    cordoned: frozenset[str] = frozenset()
    windows: tuple[Any, ...] = ()
    policy_since_s: float = 0.0
    max_asleep: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """A model's memory between planning rounds, so that its replicas do not follow every change of demand.

    low_since_s: when fewer replicas became enough. low_peak: the most replicas needed since then. waiting_since_s:
    since when the model has had requests but no open replica.
    """

    replicas: int = 0
    low_since_s: float | None = None
    low_peak: int = 0
    waiting_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class PlanInput:
    """Everything a plan depends on.

    `busy_devices`: devices in a hand-over in progress; the plan must not use them. `handover_id`: unique number of the
    hand-over that will carry out this plan; names new replicas ("r<handover_id>-<n>").
    """

    policy: Policy
    devices: tuple[Device, ...]
    jobs: tuple[JobView, ...] = ()
    deployments: tuple[DeploymentView, ...] = ()
    replicas: tuple[ReplicaView, ...] = ()
    busy_devices: frozenset[str] = frozenset()
    hysteresis: dict[str, Hysteresis] = field(default_factory=dict)
    handover_id: int = 0
    max_asleep: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The wanted holder of every device. Replicas not named here should stop; jobs not named here get no device.

    replicas: replicas to be "open" on their devices, or "asleep" and holding none. groups: by job, a device for each
    rank. waiting: by job id, a sentence on why the job waits. notes: by model, a sentence on why the model has fewer
    replicas than needed. hysteresis: input of the next plan. review_at_s: when the plan may change without an event.
    """

    replicas: tuple[ReplicaView, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    hysteresis: dict[str, Hysteresis] = field(default_factory=dict)
    review_at_s: float | None = None

    @property
    def open_replicas(self) -> tuple[ReplicaView, ...]:
        return tuple(r for r in self.replicas if r.state == "open")
