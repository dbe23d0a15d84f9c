"""Tensor parallelism: the grid of ranks, and the configuration by which DeepSpeed's AutoTP cuts a model.

A world of N ranks is a grid of N / T groups of T neighbouring ranks (DeepSpeed's order). The ranks of a group read the
same examples and hold slices of the same matrices. Ranks with the same tensor rank hold the same slices, which ZeRO
partitions among these ranks.

    rank            0    1    2    3         T = 2
    data rank       0    0    1    1         which micro-batches the rank computes
    tensor rank     0    1    0    1         which slices the rank holds

AutoTP cuts the matrices by the model's plan (transformers' `base_model_tp_plan`): "colwise" ones by rows of the weight,
"rowwise" ones by columns. Embeddings, output head and norms are whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer

from train.plan.errors import UnsupportedModel

_STYLES = {
    "colwise": {"partition_type": "column"},
    "rowwise": {"partition_type": "row"},
    "embedding_rowwise": {"partition_type": "skip"},  # transformers cuts tied embeddings; here they stay whole
    # These are whole on every rank, but only see the rank's heads (Qwen3's norms of q and k): gradients are summed.
    "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
}


@dataclass(frozen=True)
class Grid:
    """The position of `rank` in a world of `world_size` ranks, where groups of `tensor_parallel` share a model."""

    rank: int
    world_size: int
    tensor_parallel: int = 1

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor_parallel

    @property
    def data_size(self) -> int:
        return self.world_size // self.tensor_parallel

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_parallel

    def share(self, numel: int) -> tuple[int, int]:
        """Return this rank's share [first, last) of `numel` elements that every rank of its group holds."""
        return tuple(numel * edge // self.tensor_parallel for edge in (self.tensor_rank, self.tensor_rank + 1))


def partition_config(config: Any, tensor_parallel: int) -> dict[str, Any]:
    """Return AutoTP's `partition_config` for a transformers model of this config. Raises UnsupportedModel if the model
    has no plan, a plan with other styles (mixtures of experts, fused matrices), or heads or MLP columns that are not
    divisible. (The planner cannot check these sizes if config.json leaves them at defaults.)"""
    plan = getattr(config, "base_model_tp_plan", None)
    what = f"tensor_parallel {tensor_parallel}: the model type {config.model_type!r}"
    if not plan:
        raise UnsupportedModel(f"{what} has no tensor-parallel plan in transformers; train it with tensor_parallel 1")
    other = sorted({style for style in plan.values() if style not in _STYLES})
    if other:
        raise UnsupportedModel(
            f"{what} has layers cut as {', '.join(other)}, which training does not support (mixtures of experts, fused "
            "matrices); train it with tensor_parallel 1"
        )
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (count := getattr(config, field)) % tensor_parallel:
            raise UnsupportedModel(f"{what} has {field} {count}, which {tensor_parallel} does not divide")
    specs = []
    for name, style in plan.items():  # a name such as layers.*.mlp.up_proj
        module = r".*\." + r"\d+".join(re.escape(part) for part in name.split("*"))
        # In a layer with an adapter (peft), cut the base weight, and the factor on the same side.
        factor = {"colwise": r"|\.lora_B\.default", "rowwise": r"|\.lora_A\.default"}.get(style, "")
        specs.append({"patterns": [module + rf"(\.base_layer{factor})?\.weight$"], **_STYLES[style]})
    return {"use_default_specs": False, "layer_specs": specs}


@contextmanager
def seen_through_adapters() -> Iterator[None]:
    """Let AutoTP reach the layers inside peft's wrappers. AutoTP descends until a module has a `weight`; a wrapper
    exposes its base layer's `weight`, so layers inside would silently stay uncut."""
    weight = BaseTunerLayer.weight
    BaseTunerLayer.weight = property(lambda wrapper: None)
    try:
        yield
    finally:
        BaseTunerLayer.weight = weight
