"""Resolve OpenAI's hyperparameters ("auto" or a number) and our extras into fields of a TrainSpec. Pure.

The rules for "auto" are ours (OpenAI does not publish its own); each stands beside its function with its reason.
For the learning rate and the epochs there are published ones:

Published for AdamW and supervised fine-tuning, all weights: torchtune and TRL 2e-5, Tulu 3 5e-6 (8 B), SmolLM2 3e-4
(1.7 B) to 1e-3 (135 M). Adapters: TRL, axolotl, unsloth and torchtune 2e-4 to 3e-4; Tinker 1e-3 (1 B) to 3e-4 (8 B);
ten times the rate of all weights, whatever the rank (Schulman et al., "LoRA Without Regret", 2025). By model size: one
over the root of the number of parameters (Tinker). By batch, with Adam: its root (Malladi et al., NeurIPS 2022).

What is chosen: at 7 B and a step of up to 8,192 tokens, 1e-5 for all weights and 1e-4 for adapters, the lower end of
what is published, because most jobs here are small and a small job that learns too fast forgets (docs/first-model.md).
More data makes larger steps (`_rows`), and those bear more: up to three times as much from 74,000 tokens a step
on, which is where the published sweeps were made.

Few rows have to be seen several times to be learned at all: until `FEWEST_SEEN` have passed, `MOST_EPOCHS` times at
most. Adapters of few rows get half as much again of the rate, and take more passes than all weights do.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from runtime.devices.kinds import kind_of
from train.plan.errors import InvalidHyperparameter
from train.plan.estimate import Load, ModelShape
from train.plan.spec import TrainSpec

_FIELDS = get_type_hints(TrainSpec)
Own = Callable[["Given", dict[str, Any]], None]
LORA_FROM_PARAMETERS = 1_000_000_000
OF_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "lora_publish")
HIGHEST_RATE = 100.0  # times the automatic learning rate of supervised tuning; more ruins a model
LEAST_STEPS = 50  # fewer teach little whatever the learning rate: warm-up and decay are most of them
ROW_MULTIPLE = 32  # tokens of a row without packing, because kernels are compiled for every new shape
SHORTEST_ROW = 128  # tokens; a shorter one takes a device as long
REFERENCE_PARAMETERS = 7e9
REFERENCE_STEP_TOKENS = 8192
FULL, ADAPTER = 1e-5, 1e-4
LARGEST_FULL, LARGEST_ADAPTER = 1e-3, 1.2e-3
LARGEST_BATCH_FACTOR = 3.0
FEW_ROWS, FEW_ROWS_FACTOR = 200, 1.5
FEWEST_SEEN = 600
MOST_EPOCHS_FULL, MOST_EPOCHS_ADAPTER = 6, 10
# One over the root for all weights, as published; adapters of small models bear less than ten times that.
FULL_EXPONENT, ADAPTER_EXPONENT = 0.5, 0.27


@dataclass(frozen=True)
class DatasetStats:
    """Figures of the training file; tokens may be estimates (data_check). lengths: in tokens, of some examples that
    stand for all, in the order of the file; without them rows count as full. documents: examples longer than a row are
    continued in the next."""

    n_examples: int
    n_tokens: int
    longest_example_tokens: int
    lengths: tuple[int, ...] = ()
    documents: bool = False


@dataclass(frozen=True)
class ModelStats:
    """The base model and the devices. `max_position_embeddings` is its context in tokens.

    adapter_max_rank: the largest LoRA rank that engines serve beside this base without merging; 0: none.
    computes_bf16: see runtime.devices. quantised: its weights stay as they are stored, and adapters alone are trained.
    """

    shape: ModelShape
    max_position_embeddings: int
    device_kind: str
    adapter_max_rank: int = 0
    computes_bf16: bool = True
    quantised: bool = False


def steps(dataset: DatasetStats, fields: Mapping[str, Any]) -> int:
    """Optimizer steps of a run with these fields of a TrainSpec; exact where `dataset.lengths` has every example."""
    # As train.data.packing.StepPlan: the last step of an epoch may take rows of the next.
    return max(1, math.ceil(fields["n_epochs"] * _sequences(dataset, fields) / fields["batch_size"]))


def load(dataset: DatasetStats, fields: Mapping[str, Any], *, sequences: int = 1, forwards: float = 0.0) -> Load:
    """Return the mean content of a run's rows. sequences: of an example, all in one row. forwards: see `Load`."""
    rows = steps(dataset, fields) * fields["batch_size"]
    lengths = [min(length, fields["max_length"]) for length in dataset.lengths]
    tokens = sum(lengths) * dataset.n_examples / len(lengths) if lengths else dataset.n_tokens
    attended = sum(one * one for one in lengths) / max(1, sum(lengths)) if lengths else tokens / dataset.n_examples
    full = sequences * min(fields["max_length"], tokens * fields["n_epochs"] / rows)
    return Load(max(1.0, full), min(attended, fields["max_length"]), forwards)


