"""The answer to "what would this job be, and would it fit?", for models of the box and for shapes it does not have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.controller.jobs import settings
from appliance.controller.models.capacity import BoxFacts, Verdict
from runtime.devices.kinds import hardware_first
from serve.core.config import EngineConfig
from serve.core.sizing import adapter_rank_limit
from train.methods.method import Method
from train.methods.methods import DEFAULT, method_of
from train.plan import auto
from train.plan.errors import InvalidHyperparameter
from train.plan.estimate import ModelShape, parameters_of
from train.plan.known_shapes import SHAPES, shape_named
from weights.format.foreign_json import loads, size, text_part

TYPICAL_EXAMPLES, TYPICAL_TOKENS = 1000, 200
GIB, MIB = 2**30, 2**20
MEMORY_BYTES = {
    "a10": 23_028 * MIB,
    "a100-40gb": 40_960 * MIB,
    "a100": 81_920 * MIB,
    "a800": 81_920 * MIB,
    "b200": 183_359 * MIB,
    "h20": 97_871 * MIB,
    "h100": 81_559 * MIB,
    "h800": 81_559 * MIB,
    "h200": 143_771 * MIB,
    "l20": 46_068 * MIB,
    "l4": 23_034 * MIB,
    "l40s": 46_068 * MIB,
    "rtx-3090": 24_576 * MIB,
    "rtx-4090": 24_564 * MIB,
    "rtx-4090d": 24_564 * MIB,
    "rtx-5090": 32_607 * MIB,
}
"""The memory of one device, as nvidia-smi shows it; the driver keeps some hundreds of MB of it
(`runtime.devices.cuda`)."""
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
    return Imagined(ModelShape.from_config(config, count), context or None, arch)


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
    name = accelerator.lower().replace("_", "-").replace(" ", "-")
    if name in MEMORY_BYTES:
        return MEMORY_BYTES[name]
    if name.endswith("gb") and name[:-2].isdigit() and int(name[:-2]):
        return int(name[:-2]) * GIB
    raise BadShape(
        f"the accelerator {accelerator!r} is not known; expected one of {', '.join(MEMORY_BYTES)}, or a size such as "
        "48gb"
    )


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
        chosen = settings.choose(how, given, dataset, stats, settings.Wish(), devices)
    except InvalidHyperparameter as error:
        raise BadShape(str(error)) from error
    verdict = settings.verdict(imagined.shape, chosen, box, how)
    answer = planned(model, how, chosen, dataset, verdict, counted=False)
    answer["numbers"]["host"]["room_bytes"] = None
    return answer
