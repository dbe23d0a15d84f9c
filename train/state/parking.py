"""Parks a suspended rank: frees its memory but keeps the process and what it has built.

    suspend:  snapshot in shared memory -> `give_back` -> "done", parked
    resume:   the same world, place by place -> `take_back` -> the snapshot is read into the memory that is there

Model, optimizer and connections to the other ranks stay as they were between two steps; it frees only the bytes that
the snapshot (or the base model) restores. It frees them lazily (MADV_FREE): the kernel reclaims pages under memory
pressure, and the rest need not be faulted in and zeroed again. That matters because a new page costs several times the
copy into it.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterable
from typing import Any

import torch

from runtime.devices.kinds import kind_of
from runtime.libc import last_error, libc
from train.model.model import checkpoint_name, load_model
from train.plan.spec import TrainSpec
from train.state import fragments

_MADV_FREE = 8
_SMALLEST_BYTES = 256 * 1024  # what is smaller may share its pages with other things


def can_park(spec: TrainSpec) -> bool:
    """Whether a rank of this run gives back its device without ending.

    Not on a GPU, where a living process keeps a context on the device. Under ZeRO-3 and with offloading DeepSpeed keeps
    parameters in buffers of its own; such ranks are forked again.
    """
    return kind_of(spec.device_kind).on_host and spec.zero_stage <= 2 and spec.offload == "none"


def restorable(engine: Any) -> list[torch.UntypedStorage]:
    """Memory of weights and optimizer state of which every byte is either written again by a resume or zero between two
    steps. To be asked after the first step, once: looking takes longer than giving back."""
    tensors = [p.tensor.data for p in fragments.parameters(engine)]
    tensors += fragments.flat_state(engine)
    return list({tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values())


def give_back(storages: Iterable[torch.UntypedStorage]) -> int:
    """Free this memory, losing its contents; return the number of bytes."""
    return sum(_free_lazily(storage) for storage in storages)


def take_back(engine: Any, spec: TrainSpec) -> None:
    """Restore the frozen weights. The snapshot restores all others."""
    frozen = {p.name: p.tensor for p in fragments.parameters(engine) if not p.trained}
    if not frozen:
        return
    model = load_model(spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (target := frozen.get(checkpoint_name(name))) is not None:
                target.data.copy_(parameter)


def _free_lazily(storage: torch.UntypedStorage) -> int:
    if storage.nbytes() < _SMALLEST_BYTES:
        return 0
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if libc.madvise(first, length, _MADV_FREE):
        error = last_error("cannot free the memory of weights")
        if error.errno == errno.EINVAL:  # mapped from a file, so the kernel can drop it already
            return 0
        raise error
    return length
