"""NVIDIA GPUs as devices: settings of CUDA, torch and NVML for engines, ranks and warm parents."""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

from runtime.devices import nvml
from runtime.devices.kind import DeviceKind, Found, Reading, for_processors

LEAST_SHARED_BYTES = 99 * 1024
SHARED_BYTES = {(8, 0): 163 * 1024, (8, 7): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024, (10, 3): 227 * 1024}
"""Maximum shared memory of a block, by compute capability (CUDA's programming guide, technical specifications). NVML
does not report it. Any other capability gets LEAST_SHARED_BYTES."""
ONE_COMPILER = "HUMMING_DISABLE_PARALLEL_BUILD"
NEEDS_THE_OTHER = (
    "this is the CPU build, whose engines use no GPU: install the CUDA build (`APPLIANCE_BUILD=cuda make setup`) "
    "or set [box] devices to a number, such as 8, for that many logical CPU devices"
)
_MAPS = Path("/proc/self/maps")
# Errors of a GPU's libraries, in torch's words; AcceleratorError is the class of the CUDA runtime's errors.
_OF_A_DEVICE = re.compile(r"AcceleratorError|(?:CUDA|cuDNN|NCCL) error")
# Errors of these libraries that the program caused.
_OF_THE_PROGRAM = re.compile(r"device-side assert|out of memory|ALLOC_FAILED")
MOST_ROUNDED_MB = 4  # a staging ring's buffer (train.state.copies), which each snapshot allocates again


# The first variable makes torch.cuda.is_available() query NVML instead of CUDA, which no forked process could use
# afterwards ("Cannot re-initialize CUDA in forked subprocess"). The second keeps the import of humming-kernels from
# starting compilers and threads in a process that forks (humming/ops/utils.py).
FORK_ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", ONE_COMPILER: "1"}


def at_fault(error: str, message: str) -> bool:
    """Whether a GPU may be at fault for an exception of a process that computed on it; `error`: its class. Most errors
    come from the program or the host, and recur on any GPU."""
    text = f"{error}: {message}"
    return _OF_A_DEVICE.search(text) is not None and _OF_THE_PROGRAM.search(text) is None


def not_ready(message: str) -> str:
    """Return how to repair a machine if this error message means that no process can use a GPU; "" otherwise."""
    if "system not yet initialized" not in message:  # error 802 (CUDA driver API, CUDA_ERROR_SYSTEM_NOT_READY)
        return ""
    return (
        "the GPUs of this machine are joined by NVSwitches and cannot be used before nvidia-fabricmanager has set "
        "them up: install it in the driver's very version and start it (`systemctl enable --now "
        "nvidia-fabricmanager`)"
    )


@cache
def _copy_streams(device: int) -> Iterator[Any]:
    """Two streams in rotation: one for a snapshot and one for a version. torch would rotate 32, and each keeps the
    memory blocks of its copies and, after a product, cuBLAS's workspace."""
    import torch

    return cycle((torch.cuda.Stream(device), torch.cuda.Stream(device)))


