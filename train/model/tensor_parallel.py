"""Tensor parallelism: the grid of ranks, and the configuration by which DeepSpeed's AutoTP cuts a model.

A world of N ranks is a grid of N / T groups of T neighbouring ranks (DeepSpeed's own order). The ranks of a group read
the same examples and hold slices of the same matrices. Ranks at the same place in their groups hold the same slices,
which ZeRO partitions among them.

    rank            0    1    2    3         T = 2
    data rank       0    0    1    1         which micro-batches it computes
    tensor rank     0    1    0    1         which slices it holds

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
    "embedding_rowwise": {"partition_type": "skip"},  # transformers cuts a tied embedding; here it stays whole
    # Whole on every rank but applied to the heads of that rank only (Qwen3's norms of q and k): gradients are summed.
    "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
}


@dataclass(frozen=True)
class Grid:
    """The place of `rank` in a world of `world_size` ranks, `tensor_parallel` of which share a model."""

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
        """This rank's range [first, last) of `numel` elements that all ranks of its group hold."""
        return tuple(numel * edge // self.tensor_parallel for edge in (self.tensor_rank, self.tensor_rank + 1))


def partition_config(config: Any, tensor_parallel: int) -> dict[str, Any]:
    """AutoTP's `partition_config` for a transformers model of this config. Raises UnsupportedModel if the model has no
    plan, a plan with other styles (mixtures of experts, fused matrices), or heads and MLP columns that are not
    divisible. (The planner cannot check the latter where config.json leaves out the family's defaults.)"""
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
    for name, style in plan.items():  # such as layers.*.mlp.up_proj
        module = r".*\." + r"\d+".join(re.escape(part) for part in name.split("*"))
        # In a layer with an adapter (peft): the base weight, and the factor on the side that is cut.
        factor = {"colwise": r"|\.lora_B\.default", "rowwise": r"|\.lora_A\.default"}.get(style, "")
        specs.append({"patterns": [module + rf"(\.base_layer{factor})?\.weight$"], **_STYLES[style]})
    return {"use_default_specs": False, "layer_specs": specs}


@contextmanager
def seen_through_adapters() -> Iterator[None]:
    """Let AutoTP reach the layers inside peft's wrappers. It descends until a module has a `weight`; a wrapper has that
    of its base layer, so the layers inside would silently stay whole."""
    weight = BaseTunerLayer.weight
    BaseTunerLayer.weight = property(lambda wrapper: None)
    try:
        yield
    finally:
        BaseTunerLayer.weight = weight
