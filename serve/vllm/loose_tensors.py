"""Keeps a model's loose tensors over a sleep: tensors that are not weights but lie in the GPU memory of the weights.

A sleep of level 2 discards all of that memory. vLLM itself keeps a model's buffers (vllm/v1/worker/gpu_worker.py,
sleep). It does not keep what a layer computes from the model's configuration and holds as a plain attribute. No version
contains such a tensor, so after the sleep it has whatever was in the memory. These objects hold such tensors:
- layers: ALiBi's slopes (vllm/v1/attention/backends/flash_attn.py);
- modules of vLLM, for all layers: those of MiniMax-M2's norms, by which the workers of a tensor-parallel engine find
  each other's sums (vllm/model_executor/layers/minimax_rms_norm/lamport_workspace.py);
- vLLM's model runner, from which the sampler and the model's state are made while it loads the weights: which tokens
  limit thinking, and how far back a token's neighbours stand (vllm/models/qwen4_exp/nvidia/model_state.py).

Two kinds of tensors are not kept: large ones, and those in lists and tables. They are filled with zeros, which is what
they began as. One example is deepstack_input_embeds, the list from which Qwen3-VL adds to its first layers what
images left there: for a text the model writes nothing there, but a captured graph reads more rows than a step may
write, and a NaN in them would spread.

vLLM's own reload may make a layer's kernel again, but captured graphs still read the tensors of the first one. So this
module finds the tensors once, before any other load, keeps them, and copies what the new kernel holds into them.
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
"""A larger tensor is not kept: it is a workspace or an input, which begins as zeros."""
MOST_DEEP = 3
"""How many levels of nested lists and tables are searched."""

Spans = Collection[tuple[int, int]]
"""Addresses on the device: (first, bytes)."""


class LooseTensors:
    """The loose tensors of one model after its first load. They must stay the same tensors, because captured graphs
    read them at their addresses."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._first = dict(_loose(model.named_modules()))
        self._for_all = [tensor for _, tensor in _loose(_held_for_all())]
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device, on the host
        self._emptied: list[torch.UntypedStorage] = []

    def keep(self, discarded: Spans, runner: Any) -> None:
        """Copy the tensors in the memory that is about to be discarded to the host. runner: vLLM's model runner, which
        holds some of them outside the model."""
        of_runner = [("runner", runner)]
        small = chain(self._first.values(), self._for_all, (tensor for _, tensor in _loose(of_runner)))
        every = {id(tensor): tensor for tensor in small}.values()
        found = [tensor for tensor in every if _lies_in(tensor, discarded)]
        self._kept = [(tensor, tensor.to(HOST.torch_type, copy=True)) for tensor in found]
        # These are not zeroed: vLLM has written the buffers again before put_back runs.
        written = {buffer.untyped_storage().data_ptr() for buffer in self._model.buffers() if _plain(buffer)}
        others = _unkept(chain(self._model.named_modules(), of_runner, _held_for_all()))
        storages = [tensor.untyped_storage() for tensor in others if _lies_in(tensor, discarded)]
        by_address = {storage.data_ptr(): storage for storage in storages}
        self._emptied = [storage for address, storage in by_address.items() if address not in written]

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


def _held_for_all() -> Iterator[tuple[str, Any]]:
    """Yields the objects of vLLM's classes that its modules hold directly or in a table, each with its name."""
    for module in [module for name, module in [*sys.modules.items()] if name.startswith("vllm.") and module]:
        for name, value in [*vars(module).items()]:
            held = [*value.values()] if isinstance(value, dict) else [value]
            yield from ((f"{module.__name__}.{name}", one) for one in held if _of_vllm(one))


def _of_vllm(value: Any) -> bool:
    return type(value).__module__.startswith("vllm.")


def _loose(holding: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields small tensors that are plain attributes of these holders or of vLLM's objects below them, each with the
    path of names that leads to it."""
    for place, value in _attributes(holding):
        if _plain(value) and value.nbytes <= MOST_BYTES:
            yield place, value


def _unkept(holding: Iterable[tuple[str, Any]]) -> Iterator[torch.Tensor]:
    """Yields the large tensors, and those in a list, a tuple or a table."""
    for _, value in _attributes(holding):
        if _plain(value) and value.nbytes > MOST_BYTES:
            yield value
        yield from _within(value, MOST_DEEP)


def _within(value: Any, deep: int) -> Iterator[torch.Tensor]:
    if not isinstance(value, list | tuple | dict) or not deep:
        return
    for one in [*(value.values() if isinstance(value, dict) else value)]:
        if _plain(one):
            yield one
        yield from _within(one, deep - 1)


def _attributes(holding: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of these holders and of the vLLM objects that they hold directly or indirectly, such as an
    attention's implementation or a quantisation's kernel."""
    holders = list(holding)
    seen = {id(holder) for _, holder in holders}
    while holders:
        place, holder = holders.pop()
        for name, value in [*getattr(holder, "__dict__", {}).items()]:  # a copy: other threads write meanwhile
            yield f"{place}.{name}", value
            if _of_vllm(value) and id(value) not in seen:
                seen.add(id(value))
                holders.append((f"{place}.{name}", value))


def _plain(value: Any) -> bool:
    """Whether the value is a tensor of its own: neither a parameter nor one of the compiler's, which have no memory."""
    return type(value) is torch.Tensor and value.nbytes > 0


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _lies_in(tensor: torch.Tensor, spans: Spans) -> bool:
    return any(first <= tensor.data_ptr() < first + size for first, size in spans)
