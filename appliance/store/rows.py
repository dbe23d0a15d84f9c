"""The frozen dataclasses of rows, whose fields are columns, and at the end the tables. Times are seconds since 1970,
sizes are bytes. `seq` orders lists. owner: owner of the key or job that made a row; empty: the box itself. What a
dataclass cannot say (indexes, triggers, tables of counters) is in schema.sql."""

from __future__ import annotations

import secrets
import string
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from appliance.store.database import Table, sql_list
from scheduler.core.workload import PolicyKind

JobPhase = Literal["validating", "queued", "running", "suspended", "succeeded", "failed", "cancelled"]
JobWanted = Literal["run", "pause", "cancel"]
FINISHED_PHASES: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
UNFINISHED_PHASES: tuple[str, ...] = tuple(phase for phase in get_args(JobPhase) if phase not in FINISHED_PHASES)


def new_id(prefix: str, length: int = 24) -> str:
    """Append `length` random letters and digits to a prefix (24: 142 bits): `new_id("file-")` -> "file-9mWkQz…"."""
    return prefix + "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


def columns(row: Any, names: str) -> dict[str, Any]:
    """Return {name: value} for attributes of a row or another object. names: separated by spaces."""
    return {name: getattr(row, name) for name in names.split()}


@dataclass(frozen=True, slots=True)
class KeyRow:
    """An API key. Only the key's SHA-256 is stored: 256 random bits need no slow hash.

    owner: owner of the objects made with the key; an owner's keys get one share of the devices together. models: names
    of models that the key may use, None: all. Limits: None: unlimited; days and months are in UTC.
    max_priority: highest priority of the key's jobs. bounds: limits on what the owner may store, in place of the box's.
    subject: SHA-256 of the OpenID provider's user, empty for a key made by hand. expires_s: Unix time at which the key
    expires, None: never.
    """

    id: str
    name: str
    sha256: str
    prefix: str
    created_s: float
    revoked_s: float | None = None
    owner: str = ""
    scopes: list[str] = field(default_factory=list)
    models: list[str] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    max_priority: int = 0
    bounds: dict[str, int] | None = None
    subject: str = ""
    expires_s: float | None = None


@dataclass(frozen=True, slots=True)
class PageSessionRow:
    """A login of the web page. sha256: the token's hash. until_s: when it expires. agent: the browser's User-Agent."""

    id: str
    sha256: str
    key_id: str
    created_s: float
    until_s: float
    agent: str = ""


@dataclass(frozen=True, slots=True)
class FileRow:
    """An uploaded or produced file; its bytes are stored at `files/<id>`.

    report: result of the check at upload (shape, n_examples, errors, warnings), for purpose "fine-tune".
    """

    id: str
    filename: str
    purpose: str
    bytes: int
    sha256: str
    status: str
    created_s: float
    status_details: str | None = None
    key_id: str | None = None
    expires_s: float | None = None
    owner: str = ""
    report: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model by its public name (`id`). It can be called once `active_version` names one of its versions.

    base: for kind "fine-tuned", the base model's name. owner: owner of the job that made the model, or its importer;
    `model_shares` lists the other owners who see it. info: facts from config.json and the tokenizer.
    """

    id: str
    kind: Literal["base", "fine-tuned"]
    arch: str
    params: int
    bytes: int
    owned_by: str
    source: str
    created_s: float
    task: Literal["generate", "embed"] = "generate"
    base: str | None = None
    max_model_len: int | None = None
    active_version: str | None = None
    job_id: str | None = None
    owner: str = ""
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One set of weights of a model. shm_path: their directory in shared memory, None if absent; disk_path: their copy
    on disk, once persisted. held_back: their job withheld them from requests, and nobody has activated them since.

    With the public name `MODEL:ckpt-step-N` it is also a checkpoint of its job. id: the API's id of the checkpoint.
    metrics: the job's metrics at that step.
    """

    model: str
    version: str
    source: str
    bytes: int
    created_s: float
    disk_path: str | None = None
    shm_path: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    held_back: int = 0
    id: str = ""
    checkpoint: str | None = None
    job_id: str | None = None
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TierRemovalRow:
    """A version or snapshot to be deleted from a tier."""

    tier: str
    kind: str
    model: str
    version: str
    created_s: float


