"""What the box has to know of a kind of device. A new kind is a subclass in a file of its own and a row in `kinds`.

The first half costs no torch and is asked everywhere: by the controller, by planning, by supervisors. The second half
is for processes that compute; its methods import torch themselves.
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
    """One device of this machine. `index` is its number in what `visibility` writes. `numa_node`: None where unknown.
    `linked`: indexes of devices that a direct link joins it to."""

    index: int
    name: str
    memory_bytes: int
    numa_node: int | None = None
    linked: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Reading:
    """What a device told of its health at `at_s` (Unix time). None: it does not tell. `xids`: errors by NVIDIA's
    numbers, new since the reading before. `lost`: why it does not answer any more."""

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
    nothing, a process keeps nothing of a device that it has left, and a death says nothing of a piece of hardware.
    `collectives`: torch.distributed's backend between its ranks. `locks_pages`: copies to it run at full rate only
    from page-locked memory of the host.
    """

    name: str
    on_host: bool = False
    collectives: str
    locks_pages: bool = True

    @abstractmethod
    def present(self) -> bool:
        """Whether this machine has such devices, asked without touching them: a process that forks has to ask so."""

    @abstractmethod
    def probe(self) -> tuple[Found, ...]:
        """Every such device of this machine, by index; none where there is no driver."""

    @abstractmethod
    def visibility(self, devices: Iterable[int | str]) -> dict[str, str]:
        """The environment of a process that is to see these devices alone, numbered from 0 in this order. Of use only
        before the process first touches a device."""

    def address(self, index: int) -> str:
        """What the supervisor of a rank is told of its device; ranks on different devices that one process could take
        the place of have the same."""
        return str(index)

    def watch(self, devices: Mapping[int, str]) -> Callable[[], tuple[Reading, ...]] | None:
        """Health of the devices {index: id}: a function that reads them, some milliseconds a call. None: they tell
        nothing."""
        return None

    def computes_bf16(self) -> bool:
        """Whether they multiply matrices in bfloat16 natively. Elsewhere it is emulated: on a processor with AVX2
        alone, matrix products took ten times as long as in float32."""
        return True

    def fork_environment(self) -> dict[str, str]:
        """What keeps libraries from touching devices of this kind while a process that will fork imports them. It is
        set on every machine."""
        return {}

    def library_environment(self, caches: Path) -> dict[str, str]:
        """What its own libraries have to find when they are imported; their caches lie below `caches`."""
        return {}

    # -- in processes that compute: with torch -----------------------------------------------------------------

    @abstractmethod
    def available(self) -> bool:
        """Whether this process can compute on one."""

    def use(self, device: Any) -> None:  # noqa: B027 - nothing to do is a kind's usual answer
        """Make it the current device of this thread, which begins on the first one."""

    def synchronize(self, device: Any) -> None:  # noqa: B027
        """Wait for all that was asked of it."""

    def wait_for_copies(self, device: Any) -> None:  # noqa: B027
        """Wait for what this thread asked of it."""

    def copy_stream(self) -> AbstractContextManager[Any]:
        """A copy takes its turn in its stream. In the one that the process computes in, each would wait for all the
        kernels before it and hold up all after it; within this context the thread's copies have their own."""
        return nullcontext()

    def copy_seconds(self, index: int, nbytes: int, rounds: int) -> float | None:
        """The fastest of `rounds` copies of `nbytes` page-locked bytes to the device, by its own clock. None: there is
        no link to it. Raises RuntimeError without a device or without room on it."""
        return None