class Cuda(DeviceKind):
    name, title, collectives = "cuda", "NVIDIA GPU", "nccl"
    on_host, locks_pages = False, True
    context_bytes = 2 * 2**30
    asleep_bytes = 3 * 2**29  # measured: SmolLM2-135M 1.60 GB asleep on an H200, with its graphs on the host
    # vLLM prefers FlashInfer on Blackwell, and for FP8 keys and values on all but Hopper, without checking for nvcc
    # (vllm/platforms/cuda.py, _get_backend_priorities).
    compiled_attention = "FLASHINFER"
    head_sizes: frozenset[int] = frozenset()

    def present(self) -> bool:
        return nvml.CONTROL.exists()

    def probe(self) -> tuple[Found, ...]:
        return nvml.probe()

    def visibility(self, devices: Iterable[int | str]) -> dict[str, str]:
        # NVML's order, not CUDA's default order, which puts the fastest first.
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return visible | {"NCCL_SOCKET_IFNAME": "lo"}

    def address(self, index: int) -> str:
        return str(index)

    def watch(self, devices: Mapping[int, str]) -> Callable[[Collection[str]], tuple[Reading, ...]]:
        return nvml.Watch(devices).read

    def set_power_limits(self, uuids: Collection[str], limit_w: float | None) -> dict[str, str]:
        return nvml.set_power_limits(uuids, limit_w)

    def computes_bf16(self) -> bool:
        return True

    def lacks_for_quantised(self) -> str:
        return ""

    def foreign(self) -> dict[int, str]:
        return nvml.foreign()

    def after_fork(self) -> None:
        # DeepSpeed queries NVML for free memory through the handle that it opened before the fork.
        with suppress(*nvml.NO_DRIVER):
            pynvml.nvmlInit()

    def in_worker(self) -> None:
        # The variable also makes kernels compile one after the other (humming/utils/cpu.py), which takes minutes.
        os.environ.pop(ONE_COMPILER, None)
        # humming compiles kernels with NVRTC (humming/csrc/nvrtc_compile.cpp). NVRTC loads its builtins library by name
        # alone; without an installed CUDA that file exists only among the Python packages.
        files = [file for entry in sys.path for file in Path(entry).glob("nvidia/*/lib/libnvrtc-builtins.so.*")]
        if folders := {str(file.parent) for file in files}:
            own = os.environ.pop("LD_LIBRARY_PATH", "")
            os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, (own, *sorted(folders))))

    def library_environment(self, caches: Path) -> dict[str, str]:
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_CACHE_PATH": str(caches / "cuda"),
            "FLASHINFER_WORKSPACE_BASE": str(caches),
            # humming-kernels multiplies quantised layers on Hopper, with kernels that it compiles by NVRTC.
            "HUMMING_CACHE_DIR": str(caches / "humming"),
            "HUMMING_TMP_DIR": str(caches / "humming-tmp"),
        }

    def device_at_import(self, device: Callable[[], tuple[tuple[int, int], str]]) -> AbstractContextManager[None]:
        # The kernels of gated delta nets (Qwen3.5) query the device at import. vLLM's front end imports them with the
        # class of a model that reads images, before it forks its core
        # (vllm/third_party/flash_linear_attention/ops/utils.py).
        import torch

        if torch.cuda.is_initialized():
            return nullcontext()
        capability, name = device()
        return _device_at_import(capability, name, SHARED_BYTES.get(capability, LEAST_SHARED_BYTES))

    def engine_arguments(self) -> list[str]:
        # The cumem allocator's level-2 sleep frees the memory of weights and KV and keeps their addresses; captured
        # graphs in its pool go to host memory.
        asleep = ["--enable-sleep-mode", "--sleep-mode-offload-cudagraph"]
        # FlashInfer compiles its kernels by nvcc when an engine starts: minutes, and without nvcc the engine dies. With
        # nvcc and ninja, vLLM imports it for this fusion before it forks its core, and the import initialises CUDA
        # (vllm/config/vllm.py). Gated delta nets use it from Hopper on without checking for nvcc (layers/mamba/gdn).
        passes = {"pass_config": {"fuse_allreduce_rms": False}}
        without_tuning = ["--no-enable-flashinfer-autotune", "--compilation-config", json.dumps(passes)]
        return [*asleep, *without_tuning, "--gdn-prefill-backend", "triton"]

    def engine_environment(self) -> dict[str, str]:
        # vLLM would use these too without checking for nvcc. DeepGEMM, preferred from Hopper on for layers quantised to
        # FP8 in blocks, compiles every kernel with nvcc (vllm/utils/deep_gemm.py).
        return {
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
            "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
            "VLLM_USE_DEEP_GEMM": "0",
        }

    def rank_environment(self) -> dict[str, str]:
        # torch rounds page-locked blocks up to a power of two: an offloading rank would take up to twice its planned
        # memory. Blocks above this size are neither rounded nor cached. (The setting that only stops the rounding can
        # return a block smaller than requested: ATen/core/CachingHostAllocator.h, get_free_block.)
        return {"PYTORCH_ALLOC_CONF": f"pinned_max_cached_size_mb:{MOST_ROUNDED_MB}"}

    def of_another_build(self) -> str:
        return NEEDS_THE_OTHER if for_processors() else ""

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

        return RuntimePageLock(ctypes.CDLL(loaded("libcudart")))

    def mark(self) -> Callable[[], None]:
        import torch

        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def unplanned_attention(self) -> None:
        import torch

        # torch prefers cuDNN on Hopper and Blackwell (sdp_utils.cpp, check_prefer_cudnn_attention). cuDNN plans each
        # new shape, for up to a second, and caches the plan (native/cudnn/MHA.cpp: the lengths are in the cache's key).
        torch.backends.cuda.enable_cudnn_sdp(False)

    def copy_stream(self) -> AbstractContextManager[Any]:
        import torch

        if not torch.cuda.is_initialized():
            return nullcontext()
        stream = next(_copy_streams(torch.cuda.current_device()))
        stream.wait_stream(torch.cuda.default_stream())
        return torch.cuda.stream(stream)


class RuntimePageLock:
    """Locks pages by the CUDA runtime (CUDA runtime API, Memory Management). ctypes releases the GIL during a call."""

    def __init__(self, library: ctypes.CDLL):
        """`library` must not be shared: this object sets the argument types of its functions."""
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
    """The path of a library that this process has loaded, by file name without extension. Raises RuntimeError."""
    for line in _MAPS.read_text().splitlines():
        _, _, rest = line.partition("/")
        if rest.rpartition("/")[2].startswith((f"{library}.", f"{library}-")):
            return f"/{rest}"
    raise RuntimeError(
        f"{library} is not loaded in this process: torch was built for other devices "
        "(`python -c 'import torch; print(torch.__version__)'` names the build)"
    )


@contextmanager
def _device_at_import(capability: tuple[int, int], name: str, shared_bytes: int) -> Iterator[None]:
    """Make torch.cuda and Triton report this GPU in the context, without starting CUDA. `shared_bytes`: the most shared
    memory of a block."""
    import torch
    from triton import runtime
    from triton.backends.compiler import GPUTarget

    stand_in = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * capability[0] + capability[1], 32),
        utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": shared_bytes}),
    )
    answers: dict[str, Callable[..., Any]] = {
        "device_count": lambda: 1,  # all devices of an engine are alike
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


KIND = Cuda()