@dataclass(frozen=True, slots=True)
class ModelSettingsRow:
    """A numbered version of a model's engine settings (`serve.core.model_settings`). digest: equal for equal settings.
    by_whom: a key's name, or "box". note: the box's reason, a sentence without a full stop."""

    model: str
    number: int
    created_s: float
    digest: str
    by_whom: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class DeploymentRow:
    """The settings by which a model is served.

    max_replicas: None: as many as the box's settings allow. ttft_p95_s, tpot_p95_ms: target times to the first token
    and per further token, None: no target. idle_sleep_s: idle seconds before sleep; None: the box decides.
    served: the `scheduler.core.workload.Build` of the last engine that became ready, {} if none did.
    """

    model: str
    created_s: float
    min_replicas: int = 0
    max_replicas: int | None = None
    tensor_parallel: int = 1
    pinned: int = 0
    ttft_p95_s: float | None = None
    tpot_p95_ms: float | None = None
    idle_sleep_s: float | None = None
    served: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CanaryRow:
    """A version that takes `share` (0 to 1) of its model's requests and is compared with `before`, the active one.

    auto: the box promotes it or rolls it back by itself. watch_s, min_requests: seconds, and requests to each version,
    before promotion. reason: why the canary ended. compared: measurements of both versions at that time.
    """

    model: str
    version: str
    before: str
    share: float
    created_s: float
    auto: int = 0
    watch_s: float = 600.0
    min_requests: int = 50
    state: Literal["running", "promoted", "rolled_back"] = "running"
    reason: str = ""
    ended_s: float | None = None
    compared: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """The name by which the canary is served: `MODEL@VERSION`."""
        return f"{self.model}@{self.version}"


@dataclass(frozen=True, slots=True)
class JobRow:
    """A fine-tuning job.

    phase: the actual state (written by the scheduler); wanted: the state a person asked for (written by the API).
    hyperparameters: as requested; resolved: the training spec without any "auto", None until validated.
    output_model: name of the job's model, the API's `fine_tuned_model` once the job succeeded.
    stable_name: the owner chose that name, and other jobs may add versions to it. activate: the job's last version
    becomes active at once, even if another version of the model is active.
    snapshot: {"step", "path"} of the newest resumable state; stays after the job's end until its bytes are deleted.
    devices: names of devices held now. owner: owner of the job's key when the job was made; empty: the box itself.
    gate: {"eval_id", "pass_rate_at_least", "version" judged, "before" it, "runs" by version, "verdict" ("passed",
        "refused", "undecided"), "reason", "activated": None until it has ended}; None: the job has no gate.
    joules: energy that the job's devices counted in `metered_s` device-seconds; None: nothing was counted.
    allowed_sizes: numbers of devices on which the job may run; each divides its batch size.
    estimate: of the job's layout before it began (`appliance.controller.models.capacity.Estimator.described`), with
        "memory": {"store_bytes": shared memory for its result and a snapshot, "host_bytes": by number of devices,
        "limit_bytes": limit on its ranks' shared memory, if snapshots therefore go to disk}; and "measured":
        {"device_bytes", "tokens_per_s"} once it has ended.
    """

    id: str
    model: str
    method: str
    training_file: str
    seed: int
    output_model: str
    created_s: float
    key_id: str | None = None
    validation_file: str | None = None
    suffix: str | None = None
    metadata: dict[str, str] | None = None
    integrations: list[dict[str, Any]] | None = None
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    resolved: dict[str, Any] | None = None
    phase: JobPhase = "validating"
    wanted: JobWanted = "run"
    reason: str = ""
    error: dict[str, Any] | None = None
    priority: int = 0
    min_devices: int | None = None
    max_devices: int | None = None
    allowed_sizes: list[int] | None = None
    owner: str = ""
    deadline_s: float | None = None
    preemptible: int = 1
    stable_name: int = 0
    activate: int = 1
    devices: list[str] = field(default_factory=list)
    snapshot: dict[str, Any] | None = None
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    valid_loss: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    trained_tokens: int | None = None
    result_files: list[str] = field(default_factory=list)
    gate: dict[str, Any] | None = None
    started_s: float | None = None
    finished_s: float | None = None
    joules: float | None = None
    metered_s: float = 0.0
    estimate: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        return self.phase in FINISHED_PHASES


@dataclass(frozen=True, slots=True)
class JobEventRow:
    id: str
    job_id: str
    level: Literal["info", "warn", "error"]
    type: Literal["message", "metrics"]
    message: str
    created_s: float
    data: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class JobMetricRow:
    """One optimizer step. A step that is repeated after a resume replaces its row. `memory_bytes`: peak memory of the
    first rank's tensors on its device so far; None on CPUs. `rank_seconds`: seconds each rank computed without waiting
    for others. `measured`, `valid_measured`: the method's values other than the loss, for the step and for a validation
    after it (train.methods.method: measured)."""

    job_id: str
    step: int
    created_s: float
    epoch: float | None = None
    loss: float | None = None
    valid_loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    devices: int | None = None
    memory_bytes: int | None = None
    rank_seconds: list[float] | None = None
    measured: dict[str, float] | None = None
    valid_measured: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class HandoverRow:
    """A hand-over of devices. asked_by: a key's name, "box", "window <id>" or "scheduler"; asked_for: the request.
    steps: fields of `scheduler.handover.effects.StepRecord`."""

    id: int
    reason: str
    started_s: float
    asked_by: str = ""
    asked_for: str = ""
    state: Literal["running", "done", "undone", "failed"] = "running"
    ended_s: float | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True, slots=True)