def micro_batches(fields: Mapping[str, Any]) -> list[int]:
    """Sizes of micro-batches that divide a step. Without packing only that of `fields`: examples differ in length."""
    batch = fields["batch_size"]
    return [n for n in range(1, batch + 1) if batch % n == 0 and (fields["packing"] or n == fields["micro_batch"])]


def _sequences(dataset: DatasetStats, fields: Mapping[str, Any]) -> float:
    """The sequences of one epoch."""
    if dataset.documents:
        return max(dataset.n_tokens / fields["max_length"], 1.0 if fields["packing"] else float(dataset.n_examples))
    if not fields["packing"]:
        return float(dataset.n_examples)
    if not dataset.lengths:
        return min(float(dataset.n_examples), dataset.n_tokens / fields["max_length"])
    most = fields["max_length"]
    lengths = [min(length, most) for length in dataset.lengths]
    packs = best_fit(enumerate(sorted(lengths, reverse=True)), most)
    return len(packs) * (dataset.n_examples / len(lengths))


def best_fit(decreasing: Iterable[tuple[int, int]], capacity: int) -> list[list[int]]:
    """Groups of examples whose lengths sum to at most `capacity` tokens; every example in exactly one.

    decreasing: (number, length) of each example, the longest first, each length at most `capacity`, which may be
    millions. Wastes under a percent on usual data (Ding et al., "Fewer Truncations Improve Language Modeling", 2024),
    and much where few examples fit a row.
    """
    packs: list[list[int]] = []
    with_space: dict[int, list[int]] = defaultdict(list)
    spaces: list[int] = []  # that some pack has left, ascending
    for index, length in decreasing:
        place = bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces[place]
            pack = with_space[space].pop()
            if not with_space[space]:
                del spaces[place]
        else:
            space, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(index)
        if not with_space[space - length]:
            insort(spaces, space - length)
        with_space[space - length].append(pack)
    return packs


