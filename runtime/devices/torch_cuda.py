"""Computes on GPUs through torch.cuda."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from runtime.devices.builds import NEEDS_THE_OTHER, for_processors
from runtime.devices.kind import DeviceKind

_MAPS = Path("/proc/self/maps")
# What the libraries of a GPU report, in torch's words; the first is the class of the runtime's own errors.
_OF_A_DEVICE = re.compile(r"AcceleratorError|(?:CUDA|cuDNN|NCCL) error")
# What they report too, and the program has done.
_OF_THE_PROGRAM = re.compile(r"device-side assert|out of memory|ALLOC_FAILED")
RUNTIME_LIBRARY = "libcudart"  # torch loads it with itself
THREADS_PER_WARP = 32
MOST_ROUNDED_MB = 4  # a staging ring's buffer (train.state.copies), which is made anew for each snapshot


@cache
def _copy_streams(device: int) -> Iterator[Any]:
    """Two in turn, for a snapshot and a version at a time. torch hands out 32 in turn, each of which keeps the blocks
    of its copies and, after a product, cuBLAS's workspace."""
    import torch

    return cycle((torch.cuda.Stream(device), torch.cuda.Stream(device)))


class TorchCuda(DeviceKind):
    """What processes that compute on GPUs ask of torch."""

    torch_type = "cuda"
    accelerator = "cuda"
    collectives = "nccl"

    def rank_environment(self) -> dict[str, str]:
        # torch rounds what it page-locks up to a power of two, up to twice what plans count of a rank that offloads:
        # master weights, gradients and new weights of a partition, 35 GB of a 70 B model on eight ranks and 69 then.
        # Nothing above this size is rounded, or kept when it is freed. (The setting that only ends the rounding keeps
        # them, and gives a smaller one of them to callers that ask for more: ATen/core/CachingHostAllocator.h,
        # get_free_block.) When parameters are offloaded, DeepSpeed locks each rank's part of every matrix by itself, 34
        # MB of an MLP's of 7 B on four ranks, and where all are trained it lays them end to end in another block and
        # frees them.
        return {"PYTORCH_ALLOC_CONF": f"pinned_max_cached_size_mb:{MOST_ROUNDED_MB}"}

    def collectives_environment(self, interface: str) -> dict[str, str]:
        return {"NCCL_SOCKET_IFNAME": interface}

    def engine_arguments(self) -> list[str]:
        # The cumem allocator's level-2 sleep frees the memory of weights and KV and keeps their addresses.
        # Captured graphs stay on the device unless they lie in its pool; they then go to host memory.
        return ["--enable-sleep-mode", "--sleep-mode-offload-cudagraph"]

    def of_another_build(self) -> str:
        return NEEDS_THE_OTHER if for_processors() else ""

    def at_fault(self, error: str, message: str) -> bool:
        text = f"{error}: {message}"
        return _OF_A_DEVICE.search(text) is not None and _OF_THE_PROGRAM.search(text) is None

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

    def page_lock(self) -> RuntimePageLock:
        import torch  # noqa: F401 - loads the library

        return RuntimePageLock(ctypes.CDLL(loaded(RUNTIME_LIBRARY)))

    def mark(self) -> Callable[[], None]:
        import torch

        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def unplanned_attention(self) -> None:
        import torch

        # cuDNN's, which torch prefers on Hopper and Blackwell (sdp_utils.cpp, check_prefer_cudnn_attention): each new
        # shape takes up to a second, and its plan is kept (native/cudnn/MHA.cpp: the lengths are in the cache's key).
        torch.backends.cuda.enable_cudnn_sdp(False)

    def copy_stream(self) -> AbstractContextManager[Any]:
        import torch

        if not torch.cuda.is_initialized():
            return nullcontext()
        stream = next(_copy_streams(torch.cuda.current_device()))
        stream.wait_stream(torch.cuda.default_stream())
        return torch.cuda.stream(stream)


class RuntimePageLock:
    """Locks pages by the CUDA runtime (CUDA runtime API, Memory Management). ctypes lets other threads of Python go on
    during a call."""

    def __init__(self, library: ctypes.CDLL):
        """`library` is this object's own: it sets the types of its calls."""
        self._register = library.cudaHostRegister
        self._register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._unregister = library.cudaHostUnregister
        self._unregister.argtypes = [ctypes.c_void_p]
        self._take_error = library.cudaGetLastError
        self._take_error.argtypes = []

    def lock(self, address: int, nbytes: int) -> bool:
        return self._done(self._register(address, nbytes, 0))

    def unlock(self, address: int) -> None:
        self._done(self._unregister(address))

    def _done(self, code: int) -> bool:
        if code:
            self._take_error()  # torch would attribute a remaining error to the next kernel
        return code == 0


def loaded(library: str) -> str:
    """The file of a library that this process has loaded, by its name without ending. Raises RuntimeError."""
    for line in _MAPS.read_text().splitlines():
        _, _, rest = line.partition("/")
        if rest.rpartition("/")[2].startswith((f"{library}.", f"{library}-")):
            return f"/{rest}"
    raise RuntimeError(
        f"{library} is not loaded in this process: torch loads it where it was built for such devices "
        "(`python -c 'import torch; print(torch.__version__)'` names the build)"
    )


def started() -> bool:
    """Whether this process has started CUDA: none that it forks could use it then ("Cannot re-initialize CUDA in forked
    subprocess")."""
    import torch

    return torch.cuda.is_initialized()


@contextmanager
def device_at_import(capability: tuple[int, int], name: str, shared_bytes: int) -> Iterator[None]:
    """While it is open, what asks torch.cuda or Triton which NVIDIA GPU is there is told so, and CUDA is not started.
    `shared_bytes`: of a block, at most."""
    import torch
    from triton import runtime
    from triton.backends.compiler import GPUTarget

    stand_in = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * capability[0] + capability[1], THREADS_PER_WARP),
        utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": shared_bytes}),
    )
    answers: dict[str, Callable[..., Any]] = {
        "device_count": lambda: 1,  # the devices of an engine are alike
        "get_device_name": lambda device=None: name,
        "get_device_capability": lambda device=None: capability,
    }
    driver, real = runtime.driver._active, {call: getattr(torch.cuda, call) for call in answers}
    runtime.driver.set_active(stand_in)
    for call, answer in answers.items():
        setattr(torch.cuda, call, answer)
    try:
        yield
    finally:
        runtime.driver.set_active(driver)
        for call, asks in real.items():
            setattr(torch.cuda, call, asks)
