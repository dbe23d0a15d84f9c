"""Keeps what lies among a GPU's weights and is no weight, over a sleep that discards it all.

vLLM keeps a model's buffers (vllm/v1/worker/gpu_worker.py, sleep). What a layer made of the model's configuration and
holds as a plain attribute is in no version and comes back as whatever was in the memory: ALiBi's slopes, for one
(vllm/v1/attention/backends/flash_attn.py), without which BLOOM or Falcon-RW never woke again; the strides of experts in
FP8, which a kernel that a layer's method holds keeps for itself (vllm/model_executor/layers/fused_moe/experts,
cutlass_moe.py). Or a module of vLLM's holds it for all layers: by what MiniMax-M2's norms keep so, the workers of a
tensor-parallel engine find each other's sums (vllm/model_executor/layers/minimax_rms_norm/lamport_workspace.py).

vLLM's own reload makes such a kernel again and writes the layers' parameters where they were, but captured graphs go on
reading the tensors of the first kernel. So these are looked for once, before any other load, and kept. What the new
kernel holds in their place is copied into them: some follows from the weights, such as the scales of activations before
experts in NVFP4 (make_nvfp4_moe_quant_config in vllm/model_executor/layers/fused_moe/oracle/nvfp4.py).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from vllm import device_allocator

from runtime.devices.kinds import HOST

MOST_BYTES = 1 << 20
"""The largest loose tensor. Larger ones are workspaces, which are written before they are read."""

Spans = Collection[tuple[int, int]]
"""Addresses on the device: (first, bytes)."""


class LooseTensors:
    """The loose tensors of one model after its first load. They must stay the same tensors, because captured graphs
    read them at their addresses."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._first = dict(_loose(model.named_modules()))
        self._for_all = [tensor for _, tensor in _loose(_held_for_all())]
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device, on the host

    def keep(self, discarded: Spans) -> None:
        """Copy to the host the tensors in the memory that is about to be discarded."""
        every = {id(tensor): tensor for tensor in chain(self._first.values(), self._for_all)}.values()
        found = [tensor for tensor in every if _lies_in(tensor, discarded)]
        self._kept = [(tensor, tensor.to(HOST.torch_type, copy=True)) for tensor in found]

    @torch.no_grad()
    def put_back(self) -> None:
        """Copy them back. Call it once the memory is mapped again and before weights are loaded: the load computes anew
        what follows from the weights."""
        for tensor, copy in self._kept:
            tensor.copy_(copy)
        self._kept = []

    @torch.no_grad()
    def follow(self, model: torch.nn.Module) -> None:
        """After a load by vLLM's own way, copy each tensor that it made into the first one in the same place."""
        for place, tensor in _loose(model.named_modules()):
            first = self._first.get(place)
            if first is not None and first is not tensor and _alike(first, tensor):
                first.copy_(tensor)


def spans_of_weights() -> Spans:
    """The memory that vLLM's allocator discards with the weights."""
    allocator: Any = device_allocator.get_mem_allocator_instance()
    allocations = allocator.pointer_to_data.items()
    return [(first, data.handle[1]) for first, data in allocations if data.tag == "weights"]


def _held_for_all() -> Iterator[tuple[str, Any]]:
    """The objects of vLLM's that its modules hold themselves or in a table, by name."""
    for module in [module for name, module in [*sys.modules.items()] if name.startswith("vllm.") and module]:
        for name, value in [*vars(module).items()]:
            held = [*value.values()] if isinstance(value, dict) else [value]
            yield from ((f"{module.__name__}.{name}", one) for one in held if _of_vllm(one))


def _of_vllm(value: Any) -> bool:
    return type(value).__module__.startswith("vllm.")


def _loose(holding: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are plain attributes of these holders, or of vLLM's objects that they hold directly or indirectly,
    such as an attention's implementation or a quantisation's kernel; each with the names that lead to it."""
    holders = list(holding)
    seen = {id(holder) for _, holder in holders}
    while holders:
        place, holder = holders.pop()
        for name, value in [*getattr(holder, "__dict__", {}).items()]:  # other threads write meanwhile
            if isinstance(value, torch.Tensor):
                if not isinstance(value, torch.nn.Parameter) and 0 < value.nbytes <= MOST_BYTES:
                    yield f"{place}.{name}", value
            elif _of_vllm(value) and id(value) not in seen:
                seen.add(id(value))
                holders.append((f"{place}.{name}", value))


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _lies_in(tensor: torch.Tensor, spans: Spans) -> bool:
    return any(first <= tensor.data_ptr() < first + size for first, size in spans)
