"""Computes on GPUs through torch.cuda, which serves both CUDA and ROCm: a build of torch is for one of the two."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from runtime.devices.kind import DeviceKind


class TorchCuda(DeviceKind):
    """What kinds have in common that torch calls "cuda". `hip`: the kind is computed on by a ROCm build of torch."""

    torch_type = "cuda"
    accelerator = "cuda"  # DeepSpeed's accelerator is torch's too, and asks torch.version.hip where they differ
    collectives = "nccl"  # torch's name for RCCL as well
    hip: bool

    def of_this_torch(self) -> bool:
        import torch

        return (torch.version.hip is not None) == self.hip

    def available(self) -> bool:
        import torch

        return self.of_this_torch() and torch.cuda.is_available()

    def use(self, device: Any) -> None:
        import torch

        torch.cuda.set_device(device)

    def synchronize(self, device: Any) -> None:
        import torch

        torch.cuda.synchronize(device)

    def wait_for_copies(self, device: Any) -> None:
        import torch

        torch.cuda.current_stream(device).synchronize()

    def locked_buffer(self, elements: int) -> Any:
        import torch

        return torch.empty(elements, dtype=torch.float32, pin_memory=True)

    def mark(self) -> Callable[[], None]:
        import torch

        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def copy_stream(self) -> AbstractContextManager[Any]:
        import torch

        if not (self.of_this_torch() and torch.cuda.is_initialized()):
            return nullcontext()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        return torch.cuda.stream(stream)

    def copy_seconds(self, index: int, nbytes: int, rounds: int) -> float:
        import torch

        source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{index}")
        fastest_ms = float("inf")
        for _ in range(rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            fastest_ms = min(fastest_ms, begin.elapsed_time(end))
        return fastest_ms / 1e3
