"""Defines a training run as plain data that survives a round trip through JSON."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from runtime.devices.kinds import KINDS
from train.plan.errors import InvalidSpec
from train.plan.learning_rate import SCHEDULES, Schedule

MOST_VERSIONS = 50
"""That a run publishes: as many as it has epochs at most. Each has a name of its own and a model's bytes."""


@dataclass(frozen=True)
class TrainSpec:
    """Everything a rank needs to know; the same on all ranks and over every suspension of the job.

    `batch_size` counts packed sequences per optimizer step over all devices. Together with `micro_batch` and
    `seed` it fixes which tokens a step sees, so the run may move between world sizes (see `auto.allowed_sizes`)
    without changing its loss curve.
    """

    job_id: str
    base_path: str  # Hugging Face directory of the base model
    train_path: str  # chat JSONL as `train.data.check` writes it
    run_dir: str  # tensorboard files, token caches
    shm_root: str  # root of the weight store
    output_model: str  # public name of the result, e.g. ft:base:suffix:id
    base_model: str = ""
    base_version: str = ""  # of base_model
    base_adapter: str | None = None  # directory of an adapter to be merged into base_path before training
    valid_path: str | None = None
    method: str = "supervised"  # a row of train.methods.methods
    options: dict = field(default_factory=dict)  # what the method alone takes (Method.own_hyperparameters)
    version_prefix: str = ""  # published versions are named "<version_prefix>step-<n>"
    # When a version is published: at the end alone, or also after each epoch, of which the controller keeps the last
    # ("checkpoints") or has each answer ("epoch"), or after each validation that is better than all before it.
    publish: Literal["end", "checkpoints", "epoch", "best"] = "end"
    seed: int = 0

    n_epochs: int = 1
    batch_size: int = 8
    micro_batch: int = 1
    max_length: int = 1024  # tokens per packed sequence
    packing: bool = True
    data_order: Literal["shuffled", "given"] = "shuffled"  # anew in each epoch, or in each as the file has it

    learning_rate: float = 1e-5
    lr_scheduler: Schedule = "cosine"
    warmup_ratio: float = 0.03
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0  # 0: no clipping

    full: bool = True  # False: LoRA
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = field(default=())  # (): every linear layer but the output head
    lora_publish: Literal["adapter", "merged"] = "merged"  # what a LoRA run publishes

    zero_stage: int = 1
    tensor_parallel: int = 1  # ranks that share one copy of the model; the world size is a multiple of it
    precision: Literal["bf16", "fp32"] = "bf16"
    activation_checkpointing: bool = False
    offload: Literal["none", "optimizer", "parameters"] = "none"
    device_kind: str = field(kw_only=True)  # of the devices that its ranks compute on

    snapshot_every_s: float | None = None  # None: as often as it is cheap (train.state.cadence); 0: only when asked
    keep_snapshots: int = 2
    step_patience_s: float = 0.1  # a step with more than this to go is left when devices are wanted
    shm_budget_bytes: int | None = None  # of the whole weight store; None: what tmpfs has
    serve_dtype: Literal["bf16", "fp32"] = "bf16"  # of published weights
    eval_interval: int = 0  # steps between two validations; 0: one after each epoch
    early_stopping_patience: int = 0  # validations without a better one after which the run ends; 0: never

    def __post_init__(self) -> None:
        checks = {
            "device_kind": self.device_kind in KINDS,
            "n_epochs": self.n_epochs >= 1,
            "batch_size": self.batch_size >= 1,
            "micro_batch": self.micro_batch >= 1 and self.batch_size % max(1, self.micro_batch) == 0,
            "max_length": self.max_length >= 8,
            "learning_rate": self.learning_rate > 0,
            "lr_scheduler": self.lr_scheduler in SCHEDULES,
            "data_order": self.data_order in ("shuffled", "given"),
            "publish": self.publish != "best" or self.valid_path is not None,
            "early_stopping_patience": self.early_stopping_patience == 0
            or (self.early_stopping_patience > 0 and self.valid_path is not None),
            "eval_interval": self.eval_interval >= 0,
            "warmup_ratio": 0 <= self.warmup_ratio < 1,
            "weight_decay": self.weight_decay >= 0,
            "max_grad_norm": self.max_grad_norm >= 0,
            "lora_rank": self.lora_rank >= 1,
            "lora_dropout": 0 <= self.lora_dropout < 1,
            "base_adapter": self.base_adapter is None or self.published_kind == "version",
            "zero_stage": self.zero_stage in (0, 1, 2, 3),
            "offload": self.offload != "parameters" or self.zero_stage == 3,
            "tensor_parallel": self.tensor_parallel == 1
            or (self.tensor_parallel > 1 and self.full and self.zero_stage <= 2 and self.offload == "none"),
            "snapshot_every_s": self.snapshot_every_s is None or self.snapshot_every_s >= 0,
            "step_patience_s": self.step_patience_s >= 0,
            "keep_snapshots": self.keep_snapshots >= 1,
        }
        for name, ok in checks.items():
            if not ok:
                raise InvalidSpec(
                    f"TrainSpec.{name}={getattr(self, name)!r} is out of range; see its comment in train.plan.spec"
                    + (" (offloading parameters needs zero_stage 3)" if name == "offload" else "")
                    + (
                        " (it needs full tuning, zero_stage 0 to 2 and no offloading)"
                        if name == "tensor_parallel"
                        else ""
                    )
                    + (
                        " (no stored base has the weights that an adapter trained on a merged one belongs to: "
                        "publish it merged)"
                        if name == "base_adapter"
                        else ""
                    )
                    + (" (it needs a validation file)" if name in ("publish", "early_stopping_patience") else "")
                    + (" (batch_size must be a multiple of micro_batch)" if name == "micro_batch" else "")
                )

    @property
    def published_kind(self) -> Literal["adapter", "version"]:
        """The kind of what this run publishes, as the weight store knows it."""
        return "adapter" if not self.full and self.lora_publish == "adapter" else "version"

    @property
    def publishes_epochs(self) -> bool:
        return self.publish in ("checkpoints", "epoch")

    @property
    def follows_validations(self) -> bool:
        """Whether what the validations find decides what this run publishes, or when it ends."""
        return self.publish == "best" or self.early_stopping_patience > 0

    @property
    def most_validations(self) -> int | None:
        """The most that the run has: any of them may publish a version if the best is to be published."""
        return MOST_VERSIONS if self.publish == "best" else None

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TrainSpec:
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> TrainSpec:
        """Raises InvalidSpec for an unknown field, a missing one, or a value of another type."""
        known = typing.get_type_hints(cls)
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise InvalidSpec(f"TrainSpec has no field {unknown[0]!r}; it has {sorted(known)}")
        required = {f.name for f in fields(cls) if f.default is f.default_factory}  # both MISSING
        missing = sorted(required - set(given))
        if missing:
            raise InvalidSpec(f"TrainSpec needs the field {missing[0]!r}")
        return cls(**{name: _typed(name, value, known[name]) for name, value in given.items()})


def _typed(name: str, value: Any, wanted: Any) -> Any:
    origin = typing.get_origin(wanted)
    if origin is Literal:
        ok = value in typing.get_args(wanted)
    elif origin is types.UnionType:
        ok = any(
            value is None if option is type(None) else isinstance(value, option) for option in typing.get_args(wanted)
        )
    elif origin is tuple:
        ok = isinstance(value, (list, tuple))
        value = tuple(value) if ok else value
    elif wanted is float:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool)
        value = float(value) if ok else value
    elif wanted is int:
        ok = isinstance(value, int) and not isinstance(value, bool)
    else:
        ok = isinstance(value, wanted)
    if not ok:
        raise InvalidSpec(f"TrainSpec.{name} is {value!r}; expected {wanted}")
    return value
