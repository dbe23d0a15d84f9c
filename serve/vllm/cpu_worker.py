"""A CPU worker whose sleep returns the memory of weights and KV cache to the host; vLLM's CPU worker ignores sleep."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.v1.worker.cpu_worker import CPUWorker

from runtime.processes.kernel import last_error, libc
from serve.load.loader import drop_weights
from serve.vllm.worker import ShmWorker, tensors_in


class ShmCPUWorker(ShmWorker, CPUWorker):
    """Set with `--worker-cls`, because an extension class of vLLM can add methods but not override them."""

    def init_device(self) -> None:
        folder, _, name = self.distributed_init_method.rpartition("/")
        if folder.startswith("file://"):  # vLLM's collectives name their /dev/shm segments after this file
            self.distributed_init_method = f"{folder}/{self.segment_prefix}{name}"
        # Make torch 2.13 replace the inherited thread pool before any thread computes: torch replaces it without a
        # lock, and a thread that computes meanwhile fails (caffe2/utils/threadpool/pthreadpool-cpp.cc).
        torch._C.set_num_threads(torch.get_num_threads())
        super().init_device()

    def sample_tokens(self, grammar_output: Any) -> Any:
        with untouched(self.model_runner):
            return super().sample_tokens(grammar_output)

    def sleep(self, level: int = 1) -> None:
        """Free KV cache and adapter slots, at level 2 the weights too. The addresses stay valid: the kernel maps each
        page again, zeroed, at the page's first write rather than at wake. Weights are undefined until the next load."""
        held = list(tensors_in(self.model_runner.kv_caches))
        for module in self.model_runner.model.modules():
            if level == 2:
                drop_weights(module)
            if isinstance(module, BaseLayerWithLoRA):
                for name in ("lora_a_stacked", "lora_b_stacked"):
                    held += tensors_in(module.__dict__.get(name))
        if level == 2:
            held += self.model_runner.model.parameters()
        gc.collect()
        libc.malloc_trim(0)
        for tensor in held:
            _drop_pages(tensor.untyped_storage())

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Do nothing, because writes map the memory again."""


@contextmanager
def untouched(runner: Any) -> Iterator[None]:
    """Hide random generators of requests whose prompt continues after this step, because these samples are discarded.
    vLLM 0.32 draws a sample and then rewinds the generator, which CPU generators cannot do: without this, any long
    prompt with a `seed` ends the engine (_bookkeeping_sync)."""
    generators = runner.input_batch.generators
    unread = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
    kept = {place: generators.pop(place) for place in unread.tolist() if place in generators}
    try:
        yield
    finally:
        generators.update(kept)


def _drop_pages(storage: torch.UntypedStorage) -> None:
    """Zero a tensor storage by returning its pages to the kernel."""
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if last <= first:
        last = first = storage.data_ptr()
    elif libc.madvise(first, last - first, mmap.MADV_DONTNEED):
        raise last_error("cannot return a tensor's memory to the host")
    ctypes.memset(storage.data_ptr(), 0, first - storage.data_ptr())
    ctypes.memset(last, 0, storage.data_ptr() + storage.nbytes() - last)