class IdempotencyRow:
    key_id: str
    route: str
    idempotency_key: str | None
    body_sha256: str
    resource_id: str
    created_s: float


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One entry of the audit log. key_id: of the key that acted; None: the box itself."""

    action: str
    target: str
    outcome: Literal["done", "refused", "failed"] = "done"
    detail: dict[str, Any] = field(default_factory=dict)
    key_id: str | None = None
    request_id: str = ""
    id: str = field(default_factory=partial(new_id, "audit_"))
    created_s: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class OperationRow:
    """Long work that the admin API started. progress: {"done", "total", "unit", "message"}."""

    id: str
    kind: str
    target: str
    state: Literal["running", "succeeded", "failed"]
    created_s: float
    ended_s: float | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    result: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TaskRow:
    """Work on the object `id`. key_id: of the key that made the object; None: the box itself. arguments: facts that the
    object's row lacks."""

    kind: str
    id: str
    key_id: str | None
    created_s: float
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WindowRow:
    """A mode window, see scheduler.loop.mode_schedule. serving_floor None means the box's setting."""

    id: str
    cron: str
    tz: str
    policy: PolicyKind
    created_s: float
    until: str | None = None
    for_s: float | None = None
    train_devices: int | None = None
    serving_floor: int | None = None


@dataclass(frozen=True, slots=True)
class CordonRow:
    """Keeps a device out of use. name: the device's UUID, where it has one, else its id "<node>/<index>": when a GPU
    drops off the bus, the driver renumbers those behind it. drain: {"reason", "by", "since_s"} if a person drained it.
    fault: why the box cordoned it, "" if it did not. retry_s: when the box tries it again; None: a person must."""

    name: str
    drain: dict[str, Any] | None = None
    fault: str = ""
    retry_s: float | None = None


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node that has joined. lost: {"reason", "since_s"} if its connection broke unannounced."""

    id: str
    devices: list[dict[str, Any]]
    lost: dict[str, Any] | None = None


BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
EvalRunStatus = Literal["queued", "in_progress", "completed", "canceled", "failed"]
AnswerKind = Literal["response", "chat.completion"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
UNFINISHED_STATUSES = ("validating", "queued", "in_progress", "finalizing", "cancelling", "pending")
"""Of batches, runs of evaluations, responses and uploads."""


def _finished(row: Any) -> bool:
    return row.status not in UNFINISHED_STATUSES


@dataclass(frozen=True, slots=True)
class JobJudgeRow:
    """The judge of a job that trains on its model's own answers: {"grader": in OpenAI's form, "response_format"?:
    schema that constrains answers} or {"teacher": a model's name}."""

    job_id: str
    judge: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalRow:
    """An evaluation: a schema for items, and graders that judge a sample for each item. updated_s: time of the last
    change. include_sample: 1 if the API's schema has the sample's fields. bytes: size of schema and graders as JSON."""

    id: str
    name: str
    created_s: float
    key_id: str | None = None
    owner: str = ""
    item_schema: dict[str, Any] = field(default_factory=dict)
    include_sample: int = 0
    criteria: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, str] | None = None
    bytes: int = 0
    updated_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EvalRunRow:
    """One run of an evaluation over its data. results: {criterion: {"passed", "failed", "rewarded", "reward"}}, where
    "rewarded" counts items with a reward and "reward" is the rewards' sum. usage: {model: counters},
    counts: judged items by status. These three are as of the last judged item. bytes: of items, samples and results."""

    id: str
    eval_id: str
    name: str
    created_s: float
    key_id: str | None = None
    owner: str = ""
    status: EvalRunStatus = "queued"
    model: str = ""
    data_source: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] | None = None
    total: int = 0
    results: dict[str, dict[str, float]] = field(default_factory=dict)
    usage: dict[str, dict[str, int]] = field(default_factory=dict)
    error: dict[str, str] | None = None
    ended_s: float | None = None
    bytes: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    finished = property(_finished)


