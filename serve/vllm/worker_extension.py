"""Methods that every worker gets (vLLM's `--worker-extension-cls`), called over `collective_rpc`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from runtime.devices.kinds import in_host_memory
from serve.core.errors import VersionError, WrongState
from serve.vllm.profiled_steps import ProfiledSteps
from serve.vllm.shm_transfer import ShmWeightTransferEngine


class ShmWorkerExtension:
    """Mixed into vLLM's worker class; `weight_transfer_engine` and `rank` are the worker's own attributes."""

    weight_transfer_engine: ShmWeightTransferEngine
    rank: int
    model_runner: Any
    _weight_update_active: bool

    def shm_check(self, path: str) -> dict[str, Any]:
        """Check whether and how a version can be loaded: see ShmWeightTransferEngine.check.

        vLLM carries only the text of a worker's exception, so a refusal travels as `{"refused": [type, text]}`.
        """
        try:
            return self.weight_transfer_engine.check(path)
        except VersionError as error:
            return {"refused": [type(error).__name__, str(error)]}

    def shm_stage(self, path: str) -> None:
        self.weight_transfer_engine.stage(path)

    def shm_staged(self) -> bool:
        return self.weight_transfer_engine.staged()

    def shm_drop_staged(self) -> None:
        self.weight_transfer_engine.drop_staged()

    def shm_unmap(self) -> None:
        self.weight_transfer_engine.unmap()

    def shm_report(self) -> dict[str, Any]:
        """Report on the last load. Raises WrongState if it did not complete."""
        if self.weight_transfer_engine.dirty:
            raise WrongState("the last load did not complete; the model holds mixed weights")
        return self.weight_transfer_engine.report

    def shm_leave_update(self) -> None:
        """End this worker's transfer after another worker's failed, because nobody else does; the next load replaces
        what it wrote."""
        self._weight_update_active = False

    def shm_sleeping(self) -> None:
        """Keep what a GPU's sleep of level 2 would discard for good."""
        self.weight_transfer_engine.sleeping(self.model_runner)

    def shm_woken(self) -> None:
        """Zero the KV cache, which is mapped again unwritten after a GPU's level 2 of sleep: kernels read whole blocks
        and mask what no token wrote, and a masked NaN stays one (vLLM itself writes zeros on ROCm only,
        vllm/device_allocator/cumem.py)."""
        if in_host_memory(self.model_runner.device):
            return
        for cache in _tensors(self.model_runner.kv_caches):
            cache.zero_()

    def shm_profile_begin(self) -> None:
        """Only on the first worker, because all of them would write their traces into the same file."""
        if self.rank == 0:
            self.__dict__["shm_profile"] = ProfiledSteps(self.model_runner)

    def shm_profile_steps(self) -> int | None:
        profile: ProfiledSteps | None = self.__dict__.get("shm_profile")
        return None if profile is None else profile.done

    def shm_profile_end(self, path: str | None) -> dict[str, Any] | None:
        """What was measured; its trace goes to `path`, or nowhere. None of a worker that was not."""
        profile: ProfiledSteps | None = self.__dict__.pop("shm_profile", None)
        return None if profile is None else profile.end(path)


def _tensors(caches: Any) -> Iterator[torch.Tensor]:
    """vLLM keeps one tensor for a layer, or several for layers with a state."""
    if isinstance(caches, torch.Tensor):
        yield caches
    elif isinstance(caches, Iterable):
        for cache in caches:
            yield from _tensors(cache)
