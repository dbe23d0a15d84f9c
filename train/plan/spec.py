"""Defines a training run as data that JSON can store and restore."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from train.plan.errors import InvalidSpec

SNAPSHOT_SHARE, SHORTEST_S, LONGEST_S = 0.02, 5.0, 300.0
"""Snapshots take at most 2 % of a job's time; a crash loses at most 5 minutes."""
Schedule = Literal["cosine", "linear", "constant", "wsd"]
FLOOR_RATIO = 0.1
DECAY_SHARE = 0.2
"""Share of the steps in which `wsd` decays: 10 to 20 % suffice (Hägele et al., arXiv 2405.18392)."""


@dataclass(frozen=True)
class TrainSpec:
    """The settings of a run; the same on all ranks, and unchanged when the job is suspended and resumed.

    `batch_size` counts packed sequences per optimizer step over all devices. Together with `micro_batch` and `seed` it
    determines the tokens of each step, so the run may move between world sizes (`auto.allowed_sizes`) without changing
    its loss curve. `auto.resolve` checks which values go together.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"strict": True, "extra": "forbid"}

    job_id: str
    base_path: str  # Hugging Face directory of the base model
    train_path: str  # chat JSONL as `train.data_checks.check` writes it
    run_dir: str  # directory for TensorBoard files and token caches
    shm_root: str  # root of the weight store
    output_model: str  # public name of the result, e.g. ft:base:suffix:id
    base_model: str = ""
    base_version: str = ""  # version of base_model
    base_adapter: str | None = None  # directory of an adapter that is merged into base_path before training
    valid_path: str | None = None
    method: str = "supervised"  # a row of train.methods.methods
    options: dict = field(default_factory=dict)  # the method's own hyperparameters (Method.own_hyperparameters)
    version_prefix: str = ""  # published versions are named "<version_prefix>step-<n>"
    # When versions are published: only at the end; also after each epoch ("checkpoints", or "epoch", which serves each
    # one at once); or after each validation that is the best so far. The controller keeps the newest versions.
    publish: Literal["end", "checkpoints", "epoch", "best"] = "end"
    seed: int = 0

    n_epochs: int = 1
    batch_size: int = 8
    micro_batch: int = 1
    max_length: int = 1024  # tokens per packed sequence
    packing: bool = True

    learning_rate: float = 1e-5
    lr_scheduler: Schedule = "cosine"
    warmup_ratio: float = 0.03
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0: no clipping

    full: bool = True  # False: LoRA
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = field(default=())  # (): every linear layer but the output head
    lora_publish: Literal["adapter", "merged"] = "merged"  # what a LoRA run publishes

    zero_stage: int = 1
    tensor_parallel: int = 1  # ranks that share one copy of the model; the world size is a multiple of it
    sequence_parallel: int = 1  # ranks that share the tokens of a row; the world size is a multiple of it
    precision: Literal["bf16", "fp32"] = "bf16"
    activation_checkpointing: bool = False
    offload: Literal["none", "optimizer", "parameters"] = "none"
    kernels: Literal["torch", "liger"] = "torch"  # for norms, rotary embedding, MLPs (train.model.model.use_liger)
    device_kind: str = field(kw_only=True)  # kind of the devices on which the ranks compute

    # None: as often as is cheap (every_s); 0: only on suspension.
    snapshot_every_s: float | None = None
    shm_budget_bytes: int | None = None  # limit of the weight store; None: the size of the tmpfs
    serve_dtype: Literal["bf16", "fp32"] = "bf16"  # dtype of published weights
    eval_interval: int = 0  # steps between two validations; 0: one after each epoch
    early_stopping_patience: int = 0  # validations without improvement after which the run ends; 0: never

    @property
    def published_kind(self) -> Literal["adapter", "version"]:
        """The kind of this run's result in the weight store."""
        return "version" if self.full or self.lora_publish == "merged" else "adapter"

    @property
    def publishes_epochs(self) -> bool:
        return self.publish in ("checkpoints", "epoch")

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> TrainSpec:
        """Build a spec. Raises InvalidSpec for an unknown or missing field, or a value of another type."""
        from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415  the command line only reads the fields

        try:
            return TypeAdapter(cls).validate_json(json.dumps(given))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise InvalidSpec(f"TrainSpec.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def every_s(cost_s: float) -> float:
    """Return the seconds between snapshots that each cost this many seconds."""
    return min(LONGEST_S, max(SHORTEST_S, cost_s / SNAPSHOT_SHARE))


def learning_rate(
    step: int, total_steps: int, *, peak: float, warmup_ratio: float, schedule: Schedule = "cosine"
) -> float:
    """Rate for optimizer step `step` (0-based): linear warm-up from peak / warm-up steps to `peak`, then `schedule`.

    cosine, linear: decay to a tenth of `peak`. constant: `peak`. wsd (warm-up, stable, decay; MiniCPM, arXiv
    2404.06395): `peak` until the last fifth of the steps, then linear decay to a tenth.
    """
    warmup_steps = math.ceil(total_steps * warmup_ratio)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    decay_from = warmup_steps
    if schedule == "wsd":
        decay_from = max(warmup_steps, total_steps - 1 - math.ceil(total_steps * DECAY_SHARE))
    progress = min(1.0, max(0.0, (step - decay_from) / max(1, total_steps - 1 - decay_from)))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return peak * (FLOOR_RATIO + (1 - FLOOR_RATIO) * left)
