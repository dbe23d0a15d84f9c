"""Estimates the time of an optimizer step before a job starts. Pure arithmetic on shapes.

A rank computes a micro-batch, and meanwhile sends and fetches what ZeRO shares out; the longer of the two counts, and
LOST of the shorter. The constants were set by the calibration points of tests/unit/train/published_points.csv, which
has their sources; the others of its points show the error (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.devices.kinds import Accelerator
from train.plan.estimate import ELEMENT_BYTES, ModelShape, trained_parameters

NARROW = 512.0  # products of width h reach h / (h + NARROW) of the rate of large ones
EXPERTS = 0.3
ATTENTION = 0.6
TRAFFIC = 3.0  # kernel by kernel; compiled ones 1.2
ADAPTER = 6.0  # bytes for each element into and out of a layer with one
HEAD_TRAFFIC = 40.0  # bytes of a logit
DEQUANTISED = 13.0  # bytes of memory traffic for a weight of a 4-bit base and a pass
MEMORY_SHARE = 0.85  # of its published rate
LOST = 0.3
LAYER_S = 0.002  # the least for each layer of a micro-batch: small models do not fill a device
HOST_MEMORY_RATE = 100e9  # of one machine: two sockets reach twice that where every thread reads its own
UNKNOWN = Accelerator(100e12, 1e12, 20e9, 25e9, 300, 0.6)
"""Stands for a device that no table has: it orders layouts, and nobody is shown its hours."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of an optimizer step on one rank: it computes, and links to other ranks or to the host are busy."""

    compute_s: float
    links_s: float
    host_s: float
    step_s: float

    @property
    def bound_by(self) -> str:
        parts = {"compute": self.compute_s, "links": self.links_s, "host": self.host_s}
        return max(parts, key=lambda name: parts[name])

    def watts(self, device: Accelerator) -> float:
        """Power of one device: a node of 8 H100s draws at most 0.8 of its rated power (arXiv:2412.08602), and a device
        that waits about 0.15."""
        return device.board_w * (0.15 + 0.65 * min(1.0, self.compute_s / self.step_s))


@dataclass(frozen=True, slots=True)
class Load:
    """row_tokens: of one row of a step, on average. attended: tokens of the sequence that a token is in, on average
    over tokens. forwards: further forward passes that the method makes for each token."""

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

    # FLOPs of a token. Products with N weights: 2 N forward, as many for the inputs' gradients and, with all weights
    # trained, for the weights'; narrow ones and those of experts reach less of the rate. Causal attention to s tokens:
    # 2 q s forward and 2.5 times that backward (Dao, "FlashAttention-2", arXiv:2307.08691), at ATTENTION of the rate.
    heads, head = shape.heads, shape.vocab * shape.hidden
    weights = shape.layers * shape.hidden * (2 * heads + 3 * shape.ffn) if shape.layers else shape.n_parameters
    layers = 3 + again + forwards
    if shape.experts:
        weights += (1 / EXPERTS - 1) * shape.layers * 3 * shape.hidden * shape.ffn
    flops = 2 * weights * (passes + again + forwards) / shards + 2 * head * (passes + forwards)
    flops += 2 * shape.layers * shape.queries * load.attended * (0.5 + layers) / shards / ATTENTION
    # Memory traffic of what is not a product: TRAFFIC times what layers keep for each pass, and more for adapters.
    moved = TRAFFIC * shape.layers * shape.layer_bytes(shards) * layers + HEAD_TRAFFIC * shape.vocab
    moved += 0 if fields["full"] else ADAPTER * shape.lora_sides * layers
    compute = tokens * (flops / rate + moved * element / 2 / memory_rate)
    if shape.quantised_bytes:
        compute += DEQUANTISED * (shape.n_parameters - shape.outside) * (2 + again + forwards) / memory_rate
    compute = max(compute, LAYER_S * max(1, shape.layers))

    # Bytes over links (Rajbhandari et al., "ZeRO", arXiv:1910.02054, section 7, with fp32 gradients). ZeRO-3 fetches
    # the weights for both passes of a micro-batch, ZeRO-2 and 3 send its gradients; ZeRO-1 sends them once in a step,
    # and ZeRO-1 and 2 fetch the new weights.
    trained = trained_parameters(shape, fields)
    cut, others = trained / shards, (groups - 1) / groups
    base = shape.base_bytes(element) / shards
    fetched = 2 * base * others if stage == 3 else 0.0
    links = fetched + (4 * cut * others if stage > 1 else 0.0)
    links_of_step = (4 * cut * others if stage == 1 else 0.0) + (element * cut * others if stage < 3 else 0.0)
    # All-reduces of tensor parallelism (Shoeybi et al., "Megatron-LM", arXiv:1909.08053) and exchanges of sequence
    # parallelism (Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509) in each layer, which nothing hides.
    each_token = heads * (parts - 1) / parts + shape.hidden * 2 * (shards - 1) / shards
    reduced = (4 + 2 * again) * shape.layers * tokens * element * each_token
    # Offloading: weights for both passes, gradients down, new weights up, and 28 bytes of memory traffic for Adam.
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
