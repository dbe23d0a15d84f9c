"""Follows what layers make of their weights in their first pass, and vLLM never makes again.

Without this the next version's weights would be read through the first one's: the convolutions of linear attention and
the choice of tokens in GLM 5 Next (vllm/models/glm5next/common, kda.py and attention.py), the router of experts with a
gate for shared ones on AMD's GPUs (vllm/model_executor/layers/fused_moe/runner/moe_runner.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _head_gate(indexer: Any) -> torch.Tensor:
    return indexer.wk_weights_proj.weight[indexer.head_dim :].t()


def _convolutions(attention: Any) -> torch.Tensor:
    return torch.cat([conv.weight.flatten(1) for conv in (attention.q_conv1d, attention.k_conv1d, attention.v_conv1d)])


def _gates(experts: Any) -> torch.Tensor:
    return torch.cat([experts.gate.weight, experts.shared_expert_gate.weight])


MADE: dict[str, Callable[[Any], torch.Tensor]] = {
    "_wp_fp32": _head_gate,
    "_merged_conv_weight": _convolutions,
    "_combined_gate_weight": _gates,
}
"""What a layer makes of its weights, by the attribute that holds it."""


@torch.inference_mode()  # as the first pass, whose tensors no other mode may write
def follow_first_pass(model: torch.nn.Module) -> None:
    """After a load, make it again from the new weights, in the same memory, because captured graphs read it there."""
    for module in model.modules():
        for name, make in MADE.items():
            held = getattr(module, name, None)
            if isinstance(held, torch.Tensor):
                held.copy_(make(module))
