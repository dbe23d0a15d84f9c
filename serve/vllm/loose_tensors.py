"""Keeps a model's loose tensors over a sleep: tensors that are not weights but lie in the GPU memory of the weights.

A sleep of level 2 discards all of that memory. vLLM keeps a model's buffers (vllm/v1/worker/gpu_worker.py, sleep), not
what a layer computes from the configuration and holds as a plain attribute, such as ALiBi's slopes, nor what its model
runner makes while it loads the weights, such as the sampler's tokens that limit thinking. No version has such a tensor.

Large ones are filled with zeros, which is what workspaces and inputs began as: a captured graph reads more rows than a
step may write (of Qwen3-VL's deepstack_input_embeds, for one), and a NaN in them would spread.

vLLM's own reload may make a layer's kernel again, but captured graphs still read the tensors of the first one. So this
module finds the tensors once, before any other load, keeps them, and copies what the new kernel holds into them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from vllm import device_allocator

from runtime.devices.kind import HOST_MEMORY

MOST_BYTES = 1 << 20
"""A larger tensor is not kept: it is a workspace or an input, which begins as zeros."""

Spans = Collection[tuple[int, int]]
"""Addresses on the device: (first, bytes)."""


class LooseTensors:
    """The loose tensors of one model after its first load. They must stay the same tensors, because captured graphs
    read them at their addresses."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._first = dict(_loose(model.named_modules()))
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device, on the host
        self._emptied: list[torch.UntypedStorage] = []

    def keep(self, discarded: Spans, runner: Any) -> None:
        """Copy the small tensors in the memory that is about to be discarded to the host. runner: vLLM's model runner,
        which holds some of them outside the model."""
        others = _loose([*self._model.named_modules(), ("runner", runner)])
        every = {id(tensor): tensor for tensor in (*self._first.values(), *(tensor for _, tensor in others))}.values()
        written = {_storage(buffer) for buffer in self._model.buffers()}  # by vLLM, before put_back runs
        lost = [t for t in every if _storage(t) not in written and _lies_in(t, discarded)]
        self._kept = [(t, t.to(HOST_MEMORY, copy=True)) for t in lost if t.nbytes <= MOST_BYTES]
        self._emptied = [t.untyped_storage() for t in lost if t.nbytes > MOST_BYTES]

    @torch.no_grad()
    def put_back(self) -> None:
        """Copy the tensors back and fill the others with zeros. Call it once the memory is mapped again and before
        weights are loaded, because the load computes again what follows from the weights."""
        for storage in self._emptied:
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        for tensor, copy in self._kept:
            tensor.copy_(copy)
        self._kept, self._emptied = [], []

    @torch.no_grad()
    def follow(self, model: torch.nn.Module) -> None:
        """After vLLM's own reload, copy each tensor that it made into the first one in the same place."""
        for place, tensor in _loose(model.named_modules()):
            first = self._first.get(place)
            if first is not None and first is not tensor and _alike(first, tensor):
                first.copy_(tensor)


def spans_of_weights() -> Spans:
    """Addresses of the memory that vLLM's allocator discards with the weights."""
    allocator: Any = device_allocator.get_mem_allocator_instance()
    allocations = allocator.pointer_to_data.items()
    return [(first, data.handle[1]) for first, data in allocations if data.tag == "weights"]


def _loose(holders: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that these holders have as plain attributes, in lists and tables, or in vLLM's objects below
    them, such as an attention's implementation; each with the path of names that leads to it."""
    left = [(f"{place}.{name}", value) for place, holder in holders for name, value in _attributes(holder)]
    seen: set[int] = set()
    while left:
        place, value = left.pop()
        if _plain(value):
            yield place, value
        elif id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, list | tuple):
                inner: Iterable[tuple[Any, Any]] = enumerate(value)
            elif isinstance(value, dict):
                inner = [*value.items()]
            else:
                inner = _attributes(value) if type(value).__module__.startswith("vllm.") else ()
            left += [(f"{place}.{name}", held) for name, held in inner]


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    return [*getattr(holder, "__dict__", {}).items()]  # a copy: other threads write meanwhile


def _plain(value: Any) -> bool:
    """Whether the value is a tensor of its own: neither a parameter nor one of the compiler's, which have no memory."""
    return type(value) is torch.Tensor and value.nbytes > 0


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _lies_in(tensor: torch.Tensor, spans: Spans) -> bool:
    return any(first <= tensor.data_ptr() < first + size for first, size in spans)
