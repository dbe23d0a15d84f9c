"""The answer to "what would this job be, and would it fit?", for models of the box and for shapes it does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.controller.devices.energy import J_PER_KWH
from appliance.controller.jobs import devices as job_devices
from appliance.controller.jobs import settings
from appliance.controller.models import capacity
from appliance.controller.models.capacity import BoxFacts, Verdict
from appliance.controller.models.node_sizes import NodeSizes
from runtime.devices.kinds import hardware_first
from runtime.devices.published import ACCELERATORS, Accelerator
from serve.core.config import EngineConfig
from serve.core.model_settings import ModelSettings
from serve.core.sizing import EngineSize, ServedShape, adapter_rank_limit, engine_size
from train.methods.method import Method
from train.methods.methods import DEFAULT, method_of
from train.plan import auto
from train.plan.errors import InvalidHyperparameter
from train.plan.estimate import ModelShape, parameters_of
from train.plan.known_shapes import SHAPES, shape_named
from train.plan.speed import speed
from weights.format.foreign_json import loads, size, text_part

TYPICAL_EXAMPLES, TYPICAL_TOKENS = 1000, 200
GIB, MIB = 2**30, 2**20
_CONFIG_BYTES = 4 * MIB
_CHOSEN = tuple(
    (
        "full lora_rank n_epochs batch_size max_length learning_rate zero_stage precision offload "
        "activation_checkpointing micro_batch tensor_parallel"
    ).split()
)


class BadShape(ValueError):
    """The model or device is not known well enough to plan with; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Imagined:
    """A model that no box needs to have."""

    shape: ModelShape
    context_tokens: int | None
    arch: str
    config: dict[str, Any]


def typical(examples: int | None, method: Method) -> auto.DatasetStats:
    """Assumed where no file is given."""
    count = examples or TYPICAL_EXAMPLES
    return auto.DatasetStats(count, TYPICAL_TOKENS * method.sequences * count, 2 * TYPICAL_TOKENS)


def planned(
    model: str,
    method: Method,
    chosen: settings.Settings,
    dataset: auto.DatasetStats,
    verdict: Verdict,
    *,
    counted: bool,
) -> dict[str, Any]:
    """counted: whether `dataset` was counted; otherwise it is assumed."""
    fields = chosen.resolved
    answer = verdict.as_dict()
    if counted:
        answer["warnings"] += settings.cut_examples(method, dataset, fields)
    common = {name: fields[name] for name in _CHOSEN if fields["full"] is False or name != "lora_rank"}
    return {
        "object": "plan",
        "kind": "job",
        "model": model,
        "method": method.name,
        "hyperparameters": fields.get("options", {}) | common,
        "data": {
            "counted": counted,
            "examples": dataset.n_examples,
            "tokens": dataset.n_tokens,
            "longest_example_tokens": dataset.longest_example_tokens,
            "steps": auto.steps(method.rows(dataset), fields),
        },
        **answer,
    }


def served(
    model: str,
    size: Callable[[int], EngineSize],
    weight_bytes: int,
    replicas: int,
    tensor_parallel: int,
    box: BoxFacts,
) -> dict[str, Any]:
    """size, weight_bytes: see `capacity.serve`."""
    verdict = capacity.serve(size, weight_bytes, replicas, tensor_parallel, box)
    answer = {"object": "plan", "kind": "serve", "model": model, "replicas": replicas}
    return answer | {"tensor_parallel": tensor_parallel, **verdict.as_dict()}


