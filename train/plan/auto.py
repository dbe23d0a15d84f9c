"""Resolve OpenAI's hyperparameters ("auto" or a number) and our extras into fields of a TrainSpec. Pure.

OpenAI does not publish its rules for "auto"; ours are in the functions below, each with its reason. Learning rates and
epochs start from published values.

Published for AdamW and supervised fine-tuning of all weights: torchtune and TRL 2e-5, Tulu 3 5e-6 (8 B), SmolLM2 3e-4
(1.7 B) to 1e-3 (135 M). Adapters: TRL, axolotl, unsloth and torchtune 2e-4 to 3e-4; Tinker 1e-3 (1 B) to 3e-4 (8 B);
ten times the rate of full fine-tuning at any rank (Schulman et al., "LoRA Without Regret", 2025). Rates scale with 1 /
sqrt(parameters) (Tinker) and, for Adam, with sqrt(batch size) (Malladi et al., NeurIPS 2022).

Chosen at 7 B and up to 8,192 tokens per step: 1e-5 for full fine-tuning and 1e-4 for adapters. These rates are at the
low end of the published range, because most jobs here are small, and with a high rate the model of a small job forgets
(docs/first-model.md). More data makes larger steps (`_rows`), which allow higher rates: up to three times as high, from
74,000 tokens per step on, the size of the published sweeps.

A small data set is repeated until the run has seen `FEWEST_SEEN` rows, at most `MOST_EPOCHS_*` times. Adapters on few
rows get 1.5 times the rate, and more epochs than full fine-tuning.
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
HIGHEST_RATE = 100.0  # times the automatic learning rate of supervised tuning; higher rates ruin a model
LEAST_STEPS = 50  # fewer steps teach little at any learning rate, because most are warm-up and decay
ROW_MULTIPLE = 32  # row lengths without packing are multiples of this: kernels compile for every new shape
SHORTEST_ROW = 128  # in tokens; a device needs as much time for a shorter row
REFERENCE_PARAMETERS = 7e9
REFERENCE_STEP_TOKENS = 8192
FULL, ADAPTER = 1e-5, 1e-4
LARGEST_FULL, LARGEST_ADAPTER = 1e-3, 1.2e-3
LARGEST_BATCH_FACTOR = 3.0
FEW_ROWS, FEW_ROWS_FACTOR = 200, 1.5
FEWEST_SEEN = 600
MOST_EPOCHS_FULL, MOST_EPOCHS_ADAPTER = 6, 10
# Rates scale as (1 / parameters)**exponent: 0.5 as published; adapters of small models tolerate less increase.
FULL_EXPONENT, ADAPTER_EXPONENT = 0.5, 0.27


@dataclass(frozen=True)
class DatasetStats:
    """Statistics of the training file; token counts may be estimates. lengths: token counts of a sample of
    examples, in file order; if empty, rows are assumed full. documents: whether examples longer than a row continue in
    the next row."""

    n_examples: int
    n_tokens: int
    longest_example_tokens: int
    lengths: tuple[int, ...] = ()
    documents: bool = False


@dataclass(frozen=True)
class ModelStats:
    """The base model and the devices. max_position_embeddings: the model's context in tokens.

    adapter_max_rank: the largest LoRA rank that engines serve on this base without merging; 0: none. computes_bf16: see
    runtime.devices. quantised: weights stay in their stored form, and only adapters are trained.
    """

    shape: ModelShape
    max_position_embeddings: int
    device_kind: str
    adapter_max_rank: int = 0
    computes_bf16: bool = True
    quantised: bool = False


def steps(dataset: DatasetStats, fields: Mapping[str, Any]) -> int:
    """Return the optimizer steps of a run with these TrainSpec fields; exact if `dataset.lengths` has every example."""
    # As in train.data.packing.StepPlan, a step at the end of an epoch also takes rows of the next epoch.
    return max(1, math.ceil(fields["n_epochs"] * _sequences(dataset, fields) / fields["batch_size"]))


def load(dataset: DatasetStats, fields: Mapping[str, Any], *, sequences: int = 1, forwards: float = 0.0) -> Load:
    """The mean content of a run's rows. sequences: number per example, all in one row. forwards: see `Load`."""
    rows = steps(dataset, fields) * fields["batch_size"]
    lengths = [min(length, fields["max_length"]) for length in dataset.lengths]
    tokens = sum(lengths) * dataset.n_examples / len(lengths) if lengths else dataset.n_tokens
    attended = sum(one * one for one in lengths) / max(1, sum(lengths)) if lengths else tokens / dataset.n_examples
    full = sequences * min(fields["max_length"], tokens * fields["n_epochs"] / rows)
    return Load(max(1.0, full), min(attended, fields["max_length"]), forwards)