@dataclass(frozen=True, slots=True)
class EvalItemRow:
    """One judged item of a run. place: index in the data. sample: in the API's form. results: one for each criterion,
    or empty if there is no sample."""

    id: str
    run_id: str
    place: int
    created_s: float
    status: Literal["pass", "fail", "error"]
    item: dict[str, Any]
    sample: dict[str, Any]
    results: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch of inference requests.

    total, completed, failed: numbers of input lines; `completed` and `failed` are exact only after the end.
    output_keep_s: seconds until the output files are deleted, None: never. moments: time of the first change to each
    status. errors: the validation's errors in the API's form.
    """

    id: str
    endpoint: str
    input_file_id: str
    created_s: float
    expires_s: float
    status: BatchStatus = "validating"
    key_id: str | None = None
    owner: str = ""
    model: str | None = None
    output_keep_s: float | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    moments: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, str] | None = None
    errors: list[dict[str, Any]] | None = None
    usage: dict[str, Any] | None = None

    finished = property(_finished)


@dataclass(frozen=True, slots=True)
class UploadRow:
    """A file that arrives in parts. bytes: announced size of the file. file_keep_s: seconds from completion until the
    file is deleted, None: never. part_bytes: size of the parts received."""

    id: str
    filename: str
    purpose: str
    mime_type: str
    bytes: int
    created_s: float
    expires_s: float
    status: Literal["pending", "completed", "cancelled", "expired"] = "pending"
    file_keep_s: float | None = None
    key_id: str | None = None
    owner: str = ""
    file_id: str | None = None
    part_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ResponseRow:
    """A stored answer: a response of /v1/responses, or a chat completion.

    key_id: of the requesting key, empty: the box itself. input: items of the request, without earlier turns. response:
    the API's object. request: body of a background request until it ends. bytes: size of input, response and request.
    model, metadata: only for chat completions, whose metadata may change and is therefore not in `response`.
    """

    id: str
    key_id: str
    status: ResponseStatus
    created_s: float
    bytes: int
    input: list[Any]
    response: dict[str, Any]
    previous_id: str | None = None
    owner: str = ""
    background: int = 0
    request: dict[str, Any] | None = None
    kind: AnswerKind = "response"
    model: str | None = None
    metadata: dict[str, str] | None = None

    finished = property(_finished)


UNFINISHED = {
    "jobs": f"phase IN ({sql_list(UNFINISHED_PHASES)})",
    **dict.fromkeys(("batches", "responses", "eval_runs", "uploads"), f"status IN ({sql_list(UNFINISHED_STATUSES)})"),
}
"""Conditions for rows of work that has not ended, by table: those of partial indexes in schema.sql."""

KEYS = Table("keys", KeyRow)
PAGE_SESSIONS = Table("page_sessions", PageSessionRow, parents={"key_id": "keys"})
FILES = Table("files", FileRow)
MODELS = Table("models", ModelRow)
VERSIONS = Table("versions", VersionRow, "model", "version", parents={"model": "models"})
TIER_REMOVALS = Table("tier_removals", TierRemovalRow, "tier", "kind", "model", "version", order="created_s")
MODEL_SETTINGS = Table(
    "model_settings", ModelSettingsRow, "model", "number", order="number DESC", parents={"model": "models"}
)
DEPLOYMENTS = Table("deployments", DeploymentRow, "model", order="created_s, model", parents={"model": "models"})
CANARIES = Table("canaries", CanaryRow, "model", order="created_s, model", parents={"model": "models"})
JOBS = Table("jobs", JobRow)
JOB_EVENTS = Table("job_events", JobEventRow, parents={"job_id": "jobs"})
JOB_METRICS = Table("job_metrics", JobMetricRow, "job_id", "step", order="step", parents={"job_id": "jobs"})
HANDOVERS = Table("handovers", HandoverRow)
IDEMPOTENCY = Table("idempotency", IdempotencyRow, "seq")
AUDIT = Table("audit", AuditRow)
OPERATIONS = Table("operations", OperationRow)
TASKS = Table("tasks", TaskRow, "kind", "id", order="created_s")
WINDOWS = Table("windows", WindowRow)
CORDONS = Table("cordons", CordonRow, "name", order="name")
NODES = Table("nodes", NodeRow, order="id")
JOB_JUDGES = Table("job_judges", JobJudgeRow, "job_id", order="job_id", parents={"job_id": "jobs"})
EVALS = Table("evals", EvalRow)
EVAL_RUNS = Table("eval_runs", EvalRunRow, parents={"eval_id": "evals"})
EVAL_ITEMS = Table("eval_items", EvalItemRow, parents={"run_id": "eval_runs"})
BATCHES = Table("batches", BatchRow)
UPLOADS = Table("uploads", UploadRow)
RESPONSES = Table("responses", ResponseRow)
