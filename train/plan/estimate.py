"""Estimates the memory of a fine-tuning job and the time of its steps before it starts. Pure arithmetic on shapes.

Memory of ZeRO: Rajbhandari et al., "ZeRO", 2020 (arXiv:1910.02054), section 3, with fp32 gradients in place of fp16,
as train.trainer.engine configures. Further buffers of DeepSpeed 0.19.8 were counted in its source
(runtime/zero/stage_1_and_2.py and stage3.py). Activations: Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", 2022 (arXiv:2205.05198), section 4.1, for attention whose scores are recomputed and a gated
MLP, with the norms' copies in fp32.

Time: a rank computes a micro-batch while it sends and fetches ZeRO's partitions; the estimate is the longer time plus
LOST times the shorter time. The constants were fitted to the calibration points in
tests/unit/train/published_points.csv, which has their sources; its other points show the error (docs/performance.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from runtime.devices.kinds import Accelerator, kind_of
from weights.format.foreign_json import size, text_part, weight_bits

LIVE_ELEMENTS = 1_000_000_000  # DeepSpeed 0.19.8's stage3_max_live_parameters
BUCKET_ELEMENTS = 50_000_000  # train.trainer.engine.MAX_BUCKET_ELEMENTS; this file must load without torch
HOST_LOGITS_BYTES, DEVICE_LOGITS_BYTES = 64 * 2**20, 256 * 2**20  # size of a chunk of fp32 logits
FRAGMENTS = 0.03  # share of device memory that torch's allocator wastes
SCALE_BYTES = 2 / 128  # scale bytes per quantised weight, in groups of 128
DECODING_BYTES = 6  # bytes per weight while its layer is decoded (train.model.quantised)
OPTIMIZER_BYTES = 12  # bytes per trained parameter: master, exp_avg, exp_avg_sq
ELEMENT_BYTES = {"bf16": 2, "fp32": 4}


_HEADS = (0, 6)  # queries and keys are normed too: 4 (q + k) in fp32 and 2 (q + k)
# By model type: bytes that its norms keep beyond Llama's two norms of the hidden size, (per hidden element, per element
# of queries and keys). tests/integration/train/test_layer_memory.py compares them with torch.
_NORMS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("qwen3", "qwen3_moe", "exaone4", "hunyuan_v1_dense"), _HEADS),
    **dict.fromkeys(("olmo2", "olmo3"), (2, 8)),
    "gemma": (4, 0),
    **dict.fromkeys(("gemma3", "gemma3_text"), (18, 8)),  # four norms, in fp32 up to their result
    **dict.fromkeys(("gemma4", "gemma4_text"), (28, 9)),  # the values are normed too
    "glm4": (9, 2),
    "glm4_moe": (6, 6),  # its router works in fp32
    "phi3": (0, 4),  # no norms: queries, keys and values of one product, which stays whole
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model for the estimates; 0 where config.json does not have them.

    ffn: MLP width for one token; in a mixture of experts, the summed width of chosen and shared experts. lora_sides:
    sum of in + out over the linear layers that have LoRA by default; times the rank, this is the adapter's size in
    parameters. (Fused experts are not linear layers and get none.)
    outside: parameters of embeddings and head, which tensor parallelism does not cut. tensor_slices: largest known
    number of even slices of heads and MLP; 1: a mixture of experts, which is not cut; 0: unknown.
    queries: elements of a token's queries. experts: number of experts that a token passes. norms: see `_NORMS`.
    quantised_bytes: bytes per weight of a linear layer, with its share of the scales; 0: the base is not quantised.
    """

    n_parameters: int
    hidden: int = 0
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    vocab: int = 0
    lora_sides: int = 0
    outside: int = 0
    tensor_slices: int = 0
    queries: int = 0
    experts: int = 0
    norms: tuple[int, int] = (0, 0)
    quantised_bytes: float = 0.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], n_parameters: int) -> ModelShape:
        """Read the sizes from a Hugging Face config.json; for a multimodal model, from the config's text part."""
        number = partial(size, text_part(config))
        hidden, layers, heads = (number(f) for f in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        head_dim = number("head_dim") or (hidden // heads if heads else 0)
        kv_heads = number("num_key_value_heads") or heads
        width = number("intermediate_size")
        experts = number("num_local_experts", "num_experts", "n_routed_experts")
        shared = number("shared_expert_intermediate_size")
        active = number("num_experts_per_tok") * (number("moe_intermediate_size") or width) + shared
        ffn = active if experts else width
        attention = 2 * (hidden + heads * head_dim) + 2 * (hidden + kv_heads * head_dim)
        dense = 3 * (hidden + width)
        if experts:
            dense = 3 * (hidden + shared) + hidden + 1 if shared else 0  # a shared expert and its gate
        vocab = number("vocab_size")
        outside = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
        slices = math.gcd(heads, kv_heads, width) if heads and width else 0
        return cls(
            n_parameters,
            hidden,
            layers,
            kv_heads,
            head_dim,
            ffn,
            vocab,
            layers * (attention + dense),
            min(outside, n_parameters),
            1 if experts else slices,
            heads * head_dim,
            number("num_experts_per_tok") if experts else 0,
            _NORMS.get(str(text_part(config).get("model_type")), (0, 0)),
            bits / 8 + SCALE_BYTES if (bits := weight_bits(config.get("quantization_config") or {})) else 0.0,
        )

    @property
    def attention_heads(self) -> int:
        return self.queries // self.head_dim if self.head_dim else 0

    @property
    def heads(self) -> int:
        """Elements of a token's queries and keys together."""
        return (self.queries or self.hidden) + self.kv_heads * self.head_dim

    def layer_bytes(self, shards: int = 1) -> int:
        """Bytes, in bfloat16, that one layer stores per token for its backward pass. With adapters it stores less,
        because frozen weights do not need their inputs. shards: ranks of a tensor-parallel group, which share heads and
        MLP.

        norms       2 x (4 h in fp32, 2 h of their result before the weight, 2 h as the input of the next product)
        attention   4 (q + k): queries, keys, values and result
        MLP         8 f: gate, its activation, the other matrix's result, and their product; with experts, each of which
                    has a copy of the input and a weighted result, 4 e h more
        """
        of_hidden, of_heads = self.norms
        cut = (4 + of_heads) * self.heads + 8 * self.ffn + 4 * self.experts * self.hidden
        return (16 + of_hidden) * self.hidden + cut // shards

    def working_bytes(self, shards: int = 1) -> int:
        """Temporary bytes per token in backward of a layer; with experts also fp32 gradients of weighted results."""
        return 8 * self.hidden + (2 * self.ffn + 16 * self.experts * self.hidden) // shards

    @property
    def largest(self) -> int:
        """Elements of the largest parameter: the embedding, a matrix of the MLP, or all experts' gates and inner
        matrices of a layer, which are one parameter in transformers."""
        return max(self.vocab * self.hidden, self.hidden * self.ffn, self._layer_of_experts * 2 // 3)

    def base_bytes(self, element: int) -> int:
        """Bytes of all weights, `element` bytes each; in a quantised base, only embeddings and head have this size."""
        if not self.quantised_bytes:
            return element * self.n_parameters
        return int(element * self.outside + self.quantised_bytes * (self.n_parameters - self.outside))

    @property
    def gathered(self) -> int:
        """Elements that a rank holds whole at a time under ZeRO-3: the limit of live parameters, but at least one
        module, such as all experts of a layer."""
        return max(LIVE_ELEMENTS, self._layer_of_experts)

    @property
    def _layer_of_experts(self) -> int:
        """Elements of a layer of a mixture of experts, nearly all of them in experts; 0 for a dense model."""
        experts = self.tensor_slices == 1 and self.layers
        return (self.n_parameters - self.outside) // self.layers if experts else 0


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that one rank holds. offloaded_bytes: the part in host memory instead of on the device. host_bytes: all the
    host memory that offloading takes."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    activations_bytes: int
    offloaded_bytes: int = 0
    host_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes held between two steps."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def device_bytes(self) -> int:
        """Peak bytes on the device."""
        return self.state_bytes + self.buffers_bytes + self.activations_bytes - self.offloaded_bytes


def trained_parameters(shape: ModelShape, fields: Mapping[str, Any]) -> int:
    """Count trained parameters from a TrainSpec's `fields`. Even with `lora_targets` it counts all default targets."""
    return shape.n_parameters if fields["full"] else shape.lora_sides * fields["lora_rank"]


def rank_memory(shape: ModelShape, fields: Mapping[str, Any], ranks: int) -> RankMemory:
    """Memory of each of `ranks` ranks. `fields` are those of a TrainSpec, as from `train.plan.auto.resolve`."""
    element = ELEMENT_BYTES[fields["precision"]]
    trained = trained_parameters(shape, fields)
    shards, stage = fields.get("tensor_parallel", 1), max(1, fields["zero_stage"])
    everything, weights = shape.n_parameters, shape.base_bytes(element)
    if shards > 1:
        everything = shape.outside + (shape.n_parameters - shape.outside) // shards
        weights, ranks = element * everything, ranks // shards
    if fields["full"]:
        trained = everything
    else:  # tensor parallelism cuts half of an adapter's matrices too, which are small
        everything, weights = everything + trained, weights + element * trained
    away = weights // ranks if fields["offload"] == "parameters" else 0
    if stage == 3:  # this rank's share, and the parameters that are whole while layers compute
        live = weights * min(everything, shape.gathered) // everything if ranks > 1 or away else 0
        weights = weights // ranks + live
    gradients = 4 * trained // (1 if stage == 1 else ranks)
    optimizer = OPTIMIZER_BYTES * trained // ranks
    # DeepSpeed allocates whole buckets: in ZeRO-1 in fp32, two with overlap_comm (stage_1_and_2.py, setup_buckets); in
    # ZeRO-2 two in bf16, and an fp32 copy of the one that is reduced; in ZeRO-3 one in fp32 (stage3.py, "IPG"), and its
    # scattered parts. The largest parameter of an adapter is smaller than a bucket.
    largest = min(trained, shape.largest) if fields["full"] else 0
    buffers = (4 if _on_host(fields) else 8) * max(min(trained, BUCKET_ELEMENTS), largest)
    buffers += DECODING_BYTES * shape.hidden * shape.ffn if shape.quantised_bytes else 0
    offloaded = host = 0
    if fields["offload"] != "none":
        offloaded = optimizer
        # Bytes per parameter of a step on the CPU. ZeRO-3: arriving gradients and the step's gradients. ZeRO-1 and 2:
        # the step's gradients and the new weights, in fp32 also the accumulated gradients.
        step = 8 if stage == 3 else 4 + element + (4 if fields["precision"] == "fp32" else 0)
        host = optimizer + step * trained // ranks
        if stage < 3:  # the largest parameter, on both sides
            buffers, host = buffers + element * largest, host + element * largest
        if stage == 1:  # the reduced gradients of this rank's partition
            gradients += 4 * trained // ranks
        offloaded, host = offloaded + away, host + away
    layer, works = shape.layer_bytes(shards), shape.working_bytes(shards)
    kept = 2 * shape.hidden * shape.layers + layer if fields["activation_checkpointing"] else shape.layers * layer
    return RankMemory(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        buffers_bytes=buffers,
        activations_bytes=_tokens(fields) * (kept + works) * element // 2 + head_bytes(shape, fields, element),
        offloaded_bytes=offloaded,
        host_bytes=host,
    )


def residual_bytes(device_kind: str, device_memory_bytes: int, asleep: int) -> int:
    """Bytes of a device that plans must leave free: for the context of a rank's process, for `asleep` sleeping engines,
    and for fragmentation in torch's allocator. 0 on logical CPU devices, where processes' resident memory is measured.
    """
    kind = kind_of(device_kind)
    if kind.on_host:
        return 0
    return kind.context_bytes + asleep * kind.asleep_bytes + int(FRAGMENTS * device_memory_bytes)


def held_rows(rows: int, chunk: int, hidden: int, element: int) -> int:
    """Rows of the logits' gradient that one product takes: as many as fit in the memory of a float32 copy of the head,
    and at least one chunk."""
    return min(rows, max(chunk, 4 * hidden // element))


def snapshot_bytes(shape: ModelShape, fields: Mapping[str, Any]) -> int:
    """Bytes of one snapshot of the job in the weight store: the optimizer's state of all ranks."""
    return OPTIMIZER_BYTES * trained_parameters(shape, fields)


def version_bytes(shape: ModelShape, fields: Mapping[str, Any]) -> int:
    """Bytes of a published version: an adapter, or a whole model."""
    adapter = not fields["full"] and fields.get("lora_publish") == "adapter"
    elements = trained_parameters(shape, fields) if adapter else shape.n_parameters
    return ELEMENT_BYTES[fields.get("serve_dtype", "bf16")] * elements


def _on_host(fields: Mapping[str, Any]) -> bool:
    return "device_kind" in fields and kind_of(fields["device_kind"]).on_host


def _tokens(fields: Mapping[str, Any]) -> int:
    """Tokens of a micro-batch on one rank."""
    return fields["micro_batch"] * fields["max_length"] // fields.get("sequence_parallel", 1)


def head_bytes(shape: ModelShape, fields: Mapping[str, Any], element: int) -> int:
    """Bytes that the output head needs if every token is trained. element: bytes per number."""
    if not shape.vocab:
        return 0
    tokens = _tokens(fields)
    logits = min(HOST_LOGITS_BYTES if _on_host(fields) else DEVICE_LOGITS_BYTES, 4 * tokens * shape.vocab)
    rows = held_rows(tokens, logits // (4 * shape.vocab), shape.hidden, element)
    summed = 4 if tokens > rows else 0
    gradients = shape.vocab * (element * rows + (element + summed) * shape.hidden)
    return 2 * logits + (gradients if fields["full"] else 0)


# --- time

NARROW = 512.0  # products of width h reach h / (h + NARROW) of the rate of wide products
EXPERTS = 0.3
ATTENTION = 0.6
TRAFFIC = 3.0  # memory traffic per stored byte with separate kernels; compiled kernels: 1.2
ADAPTER = 6.0  # bytes per element into and out of a layer with an adapter
HEAD_TRAFFIC = 40.0  # bytes of memory traffic per logit
DEQUANTISED = 13.0  # bytes of memory traffic per weight of a 4-bit base and pass
MEMORY_SHARE = 0.85  # reached share of the published memory rate
LOST = 0.3
LAYER_S = 0.002  # shortest time of a layer for a micro-batch: small models do not fill a device
HOST_MEMORY_RATE = 100e9  # bytes/s of a machine; two sockets reach twice that with socket-local memory
UNKNOWN = Accelerator(100e12, 1e12, 20e9, 25e9, 300, 0.6)
"""For devices without published figures: good enough to order layouts; its hours are not shown."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of an optimizer step on one rank: computing, busy links to ranks, busy links to the host, and in
    total."""

    compute_s: float
    links_s: float
    host_s: float
    step_s: float

    @property
    def bound_by(self) -> str:
        parts = {"compute": self.compute_s, "links": self.links_s, "host": self.host_s}
        return max(parts, key=lambda name: parts[name])

    def watts(self, device: Accelerator) -> float:
        """Power of one device: a node of 8 H100s draws at most 0.8 of its rated power (arXiv:2412.08602), and a waiting
        device about 0.15."""
        return device.board_w * (0.15 + 0.65 * min(1.0, self.compute_s / self.step_s))


@dataclass(frozen=True, slots=True)
class Load:
    """Mean content of rows. row_tokens: tokens of a row. attended: length of the sequence of a token, averaged over
    tokens. forwards: additional forward passes of the method per token."""

    row_tokens: float
    attended: float
    forwards: float = 0.0


def step_time(
    shape: ModelShape,
    fields: Mapping[str, Any],
    ranks: int,
    device: Accelerator,
    *,
    load: Load,
) -> StepTime:
    """The time of a step on `ranks` devices; `fields` are those of a TrainSpec."""
    shards, stage, offload = fields.get("tensor_parallel", 1), max(1, fields["zero_stage"]), fields["offload"]
    parts, groups, element = fields.get("sequence_parallel", 1), ranks // shards, ELEMENT_BYTES[fields["precision"]]
    again, passes = float(fields["activation_checkpointing"]), 3 if fields["full"] else 2
    tokens, forwards = load.row_tokens * fields["micro_batch"] / parts, load.forwards
    micro_batches = fields["batch_size"] * parts / (fields["micro_batch"] * groups)
    width = shape.hidden or 4096  # unknown
    rate = device.peak_flops * device.product_share * width / (width + NARROW)
    memory_rate = device.memory_rate * MEMORY_SHARE

    # FLOPs per token. Products with N weights: 2 N forward, 2 N for gradients of inputs, 2 N for those of weights if
    # all are trained; narrow products and those of experts reach less of the rate. Causal attention to s tokens: 2 q s
    # forward and 2.5 times that backward (Dao, "FlashAttention-2", arXiv:2307.08691), at ATTENTION of the rate.
    heads, head = shape.heads, shape.vocab * shape.hidden
    weights = shape.layers * shape.hidden * (2 * heads + 3 * shape.ffn) if shape.layers else shape.n_parameters
    layers = 3 + again + forwards
    if shape.experts:
        weights += (1 / EXPERTS - 1) * shape.layers * 3 * shape.hidden * shape.ffn
    flops = 2 * weights * (passes + again + forwards) / shards + 2 * head * (passes + forwards)
    flops += 2 * shape.layers * shape.queries * load.attended * (0.5 + layers) / shards / ATTENTION
    # Memory traffic besides products: TRAFFIC times the bytes that layers keep, for each pass, and more for adapters.
    moved = TRAFFIC * shape.layers * shape.layer_bytes(shards) * layers + HEAD_TRAFFIC * shape.vocab
    moved += 0 if fields["full"] else ADAPTER * shape.lora_sides * layers
    compute = tokens * (flops / rate + moved * element / 2 / memory_rate)
    if shape.quantised_bytes:
        compute += DEQUANTISED * (shape.n_parameters - shape.outside) * (2 + again + forwards) / memory_rate
    compute = max(compute, LAYER_S * max(1, shape.layers))

    # Bytes over links (Rajbhandari et al., "ZeRO", arXiv:1910.02054, section 7, with fp32 gradients). Per micro-batch
    # ZeRO-3 fetches the weights for both passes, and ZeRO-2 and 3 send gradients. Per step ZeRO-1 sends gradients, and
    # ZeRO-1 and 2 fetch the new weights.
    trained = trained_parameters(shape, fields)
    cut, others = trained / shards, (groups - 1) / groups
    base = shape.base_bytes(element) / shards
    fetched = 2 * base * others if stage == 3 else 0.0
    links = fetched + (4 * cut * others if stage > 1 else 0.0)
    links_of_step = (4 * cut * others if stage == 1 else 0.0) + (element * cut * others if stage < 3 else 0.0)
    # In each layer: all-reduces of tensor parallelism (Shoeybi et al., "Megatron-LM", arXiv:1909.08053), exchanges of
    # sequence parallelism (Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509); no computation overlaps them.
    each_token = heads * (parts - 1) / parts + shape.hidden * 2 * (shards - 1) / shards
    reduced = (4 + 2 * again) * shape.layers * tokens * element * each_token
    # Offloading: weights to the device for both passes, gradients to the host, new weights to the device, and 28 bytes
    # of host memory traffic per parameter for Adam.
    host = host_of_step = 0.0
    if offload == "parameters":
        host += 2 * base / groups
    if offload != "none":
        host += (4 if stage > 1 else 0) * cut / groups
        host_of_step = ((4 if stage == 1 else 0) + element) * cut / groups
    host_rate = min(device.host_rate, 2 * HOST_MEMORY_RATE / ranks)
    adam_s = 28 * trained / (HOST_MEMORY_RATE if offload != "none" else ranks * memory_rate)

    links_s, host_s = links / device.link_rate, host / host_rate
    busy = (compute, links_s, host_s)
    each = max(busy) + LOST * (sum(busy) - max(busy)) + reduced / device.link_rate
    once = links_of_step / device.link_rate + host_of_step / host_rate + adam_s
    return StepTime(
        compute_s=micro_batches * compute,
        links_s=micro_batches * (links + reduced) / device.link_rate + links_of_step / device.link_rate,
        host_s=micro_batches * host_s + host_of_step / host_rate + (adam_s if offload != "none" else 0.0),
        step_s=micro_batches * each + once,
    )
