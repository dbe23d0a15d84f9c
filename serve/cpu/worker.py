"""A CPU worker that sleeps and wakes for real, and that may hold two versions.

vLLM's CPUWorker ignores `sleep` while its engine reports itself asleep. This one gives the memory of weights and KV
cache back to the machine and keeps all else (process, imports, tokenizer, compiled kernels). vLLM's own sequence
applies: sleep(level=2), wake_up(["weights"]), a weight transfer, wake_up(["kv_cache"]).
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from typing import Any, Protocol

import torch
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from runtime.libc import last_error, libc
from serve.cpu.finishing import Weights
from serve.cpu.finishing_scheduler import WEIGHTS
from serve.load.direct_load import drop_packed, drop_weights
from serve.load.kernel_threads import renew_pool

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_INT_MAX = 2**31 - 1


class StagedTransfer(Protocol):
    """What the worker asks of its weight-transfer engine (`serve.vllm.shm_transfer`)."""

    layerwise_reason: str | None

    def bring_in(self, weights: Weights) -> None: ...

    def drop_staged(self) -> None: ...


class ShmCPUWorker(CPUWorker):
    """Chosen with `--worker-cls`: vLLM lets an extension class add methods but not replace them."""

    weight_transfer_engine: StagedTransfer

    def init_device(self) -> None:
        renew_pool()
        _keep_freed_memory()
        super().init_device()
        self._asleep: dict[int, tuple[torch.UntypedStorage, int, str]] = {}

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """vLLM's, with the weights in place that the scheduler named for this step."""
        weights = getattr(scheduler_output, WEIGHTS, None)
        if weights is not None:
            self.weight_transfer_engine.bring_in(weights)
        return super().execute_model(scheduler_output)

    def sleep(self, level: int = 1) -> None:
        """Free weights, the slots of adapters and KV cache. The level is not looked at: what a level-1 sleep would
        keep in host memory is in the shared version directory already."""
        self.weight_transfer_engine.drop_staged()
        # The layerwise reload writes into the parameters it finds, so those keep their shapes.
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
        # Its addresses stay: the pages come back zeroed, each when a request first writes to it, not all in the wake.
        for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in self._kv_caches()}.values():
            _drop_pages(storage)

    def shm_give_back(self) -> None:
        """Give what malloc keeps of freed memory back to the host."""
        libc.malloc_trim(0)

    def _kv_caches(self) -> list[torch.Tensor]:
        return _tensors(self.model_runner.kv_caches)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate again what the tags name. Weights hold garbage until the next weight transfer; the
        slots of adapters are zeroed. The KV cache was never away."""
        for key, (storage, nbytes, tag) in list(self._asleep.items()):
            # The slots of adapters come back with the weights, empty.
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


def _drop_pages(storage: torch.UntypedStorage) -> None:
    """Zero a storage by giving its memory back."""
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if last <= first:
        last = first = storage.data_ptr()
    elif libc.madvise(first, last - first, mmap.MADV_DONTNEED):
        raise last_error("the memory of the KV cache cannot be given back")
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

    By default each large tensor is mapped anew and its pages are faulted in one by one, which halves the rate of an
    in-place load: it frees and allocates the same sizes over and over. `sleep` gives all back with malloc_trim.
    """
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, _INT_MAX)
