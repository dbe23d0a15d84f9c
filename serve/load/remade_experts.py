"""Gives a layer back the experts that it deleted once it had made its own form of them, for each later load.

dots3 does so with the experts that read its pictures (`MoESwiGLUFFNFP8` in vllm/models/dots3_note/nvidia/vision.py): a
second load would find no place for their weights and raise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

MADE = ("_fused_w13_fp8", "_fused_w13_scale", "_fused_w2_fp8", "_fused_w2_scale")


@contextmanager
def with_experts(model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Within it a load finds the experts, in `dtype`. After it the layers have made their form of them again, in the
    same memory, because captured graphs may read it there; after an error they hold the form that they had."""
    layers: list[Any] = [layer for layer in model.modules() if MADE[0] in layer._buffers]
    for layer in layers:
        expert = sys.modules[type(layer).__module__].DotsSwiGLUFFN
        sizes = layer.hidden_size, layer.config.moe_intermediate_size
        with torch.device("meta"):
            experts = [expert(*sizes, bias=layer.config.use_bias) for _ in range(layer.num_routed)]
        layer.experts = torch.nn.ModuleList(experts).to(dtype).to_empty(device=device).requires_grad_(False)
        with device:
            record_metadata_for_reloading(layer.experts)
    try:
        yield
        for layer in layers:
            _make_again(layer)
    finally:
        for layer in layers:
            layer._modules.pop("experts", None)


@torch.no_grad()
def _make_again(layer: Any) -> None:
    held = {name: layer._buffers.pop(name) for name in MADE}
    try:
        layer.process_weights_after_loading()
        for name, tensor in held.items():
            tensor.copy_(layer._buffers[name])
    finally:
        layer._buffers.update(held)
