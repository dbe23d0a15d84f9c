"""Preserves a model's loose tensors over a sleep: tensors in the weights' GPU memory that are not weights.

A sleep of level 2 discards that memory. vLLM preserves a model's buffers (vllm/v1/worker/gpu_worker.py, sleep), but not
tensors that a layer computes from the configuration and holds as plain attributes, such as ALiBi's slopes, nor tensors
that its model runner creates while it loads the weights, such as the sampler's thinking limits. Versions do not contain
loose tensors.

Large loose tensors are filled with zeros, the initial value of workspaces and inputs: a captured graph reads more rows
than a step writes (such as Qwen3-VL's deepstack_input_embeds), and a NaN in them would spread.

vLLM's own reload may rebuild a layer's kernel, but captured graphs still read the first kernel's tensors. So this
module holds the tensors of the first load and copies the new kernel's values into them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from vllm import device_allocator

from runtime.devices.kind import HOST_MEMORY

MOST_BYTES = 1 << 20
"""Larger tensors are not copied: they are workspaces or inputs, which start as zeros."""

Spans = Collection[tuple[int, int]]
"""Addresses on the device: (first, bytes)."""


class LooseTensors:
    """The loose tensors of one model after its first load. The tensors must keep their addresses, because captured
    graphs read from these."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._first = dict(_loose(model.named_modules()))
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # pairs of (device tensor, host copy)
        self._emptied: list[torch.UntypedStorage] = []

    def keep(self, discarded: Spans, runner: Any) -> None:
        """Copy small tensors within `discarded`, the memory that the sleep discards, to the host. runner: vLLM's model
        runner, which holds some loose tensors outside the model."""
        others = _loose([*self._model.named_modules(), ("runner", runner)])
        every = {id(tensor): tensor for tensor in (*self._first.values(), *(tensor for _, tensor in others))}.values()
        written = {_storage(buffer) for buffer in self._model.buffers()}  # vLLM restores buffers before put_back runs
        lost = [t for t in every if _storage(t) not in written and _lies_in(t, discarded)]
        self._kept = [(t, t.to(HOST_MEMORY, copy=True)) for t in lost if t.nbytes <= MOST_BYTES]
        self._emptied = [t.untyped_storage() for t in lost if t.nbytes > MOST_BYTES]

    @torch.no_grad()
    def put_back(self) -> None:
        """Copy the small tensors back to the device and zero the large tensors. Call this after the memory is mapped
        again and before weights are loaded, because the load recomputes tensors derived from weights."""
        for storage in self._emptied:
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        for tensor, copy in self._kept:
            tensor.copy_(copy)
        self._kept, self._emptied = [], []

    @torch.no_grad()
    def follow(self, model: torch.nn.Module) -> None:
        """After vLLM's own reload, copy each new tensor into the first tensor at the same attribute path."""
        for place, tensor in _loose(model.named_modules()):
            first = self._first.get(place)
            if first is not None and first is not tensor and _alike(first, tensor):
                first.copy_(tensor)


def spans_of_weights() -> Spans:
    """Return the address ranges of the memory that vLLM's allocator discards with the weights."""
    allocator: Any = device_allocator.get_mem_allocator_instance()
    allocations = allocator.pointer_to_data.items()
    return [(first, data.handle[1]) for first, data in allocations if data.tag == "weights"]


def _loose(holders: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (attribute path, tensor) for the tensors in these holders' plain attributes and in the attributes' lists,
    dicts and vLLM objects, such as an attention's implementation."""
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
    return [*getattr(holder, "__dict__", {}).items()]  # a copy, because other threads may write meanwhile


def _plain(value: Any) -> bool:
    """Return whether the value is a plain tensor: neither a parameter nor a compiler's tensor, which has no memory."""
    return type(value) is torch.Tensor and value.nbytes > 0


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _lies_in(tensor: torch.Tensor, spans: Spans) -> bool:
    return any(first <= tensor.data_ptr() < first + size for first, size in spans)