def imagine(given: str) -> Imagined:
    """given: a directory with config.json, such a file, or the name of a known shape. Raises BadShape."""
    path = Path(given).expanduser()
    if path.is_dir():
        path = path / "config.json"
    config = _read(path) if path.is_file() else shape_named(given)
    if config is None:
        raise BadShape(
            f"{given!r} is not a directory with a config.json, no such file and no known shape; the known ones are "
            f"{', '.join(sorted(SHAPES))}"
        )
    count = parameters_of(config)
    if not count:
        raise BadShape(
            f"{path} does not say how large the model is: expected hidden_size, num_hidden_layers, "
            "num_attention_heads, intermediate_size and vocab_size, as transformers writes them"
        )
    context = size(text_part(config), "max_position_embeddings")
    arch = next(iter(config.get("architectures") or []), "")
    return Imagined(ModelShape.from_config(config, count), context or None, arch, config)


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _CONFIG_BYTES:
            raise BadShape(f"{path} is larger than any config.json")
        found = loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadShape(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadShape(f"{path} is not a config.json: it holds no JSON object")
    return found


def memory_bytes_of(accelerator: str) -> int:
    """The memory of one GPU by its name, or by its size ("48gb"). Raises BadShape."""
    name = _key(accelerator)
    if name in ACCELERATORS:
        return ACCELERATORS[name].memory_bytes
    if name.endswith("gb") and name[:-2].isdigit() and int(name[:-2]):
        return int(name[:-2]) * GIB
    raise BadShape(
        f"the accelerator {accelerator!r} is not known; expected one of {', '.join(ACCELERATORS)}, or a size such as "
        "48gb"
    )


def _key(accelerator: str) -> str:
    name = accelerator.lower().replace("_", "-").replace(" ", "-")
    return name.replace("rtx", "rtx-", 1) if name.startswith("rtx") and name[3:4].isdigit() else name


def estimate(
    shape: ModelShape,
    method: Method,
    chosen: settings.Settings,
    dataset: auto.DatasetStats,
    devices: int,
    accelerator: Accelerator | None,
) -> dict[str, Any] | None:
    """Device-hours and energy of a job of which nothing was measured, each [least, most]; "used": the parts of
    "peak_flops" that were assumed. None where the device is not known, or what takes the time is not products in bf16:
    answers that the model writes, an optimizer on the host."""
    fields = chosen.resolved
    if accelerator is None or method.rolls_out or fields["precision"] != "bf16" or fields["offload"] != "none":
        return None
    row_tokens = min(dataset.n_tokens / dataset.n_examples / method.sequences, fields["max_length"])
    tokens = round(row_tokens * dataset.n_examples * method.sequences)
    found = speed(
        shape,
        fields,
        accelerator,
        tokens=tokens,
        row_tokens=row_tokens,
        steps=auto.steps(method.rows(dataset), fields),
        devices=devices,
        reference=method.needs_reference,
        again=method.needs_divergence,
    )
    return {
        "flops": found.flops,
        "peak_flops": accelerator.peak_flops,
        "used": list(found.used),
        "device_hours": [one / 3600 for one in found.device_s],
        "hours": [one / 3600 / devices for one in found.device_s],
        "watts_per_device": accelerator.board_w,
        "kwh": [accelerator.board_w * one / J_PER_KWH for one in found.device_s],
    }


def serve_imagined(
    model: str, *, replicas: int, tensor_parallel: int, devices: int, accelerator: str
) -> dict[str, Any]:
    """Engines on one machine with this many GPUs of a kind, with a box's usual settings; its shared memory counts as
    ample. model: see `imagine`. Raises BadShape."""
    imagined, kind, each = imagine(model), hardware_first()[0].name, memory_bytes_of(accelerator)
    weight_bytes = 2 * imagined.shape.n_parameters
    shape = ServedShape.from_config(imagined.config, weight_bytes, imagined.shape.n_parameters)
    if shape.quantized:
        raise BadShape(f"{model} is quantised, and its config.json does not say how many bytes its weights take")
    box = BoxFacts(devices, kind, each, None, 1 << 62, devices)

    def size(shards: int) -> EngineSize:
        return engine_size(
            EngineConfig(),
            shape,
            task="generate",
            arch=imagined.arch,
            tensor_parallel=shards,
            device_kind=kind,
            device_memory_bytes=each,
            asleep_per_device=box.asleep_per_device,
            settings=ModelSettings(dtype="bfloat16"),
        )

    answer = served(model, size, weight_bytes, replicas, tensor_parallel, box)
    answer["numbers"]["host"]["room_bytes"] = None
    return answer


def plan_imagined(
    model: str,
    given: dict[str, Any],
    *,
    devices: int,
    accelerator: str,
    examples: int | None = None,
    method: str = DEFAULT.name,
) -> dict[str, Any]:
    """A job on one machine with this many GPUs of a kind, with a box's usual settings; its host memory counts as ample.
    model: see `imagine`. Raises BadShape."""
    imagined, kind, each = imagine(model), hardware_first()[0].name, memory_bytes_of(accelerator)
    box = BoxFacts(devices, kind, each, None, 1 << 62, devices)
    rank = adapter_rank_limit(EngineConfig(), task="generate", arch=imagined.arch)
    stats = settings.of_shape(imagined.shape, imagined.context_tokens, kind, rank, computes_bf16=True)
    how = method_of(method)
    dataset = typical(examples, how)
    try:
        chosen = settings.choose(how, given, dataset, stats, job_devices.Wish(), NodeSizes((devices,)))
    except InvalidHyperparameter as error:
        raise BadShape(str(error)) from error
    verdict = capacity.job(imagined.shape, chosen.resolved, chosen.sizes, box, how)
    answer = planned(model, how, chosen, dataset, verdict, counted=False)
    answer["numbers"]["host"]["room_bytes"] = None
    shown = verdict.numbers["devices"]
    known = ACCELERATORS.get(_key(accelerator))
    estimated = estimate(imagined.shape, how, chosen, dataset, shown, known)
    return {**answer, "device_hours": None, "energy": None, "estimate": estimated}