def micro_batches(fields: Mapping[str, Any]) -> list[int]:
    """Micro-batch sizes that divide a step; only that of `fields` without packing, where examples differ in length."""
    batch = fields["batch_size"]
    return [n for n in range(1, batch + 1) if batch % n == 0 and (fields["packing"] or n == fields["micro_batch"])]


def _sequences(dataset: DatasetStats, fields: Mapping[str, Any]) -> float:
    """Return the number of rows in one epoch."""
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
    """Pack examples into groups whose lengths sum to at most `capacity` tokens; every example is in one group.

    decreasing: (number, length) of each example, perhaps millions, the longest first, no length above `capacity`.
    Padding is below 1 % on usual data (Ding et al., "Fewer Truncations Improve Language Modeling", 2024), but large
    where only a few examples fit in a row.
    """
    packs: list[list[int]] = []
    with_space: dict[int, list[int]] = defaultdict(list)
    spaces: list[int] = []  # the distinct numbers of free tokens in packs, ascending
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
    """Return fields of a TrainSpec. own: reads the hyperparameters of one training method. An "auto" layout becomes the
    simplest layout here; later `capacity.Estimator.layouts` chooses a layout for the devices. Raises
    InvalidHyperparameter for an unknown name or a value out of range."""
    given = Given(hyperparameters)
    fields: dict[str, Any] = {}
    # serve_dtype cannot be fp8: fp8's scales need the largest element of a whole tensor, which no rank holds.
    for name in ("packing", "offload", "activation_checkpointing", "kernels", "lr_scheduler", "serve_dtype"):
        fields[name] = given.choice(name, auto=getattr(TrainSpec, name))
    for name, high in (("lora_dropout", 0.9), ("warmup_ratio", 0.9), ("weight_decay", 1), ("max_grad_norm", 1e6)):
        fields[name] = given.number(name, 0, high, auto=getattr(TrainSpec, name))
    for name in ("eval_interval", "early_stopping_patience"):
        fields[name] = given.integer(name, 0, 1_000_000, auto=0)

    # Tensor parallelism is never automatic: it communicates in every layer, ZeRO only once per step, so it only pays
    # off with fast links and for models that one device cannot hold.
    fields["tensor_parallel"] = given.integer("tensor_parallel", 1, max(1, max_devices), auto=1)
    fields["sequence_parallel"] = given.integer("sequence_parallel", 1, max(1, max_devices), auto=1)
    # LoRA for models so large that the optimizer's 12 bytes per parameter matter, or if an adapter option is set.
    small = model.shape.n_parameters < LORA_FROM_PARAMETERS and not model.quantised
    fields["full"] = given.choice("full", auto=small and not any(map(given.is_set, OF_LORA)))
    widest = min(1024, model.shape.hidden or 1024)  # with a higher rank, adapters would outgrow the weights
    fields["lora_rank"] = given.integer("lora_rank", 1, widest, auto=min(16, widest, model.adapter_max_rank or 16))
    fields["lora_alpha"] = given.number("lora_alpha", 0.001, 1e6, auto=2.0 * fields["lora_rank"])
    fields["lora_targets"] = tuple(given.names("lora_targets"))
    # Publish an adapter if engines can serve it: hundreds of adapters share one engine, each with 1 % of the bytes.
    merged = why_no_adapter(model, fields) and not model.quantised
    fields["lora_publish"] = given.choice("lora_publish", auto="merged" if merged else "adapter")
    fields["precision"] = given.choice("precision", auto="bf16" if model.computes_bf16 else "fp32")
    fields["zero_stage"] = given.integer("zero_stage", 0, 3, auto=3 if fields["offload"] == "parameters" else 1)

    fields["n_epochs"] = given.integer("n_epochs", 1, 50, auto=epochs(dataset.n_examples, full=fields["full"]))
    groups = max(1, max_devices // ranks_of_row(fields))
    length, rows = _rows(given, dataset, model, fields, groups)
    fields["max_length"] = given.integer("max_length", 32, model.max_position_embeddings, auto=length)
    fields["micro_batch"] = given.integer("micro_batch", 1, 1024, auto=1)
    # A layout must not change the rows of a step, except for rounding up to whole micro-batches per device.
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
    """Raise InvalidHyperparameter for the first value that conflicts with another value or with the model."""
    full, tensor, batch, publish = (fields[n] for n in ("full", "tensor_parallel", "batch_size", "lora_publish"))
    slices, most, why = model.shape.tensor_slices, model.adapter_max_rank, why_no_adapter(model, fields)
    # lora_publish is checked below, by its value.
    of_lora = " and ".join(name for name in OF_LORA[:-1] if given.is_set(name))
    whole = tensor > 1 and (model.quantised or slices == 1)
    beyond = most and fields["lora_rank"] > most and given.value("lora_publish", "auto") != "merged"
    offloaded, on_host = fields["offload"] == "parameters", kind_of(model.device_kind).on_host
    rules = (
        ("tensor_parallel", whole, "1: quantised weights and experts are cut by zero_stage 3 alone"),
        ("tensor_parallel", slices % tensor, f"a divisor of {slices}, as heads, key-value heads and MLP are divided"),
        ("full", full and model.quantised, "false: the model is quantised, so only adapters can be trained"),
        ("full", full and of_lora, f"false with {of_lora}, which only LoRA has, or none of these"),
        # The result would be published merged, a hundred times as large, so this needs an explicit request.
        ("lora_rank", beyond, f"at most {most} ([serve] adapter_max_rank), or more with lora_publish 'merged'"),
        # Dropout would differ between the ranks of a group.
        ("lora_dropout", fields["lora_dropout"] and ranks_of_row(fields) > 1, "0 with tensor or sequence parallelism"),
        (
            "lora_publish",
            model.quantised and (why or publish == "merged"),
            f"'adapter', because quantised weights cannot be merged{why and f'; but {why}'}",
        ),
        ("lora_publish", publish == "adapter" and why, f"'merged': {why}"),
        ("kernels", fields["kernels"] == "liger" and on_host, "'torch': Liger's kernels need a GPU"),
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
    """Return the number of ranks that compute one micro-batch together, from the fields of a TrainSpec."""
    return fields.get("tensor_parallel", 1) * fields.get("sequence_parallel", 1)


def shares_rows(model: ModelStats, fields: Mapping[str, Any]) -> bool:
    """Whether `sequence_parallel` ranks can share the tokens of a row: in attention each rank has all tokens of some
    heads."""
    parts, heads, key_heads = fields["sequence_parallel"], model.shape.attention_heads, model.shape.kv_heads
    return parts == 1 or (
        fields["tensor_parallel"] == 1
        and heads > 0
        and not any(count % parts for count in (heads, fields["max_length"], ROW_MULTIPLE))
        and (key_heads % parts == 0 or parts % key_heads == 0)
    )


def allowed_sizes(batch_size: int, max_devices: int, micro_batch: int = 1, together: int = 1) -> list[int]:
    """Return world sizes in which every rank computes equally many micro-batches per step. together: number of ranks in
    a group that computes a micro-batch together."""
    micro_batches = batch_size // micro_batch
    return [together * groups for groups in range(1, max_devices // together + 1) if micro_batches % groups == 0]


def why_no_adapter(model: ModelStats, fields: Mapping[str, Any]) -> str:
    """Return why engines of the base cannot serve the adapter of a run with these TrainSpec fields; "" if they can."""
    if fields["full"]:
        return "full is true"
    if not model.adapter_max_rank:
        return "engines of this base support no adapters"
    if not all(target.endswith("_proj") for target in fields["lora_targets"]):
        return "engines support adapters only on layers named *_proj"
    if fields["lora_rank"] > model.adapter_max_rank:
        return f"engines support adapters of rank {model.adapter_max_rank} at most"
    return ""


def _rows(given: Given, dataset: DatasetStats, model: ModelStats, fields: dict, devices: int) -> tuple[int, int]:
    """Choose (tokens per packed row, rows per step). Long rows are efficient, but for small jobs rows are halved until
    there are enough steps, and then until a step has a row for every device; this second halving changes neither the
    tokens of a step nor the number of steps."""
    # Rows fit every example (estimates may be wrong by a third), but are no longer than is efficient.
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
    # A power of two, so that 1, 2, 4 ... devices can share it; about 50 steps or more; and a row for every device, if
    # that leaves LEAST_STEPS.
    count, widest = rows(length), 2 ** math.floor(math.log2(max(1, devices)))
    batch = 2 ** max(0, min(6, math.floor(math.log2(max(1.0, count / 50)))))
    batch = max(batch, widest) if count / widest >= LEAST_STEPS else batch
    while length // 2 >= shortest and 2 * batch <= devices and not given.is_set("batch_size"):
        length, batch = length // 2, 2 * batch
    return length, batch


def epochs(rows: int, *, full: bool) -> int:
    """Return the automatic number of epochs for a training file with `rows` rows."""
    for most, usual in ((FEW_ROWS, 5), (2000, 3), (20000, 2)):
        if rows < most:
            return max(usual, min(MOST_EPOCHS_FULL if full else MOST_EPOCHS_ADAPTER, FEWEST_SEEN // max(1, rows)))
    return 1


def peak_rate(n_parameters: int, step_tokens: float, *, full: bool, rows: int = FEW_ROWS) -> float:
    """Return the automatic peak learning rate. n_parameters: parameters of the base. step_tokens: mean tokens per
    optimizer step. rows: rows of the training file."""
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
        expected = (
            f"at most {HIGHEST_RATE:g} times the automatic {auto:.2g}, with the multiplier; a higher rate ruins a model"
        )
        raise InvalidHyperparameter(name, given.value(name, auto), expected)
    return rate * multiplier


class Given:
    """The hyperparameters of a request; records which names were read, so that a misspelt name is an error."""

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
        """Return one of `options`, by default the values that TrainSpec declares for the field, or true and false."""
        value, options = self.value(name, auto), options or get_args(_FIELDS[name]) or (True, False)
        if value not in options or type(value) is not type(options[0]):
            raise InvalidHyperparameter(name, value, f"one of {', '.join(map(str, options)).lower()}")
        return value

    def names(self, name: str) -> list[str]:
        value = self.value(name, [])
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        # The list must be short, because the scheduler reads it in each round.
        is_list = isinstance(value, (list, tuple)) and len(str(value)) <= 4096
        if not is_list or not all(isinstance(part, str) for part in value):
            raise InvalidHyperparameter(name, value, "a short list of layer names, e.g. ['q_proj', 'v_proj']")
        return list(value)

    def value(self, name: str, auto: Any) -> Any:
        self.read.add(name)
        return self.values.get(name, auto)
