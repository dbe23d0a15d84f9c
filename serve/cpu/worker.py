"""Defines a CPU worker that really frees memory in sleep.

vLLM's CPUWorker ignores `sleep` while its engine reports itself asleep. This one returns the memory of weights and KV
cache to the host and keeps everything else (process, imports, tokenizer, compiled kernels). It follows vLLM's own
sequence: sleep(level=2), wake_up(["weights"]), a weight transfer, wake_up(["kv_cache"]).
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.v1.worker.cpu_worker import CPUWorker

from runtime.libc import last_error, libc
from serve.load.direct_load import drop_packed, drop_weights
from serve.load.kernel_threads import renew_pool

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_INT_MAX = 2**31 - 1


class StagedTransfer(Protocol):
    """What the worker needs of its weight-transfer engine (`serve.vllm.shm_transfer`)."""

    layerwise_reason: str | None

    def drop_staged(self) -> None: ...


class ShmCPUWorker(CPUWorker):
    """Set with `--worker-cls`, because vLLM lets an extension class add methods but not replace them."""

    weight_transfer_engine: StagedTransfer

    def init_device(self) -> None:
        renew_pool()
        _keep_freed_memory()
        super().init_device()
        self._asleep: dict[int, tuple[torch.UntypedStorage, int, str]] = {}

    def sample_tokens(self, grammar_output: Any) -> Any:
        with untouched(self.model_runner):
            return super().sample_tokens(grammar_output)

    def sleep(self, level: int = 1) -> None:
        """Free weights, adapter slots and KV cache. It ignores the level: the shared version directory already holds
        what a level-1 sleep would keep in host memory."""
        self.weight_transfer_engine.drop_staged()
        # The layerwise reload writes into existing parameters, so they keep their shapes.
        drop = drop_weights if self.weight_transfer_engine.layerwise_reason is None else drop_packed
        for module in self.model_runner.model.modules():
            drop(module)
        for parameter in self.model_runner.model.parameters():
            self._put_to_sleep(parameter, "weights")
        for module in self.model_runner.model.modules():
            if isinstance(module, BaseLayerWithLoRA):
                for name in ("lora_a_stacked", "lora_b_stacked"):
                    for tensor in _tensors(module.__dict__.get(name)):
                        self._put_to_sleep(tensor, "adapters")
        gc.collect()
        libc.malloc_trim(0)
        # Its addresses stay valid: the kernel maps each page again, zeroed, when a request first writes to it, not all
        # at wake.
        for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in self._kv_caches()}.values():
            _drop_pages(storage)

    def shm_give_back(self) -> None:
        """Return the freed memory that malloc keeps to the host."""
        libc.malloc_trim(0)

    def _kv_caches(self) -> list[torch.Tensor]:
        return _tensors(self.model_runner.kv_caches)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Reallocate what the tags name. Weights are undefined until the next weight transfer; adapter slots are
        zeroed. The KV cache kept its addresses."""
        for key, (storage, nbytes, tag) in list(self._asleep.items()):
            # The adapter slots come back with the weights, empty.
            if tags is not None and tag not in tags and not (tag == "adapters" and "weights" in tags):
                continue
            storage.resize_(nbytes)
            if tag != "weights":
                torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
            del self._asleep[key]

    def _put_to_sleep(self, tensor: torch.Tensor, tag: str) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage._cdata not in self._asleep:
            self._asleep[storage._cdata] = (storage, storage.nbytes(), tag)
            storage.resize_(0)


@contextmanager
def untouched(runner: Any) -> Iterator[None]:
    """Within it, a request whose prompt is not read to its end in this step draws no random numbers of its own: its
    sample is thrown away. vLLM 0.32 lets it draw and then rewinds the generator, which a generator on the host cannot
    do: an engine died of any long prompt with a `seed` (_bookkeeping_sync)."""
    generators = runner.input_batch.generators
    unread = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
    kept = {place: generators.pop(place) for place in unread.tolist() if place in generators}
    try:
        yield
    finally:
        generators.update(kept)


def _drop_pages(storage: torch.UntypedStorage) -> None:
    """Zero a storage by returning its pages to the kernel."""
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if last <= first:
        last = first = storage.data_ptr()
    elif libc.madvise(first, last - first, mmap.MADV_DONTNEED):
        raise last_error("cannot return the memory of the KV cache to the host")
    ctypes.memset(storage.data_ptr(), 0, first - storage.data_ptr())
    ctypes.memset(last, 0, storage.data_ptr() + storage.nbytes() - last)


def _tensors(value: object) -> list[torch.Tensor]:
    """All tensors in nested lists (hybrid models keep several per layer)."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _keep_freed_memory() -> None:
    """Let malloc serve large blocks from its heap and keep them when freed.

    By default malloc maps each large tensor again and its pages fault in one by one, which halves the rate of an
    in-place load, because that frees and allocates the same sizes repeatedly. `sleep` returns all of it with
    malloc_trim.
    """
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, _INT_MAX)
