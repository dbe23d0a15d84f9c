"""Defines the interface of a kind of device. A new kind is a subclass in its own file and a row in `kinds`.

The first half needs no torch; controller, planning and supervisors use it. The second half is for processes that
compute; its methods import torch themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Found:
    """One device of this machine. `index` is its number in the variables of `visibility`. `numa_node`: None if unknown.
    `linked`: indexes of devices that it has a direct link to."""

    index: int
    name: str
    memory_bytes: int
    numa_node: int | None = None
    linked: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Reading:
    """A device's health at `at_s` (Unix time). None: not reported. `xids`: NVIDIA error numbers that are new since the
    previous reading. `lost`: why the device no longer answers."""

    device_id: str
    at_s: float
    xids: tuple[int, ...] = ()
    ecc_uncorrected: int | None = None
    remap_failed: bool = False
    temperature_c: int | None = None
    slowdown_c: int | None = None
    lost: str = ""


class DeviceKind(ABC):
    """`name`: of the kind in specs, in the database and in the admin API, and of the device type in torch.

    `on_host`: it computes on the host's processors in the host's memory. Such devices share both: offloading saves
    nothing, a process that leaves a device keeps nothing on it, and a death indicates no hardware fault. `collectives`:
    the torch.distributed backend for its ranks. `locks_pages`: copies to it run at full rate only
    from page-locked memory of the host.
    """

    name: str
    on_host: bool = False
    collectives: str
    locks_pages: bool = True

    @abstractmethod
    def present(self) -> bool:
        """Whether this machine has such devices. The check does not touch them, as a process that forks requires."""

    @abstractmethod
    def probe(self) -> tuple[Found, ...]:
        """Every such device of this machine, by index; empty without a driver."""

    @abstractmethod
    def visibility(self, devices: Iterable[int | str]) -> dict[str, str]:
        """Return the environment for a process that may see only these devices, numbered from 0 in this order. It has
        no effect after the process first touches a device."""

    def address(self, index: int) -> str:
        """Return the device address given to a rank's supervisor; devices that are interchangeable for a process have
        the same address."""
        return str(index)

    def watch(self, devices: Mapping[int, str]) -> Callable[[], tuple[Reading, ...]] | None:
        """Return a function that reads the health of the devices {index: id} in some milliseconds. None: they report
        nothing."""
        return None

    def computes_bf16(self) -> bool:
        """Whether they multiply matrices in bfloat16 natively. Otherwise it is emulated: on a processor with only AVX2,
        matrix products took ten times as long as in float32."""
        return True

    def fork_environment(self) -> dict[str, str]:
        """Variables that keep libraries from touching devices of this kind while a process that will fork imports them.
        Set on every machine."""
        return {}

    def library_environment(self, caches: Path) -> dict[str, str]:
        """Variables that its own libraries need at import; their caches are below `caches`."""
        return {}

    # -- in processes that compute: with torch -----------------------------------------------------------------

    @abstractmethod
    def available(self) -> bool:
        """Whether this process can compute on one."""

    def use(self, device: Any) -> None:  # noqa: B027 - nothing to do is a kind's usual answer
        """Make it the current device of this thread; a new thread starts on the first one."""

    def synchronize(self, device: Any) -> None:  # noqa: B027
        """Wait for all work submitted to it."""

    def wait_for_copies(self, device: Any) -> None:  # noqa: B027
        """Wait for the work that this thread submitted to it."""

    def copy_stream(self) -> AbstractContextManager[Any]:
        """Give this thread's copies their own stream in this context. In the compute stream a copy would wait for all
        kernels before it and delay all after it."""
        return nullcontext()

    def copy_seconds(self, index: int, nbytes: int, rounds: int) -> float | None:
        """Seconds of the fastest of `rounds` copies of `nbytes` page-locked bytes to the device, by its own clock.
        None: it has no link. Raises RuntimeError without a device or free memory on it."""
        return None
