"""Finds and watches NVIDIA GPUs through NVML, and computes on them through torch's CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pynvml

from runtime.devices.kind import DeviceKind, Found, Reading

_WATCHED = pynvml.nvmlEventTypeXidCriticalError
_CONTROL = Path("/dev/nvidiactl")


class Cuda(DeviceKind):
    name = "cuda"
    collectives = "nccl"

    def present(self) -> bool:
        return _CONTROL.exists()

    def probe(self) -> tuple[Found, ...]:
        """Reads NUMA node and NVLink peers if the driver reports them (NVML API reference, nvmlDeviceGetP2PStatus)."""
        try:
            pynvml.nvmlInit()
        except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded, pynvml.NVMLError_NoPermission):
            return ()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            return tuple(_found(index, handles) for index in range(len(handles)))
        finally:
            pynvml.nvmlShutdown()

    def visibility(self, devices: Iterable[int | str]) -> dict[str, str]:
        # NVML's numbers, not CUDA's default order, which puts the fastest first.
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def watch(self, devices: Mapping[int, str]) -> Callable[[], tuple[Reading, ...]]:
        return _Watch(devices).read

    def fork_environment(self) -> dict[str, str]:
        # Makes torch.cuda.is_available() query NVML instead of CUDA, which no forked process could use afterwards
        # ("Cannot re-initialize CUDA in forked subprocess").
        return {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

    def library_environment(self, caches: Path) -> dict[str, str]:
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_CACHE_PATH": str(caches / "cuda")}

    def available(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def use(self, device: Any) -> None:
        import torch

        torch.cuda.set_device(device)

    def synchronize(self, device: Any) -> None:
        import torch

        torch.cuda.synchronize(device)

    def wait_for_copies(self, device: Any) -> None:
        import torch

        torch.cuda.current_stream(device).synchronize()

    def copy_stream(self) -> AbstractContextManager[Any]:
        import torch

        if not torch.cuda.is_initialized():
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


KIND = Cuda()


def _found(index: int, handles: list) -> Found:
    handle = handles[index]
    return Found(
        index=index,
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        numa_node=_numa_node(_bus_id(pynvml.nvmlDeviceGetPciInfo(handle))),
        linked=frozenset(other for other in range(len(handles)) if other != index and _linked(handle, handles[other])),
    )


def _bus_id(pci) -> str:
    raw = pci.busId if isinstance(pci.busId, str) else pci.busId.decode()
    return raw.lower()[-12:]  # NVML writes the domain with 8 digits, sysfs with 4


def _numa_node(bus: str) -> int | None:
    try:
        number = int(Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return number if number >= 0 else None


def _linked(handle, other) -> bool:
    """Whether NVLink joins two GPUs, directly or through an NVSwitch. (With a switch, the remote address of a link
    names the switch and no GPU.)"""
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(handle, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except pynvml.NVMLError:
        return False
    return status == pynvml.NVML_P2P_STATUS_OK


class _Watch:
    """Reads on demand. The driver collects Xids from the first `read` on."""

    def __init__(self, devices: Mapping[int, str]):
        self._devices = dict(devices)
        self._events = None

    def read(self) -> tuple[Reading, ...]:
        """One reading per GPU."""
        if self._events is None:
            pynvml.nvmlInit()
            self._events = pynvml.nvmlEventSetCreate()
            for index in self._devices:
                self._ask(lambda index=index: pynvml.nvmlDeviceRegisterEvents(_handle(index), _WATCHED, self._events))
        xids = self._new_xids()
        return tuple(self._reading(index, xids.get(index, ())) for index in self._devices)

    def _new_xids(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        while True:
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError:  # usually the timeout: there is no other event
                return found
            index = pynvml.nvmlDeviceGetIndex(event.device)
            found[index] = (*found.get(index, ()), int(event.eventData))

    def _reading(self, index: int, xids: tuple[int, ...]) -> Reading:
        device_id, now_s = self._devices[index], time.time()
        try:
            handle = _handle(index)
            temperature_c = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_NotFound, pynvml.NVMLError_Unknown) as error:
            return Reading(device_id, now_s, xids, lost=str(error))
        return Reading(
            device_id,
            now_s,
            xids,
            ecc_uncorrected=self._ask(
                lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                    handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
                )
            ),
            remap_failed=bool((self._ask(lambda: pynvml.nvmlDeviceGetRemappedRows(handle)) or (0, 0, 0, 0))[3]),
            temperature_c=temperature_c,
            slowdown_c=self._ask(
                lambda: pynvml.nvmlDeviceGetTemperatureThreshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
            ),
        )

    @staticmethod
    def _ask(question):
        """None if this kind of GPU does not report it."""
        try:
            return question()
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission, pynvml.NVMLError_InvalidArgument):
            return None


def _handle(index: int):
    return pynvml.nvmlDeviceGetHandleByIndex(index)
