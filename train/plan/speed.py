"""Estimates how long a job computes on devices on which nobody has measured the like. Pure arithmetic on shapes.

A token passes N weights in products of matrices (of a mixture of experts those of its chosen experts; embeddings are
looked up), and in each layer's attention the q elements of its queries meet those of the half row before it, twice:

    forward   2 N + 2 q layers (tokens of a row)
    backward  twice the forward pass; with an adapter the gradients of the weights' inputs alone, so 2 N less
    again     the forward pass, with activation checkpointing, and for a method whose loss needs one of the whole step
              first; once in the job for a method that asks a reference

Devices reach a part of the peak that their maker publishes, LEAST_USED to MOST_USED of it: machines of 8 H100s, one to
eight of them, that trained 1 to 70 B parameters, fully sharded, reached 0.34 to 0.59 of it, counted as here, with rows
of 512 to 65,536 tokens and large batches (mosaicml/llm-foundry, scripts/train/benchmarking), which a small job does not
have. Where shards, or the parts of a layer, cross PCIe, that may take longer than the products: LEAST_USED_OVER_PCIE is
no measurement. Small models never fill a device: a micro-batch takes LAYER_S for each layer, which is what SmolLM2-135M
took on one H100 and one H200 (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.devices.published import Accelerator
from train.plan.estimate import ModelShape, trained_parameters

LEAST_USED, MOST_USED, LEAST_USED_OVER_PCIE = 0.2, 0.6, 0.05
LAYER_S = (0.002, 0.005)


@dataclass(frozen=True, slots=True)
class Speed:
    """device_s: device-seconds of the whole job, least and most. used: parts of the peak that were assumed."""

    flops: float
    device_s: tuple[float, float]
    used: tuple[float, float]


def weights_passed(shape: ModelShape) -> int:
    """Weights that a token meets in products of matrices."""
    if not shape.layers or not shape.hidden:
        return shape.n_parameters
    heads = shape.queries + shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * heads + 3 * shape.ffn)
    return min(shape.n_parameters, shape.vocab * shape.hidden + shape.layers * layer)


def forward_flops(shape: ModelShape, row_tokens: float) -> float:
    """FLOPs of the forward pass of one token, in a row of so many."""
    return 2 * weights_passed(shape) + 2 * shape.queries * shape.layers * row_tokens


def flops_per_token(shape: ModelShape, fields: Mapping[str, Any], row_tokens: float) -> float:
    """FLOPs of one token in one epoch, in a row of so many."""
    forward = forward_flops(shape, row_tokens)
    backward = 2 * forward
    if not fields["full"]:
        backward += 6 * trained_parameters(shape, fields) - 2 * weights_passed(shape)
    return forward + backward + (forward if fields["activation_checkpointing"] else 0)


def speed(
    shape: ModelShape,
    fields: Mapping[str, Any],
    accelerator: Accelerator,
    *,
    tokens: int,
    row_tokens: float,
    steps: int,
    devices: int,
    reference: bool = False,
    again: bool = False,
) -> Speed:
    """tokens: of one epoch. fields: those of a TrainSpec. reference: whether a model is asked about each token once;
    again: in each epoch (Method.needs_reference, needs_divergence)."""
    flops = tokens * fields["n_epochs"] * flops_per_token(shape, fields, row_tokens)
    flops += tokens * (reference + again * fields["n_epochs"]) * forward_flops(shape, row_tokens)
    crosses = devices > 1 and (fields["zero_stage"] == 3 or fields.get("tensor_parallel", 1) > 1)
    least = LEAST_USED_OVER_PCIE if accelerator.over_pcie and crosses else LEAST_USED
    layers = steps * fields["batch_size"] / fields["micro_batch"] * shape.layers
    fast = max(flops / (MOST_USED * accelerator.peak_flops), layers * LAYER_S[0])
    slow = flops / (least * accelerator.peak_flops) + layers * LAYER_S[1]
    return Speed(flops, (fast, slow), (least, MOST_USED))