def resolve(
    hyperparameters: dict[str, Any], dataset: DatasetStats, model: ModelStats, max_devices: int, own: Own | None = None
) -> dict:
    """Fields of a TrainSpec. `own` reads what only one training method takes. Raises InvalidHyperparameter for an
    unknown name or a value out of range. An "auto" layout is the plainest one here; the devices decide later
    (appliance.controller.models.capacity.Estimator.layouts)."""
    given = Given(hyperparameters)
    fields: dict[str, Any] = {}
    # Not fp8 as serve_dtype: it needs the largest element of a tensor before its first byte is written, and no rank
    # sees a whole one.
    for name in ("packing", "offload", "activation_checkpointing", "kernels", "lr_scheduler", "serve_dtype"):
        fields[name] = given.choice(name, auto=getattr(TrainSpec, name))
    for name, high in (("lora_dropout", 0.9), ("warmup_ratio", 0.9), ("weight_decay", 1), ("max_grad_norm", 1e6)):
        fields[name] = given.number(name, 0, high, auto=getattr(TrainSpec, name))
    for name in ("eval_interval", "early_stopping_patience"):
        fields[name] = given.integer(name, 0, 1_000_000, auto=0)

    # Never chosen on its own: it talks in every layer, ZeRO once per step, so it pays only between devices with fast
    # links and for models that one device cannot hold.
    fields["tensor_parallel"] = given.integer("tensor_parallel", 1, max(1, max_devices), auto=1)
    fields["sequence_parallel"] = given.integer("sequence_parallel", 1, max(1, max_devices), auto=1)
    # LoRA above a size where the optimizer's 12 bytes per parameter hurt, or if a setting is given that
    # only adapters have.
    small = model.shape.n_parameters < LORA_FROM_PARAMETERS and not model.quantised
    fields["full"] = given.choice("full", auto=small and not any(map(given.is_set, OF_LORA)))
    widest = min(1024, model.shape.hidden or 1024)  # a rank beyond the model's width trains more than all weights would
    fields["lora_rank"] = given.integer("lora_rank", 1, widest, auto=min(16, widest, model.adapter_max_rank or 16))
    fields["lora_alpha"] = given.number("lora_alpha", 0.001, 1e6, auto=2.0 * fields["lora_rank"])
    fields["lora_targets"] = tuple(given.names("lora_targets"))
    # An adapter wherever the base's engines take it: hundreds of them share one engine, and it has 1 % of the bytes.
    merged = why_no_adapter(model, fields) and not model.quantised
    fields["lora_publish"] = given.choice("lora_publish", auto="merged" if merged else "adapter")
    fields["precision"] = given.choice("precision", auto="bf16" if model.computes_bf16 else "fp32")
    fields["zero_stage"] = given.integer("zero_stage", 0, 3, auto=3 if fields["offload"] == "parameters" else 1)

    fields["n_epochs"] = given.integer("n_epochs", 1, 50, auto=epochs(dataset.n_examples, full=fields["full"]))
    groups = max(1, max_devices // ranks_of_row(fields))
    length, rows = _rows(given, dataset, model, fields, groups)
    fields["max_length"] = given.integer("max_length", 32, model.max_position_embeddings, auto=length)
    fields["micro_batch"] = given.integer("micro_batch", 1, 1024, auto=1)
    # A layout does not change what a step learns: as many rows as without it, for whole micro-batches on each device.
    each = fields["micro_batch"] * min(rows, 2 ** math.floor(math.log2(groups)))
    fields["batch_size"] = given.integer("batch_size", 1, 4096, auto=math.ceil(rows / each) * each)
    _check_together(given, model, fields)

    fields["learning_rate"] = _learning_rate(given, dataset, model, fields)
    fields["publish"] = given.choice("publish", auto="checkpoints")
    every = given.value("snapshot_every_s", None)
    fields["snapshot_every_s"] = every if every is None else given.number("snapshot_every_s", 0, 86400, auto=0)
    if own is not None:
        own(given, fields)
    for name, value in hyperparameters.items():
        if value is not None and name not in given.read:
            raise InvalidHyperparameter(name, value, f"a known name: one of {', '.join(sorted(given.read))}")
    return fields


def _check_together(given: Given, model: ModelStats, fields: dict[str, Any]) -> None:
    """Raises InvalidHyperparameter for the first value that does not go with others or with the model."""
    full, tensor, batch, publish = (fields[n] for n in ("full", "tensor_parallel", "batch_size", "lora_publish"))
    slices, most, why = model.shape.tensor_slices, model.adapter_max_rank, why_no_adapter(model, fields)
    # The last is judged by its value.
    of_lora = " and ".join(name for name in OF_LORA[:-1] if given.is_set(name))
    whole = tensor > 1 and (model.quantised or slices == 1)
    beyond = most and fields["lora_rank"] > most and given.value("lora_publish", "auto") != "merged"
    offloaded, on_host = fields["offload"] == "parameters", kind_of(model.device_kind).on_host
    rules = (
        ("tensor_parallel", whole, "1: quantised weights and experts are not cut; zero_stage 3 shares them out"),
        ("tensor_parallel", slices % tensor, f"a divisor of {slices}: heads, key-value heads and MLP are cut evenly"),
        ("full", full and model.quantised, "false: the model's weights are quantised, so only adapters are trained"),
        ("full", full and of_lora, f"false with {of_lora}, which adapters alone have, or none of these"),
        # It would be published merged, a hundred times as large: only on explicit request.
        ("lora_rank", beyond, f"at most {most} ([serve] adapter_max_rank), or more with lora_publish 'merged'"),
        # Ranks of a group would drop different inputs.
        ("lora_dropout", fields["lora_dropout"] and ranks_of_row(fields) > 1, "0 with tensor or sequence parallelism"),
        (
            "lora_publish",
            model.quantised and (why or publish == "merged"),
            f"'adapter', which quantised weights stay beside{why and f', but {why}'}",
        ),
        ("lora_publish", publish == "adapter" and why, f"'merged': {why}"),
        ("kernels", fields["kernels"] == "liger" and on_host, "'torch': Liger's kernels are for GPUs"),
        ("zero_stage", offloaded and fields["zero_stage"] != 3, "3, because offload is 'parameters'"),
        (
            "sequence_parallel",
            not shares_rows(model, fields),
            f"1, or a power of two to {ROW_MULTIPLE} that divides max_length {fields['max_length']} and the model's "
            f"{model.shape.attention_heads} attention heads, with tensor_parallel 1",
        ),
        ("micro_batch", batch % fields["micro_batch"], f"a divisor of batch_size {batch}"),
    )
    for name, wrong, expected in rules:
        if wrong:
            raise InvalidHyperparameter(name, fields[name], expected)


def ranks_of_row(fields: Mapping[str, Any]) -> int:
    """How many ranks compute one micro-batch together, by the fields of a TrainSpec."""
    return fields.get("tensor_parallel", 1) * fields.get("sequence_parallel", 1)


def shares_rows(model: ModelStats, fields: Mapping[str, Any]) -> bool:
    """Whether `sequence_parallel` ranks can share the tokens of a row: in a layer's attention each has all tokens of
    some of its heads."""
    parts, heads, key_heads = fields["sequence_parallel"], model.shape.attention_heads, model.shape.kv_heads
    return parts == 1 or (
        fields["tensor_parallel"] == 1
        and heads > 0
        and not any(count % parts for count in (heads, fields["max_length"], ROW_MULTIPLE))
        and (key_heads % parts == 0 or parts % key_heads == 0)
    )


def allowed_sizes(batch_size: int, max_devices: int, micro_batch: int = 1, together: int = 1) -> list[int]:
    """World sizes a run may have: each rank (or each group of ranks that compute a row `together`) takes the same whole
    number of micro-batches of every step."""
    micro_batches = batch_size // micro_batch
    return [together * groups for groups in range(1, max_devices // together + 1) if micro_batches % groups == 0]


def why_no_adapter(model: ModelStats, fields: Mapping[str, Any]) -> str:
    """Why engines of the base do not serve what a run with these fields of a TrainSpec trains beside it; "" if they
    do."""
    if fields["full"]:
        return "full is true"
    if not model.adapter_max_rank:
        return "engines of this base take no adapters"
    if not all(target.endswith("_proj") for target in fields["lora_targets"]):
        return "engines take adapters of the layers named *_proj only"
    if fields["lora_rank"] > model.adapter_max_rank:
        return f"engines take adapters of rank {model.adapter_max_rank} at most"
    return ""


def _rows(given: Given, dataset: DatasetStats, model: ModelStats, fields: dict, devices: int) -> tuple[int, int]:
    """(tokens of a row of packed examples, rows of a step). Rows are long where there is much to learn, since a device
    likes that, and cut as often as a small job needs to take some steps at all and to use the devices that there are.
    Cutting for devices changes neither the tokens of a step nor the number of steps."""
    # Long enough for every example (estimates are off by a third at times), no longer than the device likes.
    preferred = 512 if kind_of(model.device_kind).on_host else 4096
    longest = 2 ** math.ceil(math.log2(max(32, 1.3 * dataset.longest_example_tokens)))
    length = max(32, min(model.max_position_embeddings, max(preferred, min(longest, 4 * preferred))))
    shortest = min(length, max(longest, SHORTEST_ROW))
    if given.is_set("max_length"):
        length = shortest = given.integer("max_length", 32, model.max_position_embeddings, auto=length)
    if not fields["packing"]:
        shortest = length
    epochs = fields["n_epochs"]

    def rows(length: int) -> float:
        return epochs * _sequences(dataset, {**fields, "max_length": length})

    while length // 2 >= shortest and rows(length) < LEAST_STEPS:
        length //= 2
    # A power of two, so that 1, 2, 4 ... devices can share it; about fifty steps at least; and, if the data allows
    # some steps then, one row for every device, or some would have to stand idle.
    count, widest = rows(length), 2 ** math.floor(math.log2(max(1, devices)))
    batch = 2 ** max(0, min(6, math.floor(math.log2(max(1.0, count / 50)))))
    batch = max(batch, widest) if count / widest >= LEAST_STEPS else batch
    while length // 2 >= shortest and 2 * batch <= devices and not given.is_set("batch_size"):
        length, batch = length // 2, 2 * batch
    return length, batch


def epochs(rows: int, *, full: bool) -> int:
    """Passes over so many rows."""
    for most, usual in ((FEW_ROWS, 5), (2000, 3), (20000, 2)):
        if rows < most:
            return max(usual, min(MOST_EPOCHS_FULL if full else MOST_EPOCHS_ADAPTER, FEWEST_SEEN // max(1, rows)))
    return 1


def peak_rate(n_parameters: int, step_tokens: float, *, full: bool, rows: int = FEW_ROWS) -> float:
    """Peak of the schedule. n_parameters: of the base. step_tokens: trained in one optimizer step, on average. rows: of
    the training file."""
    smaller = REFERENCE_PARAMETERS / max(n_parameters, 1)
    base = FULL * smaller**FULL_EXPONENT if full else ADAPTER * smaller**ADAPTER_EXPONENT
    batch = math.sqrt(max(1.0, step_tokens / REFERENCE_STEP_TOKENS))
    if rows < FEW_ROWS and not full:
        base *= FEW_ROWS_FACTOR
    return min(base * min(batch, LARGEST_BATCH_FACTOR), LARGEST_FULL if full else LARGEST_ADAPTER)


def _learning_rate(given: Given, dataset: DatasetStats, model: ModelStats, fields: dict) -> float:
    step_tokens = fields["n_epochs"] * dataset.n_tokens / steps(dataset, fields)
    auto = peak_rate(model.shape.n_parameters, step_tokens, full=fields["full"], rows=dataset.n_examples)
    multiplier = given.number("learning_rate_multiplier", 1e-6, 1e4, auto=1.0)
    rate = given.number("learning_rate", 1e-9, 1.0, auto=auto)
    if rate * multiplier > HIGHEST_RATE * auto:
        name = "learning_rate" if given.is_set("learning_rate") else "learning_rate_multiplier"
        expected = f"at most {HIGHEST_RATE:g} times the automatic {auto:.2g}, with the multiplier; more ruins a model"
        raise InvalidHyperparameter(name, given.value(name, auto), expected)
    return rate * multiplier


class Given:
    """The hyperparameters as given; remembers which were read, so that a misspelt one is an error."""

    def __init__(self, values: dict[str, Any]):
        self.values = {name: value for name, value in values.items() if value not in (None, "auto")}
        self.read: set[str] = set()

    def is_set(self, name: str) -> bool:
        return name in self.values

    def integer(self, name: str, low: int, high: int, *, auto: int) -> int:
        return int(self.number(name, low, high, auto=auto, kind="whole number"))

    def number(self, name: str, low: float, high: float, *, auto: float, kind: str = "number") -> float:
        value = self.value(name, auto)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not auto and (not is_number or not low <= value <= high or (kind != "number" and value % 1)):
            raise InvalidHyperparameter(name, value, f"'auto' or a {kind} from {low} to {high}")
        return float(value)

    def choice(self, name: str, options: tuple[Any, ...] = (), *, auto: Any) -> Any:
        """One of `options`, or without them of what TrainSpec declares: some words, or true and false."""
        value, options = self.value(name, auto), options or get_args(_FIELDS[name]) or (True, False)
        if value not in options or type(value) is not type(options[0]):
            raise InvalidHyperparameter(name, value, f"one of {', '.join(map(str, options)).lower()}")
        return value

    def names(self, name: str) -> list[str]:
        value = self.value(name, [])
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        is_list = isinstance(value, (list, tuple)) and len(str(value)) <= 4096  # each round of the scheduler reads it
        if not is_list or not all(isinstance(part, str) for part in value):
            raise InvalidHyperparameter(name, value, "a short list of layer names, e.g. ['q_proj', 'v_proj']")
        return list(value)

    def value(self, name: str, auto: Any) -> Any:
        self.read.add(name)
        return self.values.get(name, auto)
