"""Extends vLLM's workers: loads versions from shared memory, called over `collective_rpc`, and preserves tensors that a
sleep of level 2 on a GPU would lose. `ShmGPUWorker` is set with `--worker-cls`; cpu_worker.py has the CPU's worker.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.worker.gpu_worker import Worker

from runtime.processes.kernel import bind_near, die_with_parent
from serve.core.errors import VersionError
from serve.load.loader import VersionLoader
from serve.vllm.deaths import OUT_OF_STEP
from serve.vllm.loose_tensors import LooseTensors, spans_of_weights
from serve.vllm.plugin import PLAN_ATTRIBUTE

log = logging.getLogger(__name__)


class ShmWorker(Worker):
    """Methods of GPU and CPU workers. `shm_loader` exists once the first version is loaded."""

    shm_loader: VersionLoader
    numa_nodes: Sequence[int | None] = ()
    """Nodes of the workers' devices (not vLLM's --numa-bind, which cannot bind forked processes)."""
    segment_prefix = ""
    """Prefix of segments in /dev/shm, by which the supervisor finds them after a crash. The engine sets both attributes
    before it forks its core."""

    def init_device(self) -> None:
        die_with_parent()  # vLLM detects the core's end by a pipe, but workers inherit the pipe's end too
        bind_near(self.numa_nodes[self.local_rank :][:1])
        super().init_device()

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        with ending_out_of_step(self.rank):
            return super().execute_model(*args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        with ending_out_of_step(self.rank):
            return super().sample_tokens(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.model_runner.get_model()
        loader = VersionLoader(
            model,
            self.model_config,
            getattr(model, PLAN_ATTRIBUTE),
            self.device,
            self.model_runner.reload_weights,
            self.parallel_config.world_size,
        )
        self.shm_loader = loader
        # `collective_rpc` calls these names and the following methods.
        self.shm_refusal, self.shm_stage, self.shm_staged = loader.refusal, loader.stage, loader.staged
        self.shm_unmap = loader.unmap

    def shm_check(self, path: str) -> dict[str, Any]:
        """Return the bytes of a version that can be loaded, else why it cannot: see VersionLoader.check.

        vLLM transmits only the text of a worker's exception, so a refusal is returned as `{"refused": [type, text]}`.
        """
        try:
            return self.shm_loader.check(path)
        except VersionError as error:
            return {"refused": [type(error).__name__, str(error)]}

    def shm_load(self, path: str) -> dict[str, Any]:
        """Load a version into the paused model: see VersionLoader.load. After an error the weights are mixed."""
        with set_current_vllm_config(self.vllm_config):
            report = self.shm_loader.load(path)
        self.model_runner.reset_lora_state()
        return report

    def shutdown(self) -> None:
        if hasattr(self, "shm_loader"):
            self.shm_loader.close()
        super().shutdown()


class ShmGPUWorker(ShmWorker):
    """Preserves tensors that are neither weights nor buffers over a sleep of level 2."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._loose = LooseTensors(self.model_runner.get_model())

    def shm_load(self, path: str) -> dict[str, Any]:
        report = super().shm_load(path)
        if report["how"] == "layerwise":
            self._loose.follow(self.model_runner.get_model())
        return report

    def sleep(self, level: int = 1) -> None:
        if level == 2:
            self._loose.keep(spans_of_weights(), self.model_runner)
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake, and zero the KV cache, which is mapped again uninitialised: kernels read full blocks and mask unwritten
        slots, but a masked NaN is still a NaN (vLLM writes zeros on ROCm only, vllm/device_allocator/cumem.py)."""
        super().wake_up(tags)
        if tags is None or "weights" in tags:
            self._loose.put_back()
        if tags is None or "kv_cache" in tags:
            for cache in tensors_in(self.model_runner.kv_caches):
                cache.zero_()


@contextmanager
def ending_out_of_step(rank: int) -> Iterator[None]:
    """Wrap a step so that a worker whose step fails ends, unless it is the worker that replies. vLLM only logs such an
    error, and the replying worker waits in a collective until vLLM gives up after five minutes (vllm#23985)."""
    try:
        yield
    except Exception:
        if rank == 0:  # rank 0's error is sent as the reply
            raise
        log.exception("worker %d failed in a step and ends: other workers would wait for it", rank)
        logging.shutdown()
        os._exit(OUT_OF_STEP)  # an orderly exit would wait for the other workers


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested lists: vLLM has one KV cache tensor per layer, or several for layers with a state."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Iterable):
        for item in value:
            yield from tensors_in(item)
