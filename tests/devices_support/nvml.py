"""Simulates NVIDIA's driver behind pynvml from a description of a machine, with NVML's answers and errors.

The machines below are copied from `nvidia-smi -q`, `nvidia-smi topo -m` and NVML's reference. Functions that are not
simulated raise NVMLError_Uninitialized, as without a driver.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from runtime.devices import nvml

GIB = 2**30


@dataclass
class Gpu:
    """One GPU. `reserved_bytes`: memory kept by driver and firmware. `switched`: joined to the others by an NVSwitch.
    `datacentre`: reports ECC, remapped rows and MIG; a GeForce raises NotSupported. `margin_c`: reports no slowdown
    temperature but its margin to the limit; it slows down 2 °C beyond the limit. `private`: reports memory and
    processes only to root, as with MIG. `handle_error`: raised for its handle; `error`: raised by any query of it."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    memory_bytes: int = 80 * GIB
    reserved_bytes: int = 0
    used_bytes: int = 500 * 2**20
    bus: str = "00000000:17:00.0"
    switched: bool = False
    datacentre: bool = True
    mig: bool = False
    private: bool = False
    capability: tuple[int, int] = (9, 0)
    mode: int = pynvml.NVML_COMPUTEMODE_DEFAULT
    pids: tuple[int, ...] = ()
    temperature_c: int = 41
    margin_c: int | None = None
    ecc: int = 0
    power_mw: int = 310_500
    limit_mw: int = 700_000
    rows: tuple[int, int, int, int] = (0, 1, 0, 0)
    energy_mj: int = 5_000_000
    busy_percent: int = 97
    clock_mhz: int = 1755
    throttles: int = 0
    handle_error: pynvml.NVMLError | None = None
    error: pynvml.NVMLError | None = None


@dataclass
class Machine:
    """A simulated machine. `xids`: pending events (GPU's number, Xid). `users`: NVML sessions started and not ended,
    over all handles on its library; `loaded`: whether pynvml has a handle. `control`: whether the device file exists
    (not on WSL2). `opened`: numbers of GPUs whose handle was requested since; no other process can reset them."""

    gpus: list[Gpu]
    driver: str = "580.95.05"
    init_error: pynvml.NVMLError | None = None
    xids: list[tuple[int, int]] = field(default_factory=list)
    users: int = 0
    loaded: bool = False
    control: bool = True
    opened: set[int] = field(default_factory=set)
    lacks: tuple[str, ...] = ()
    limits_set: int = 0
    set_limit_error: pynvml.NVMLError | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Machine:
        """Replace the real driver by this simulated machine."""

        def lacking(*_: Any) -> Any:
            raise pynvml.NVMLError_FunctionNotFound()

        for name, function in vars(_Functions(self)).items():
            monkeypatch.setattr(pynvml, name, lacking if name in self.lacks else function)
        there = self.gpus and self.control
        monkeypatch.setattr(nvml, "CONTROL", Path("/dev/null" if there else "/dev/no-nvidiactl"))
        return self


def eight_h100() -> Machine:
    buses = (0x19, 0x3B, 0x4C, 0x5D, 0x9B, 0xBB, 0xCB, 0xDB)
    return Machine([Gpu(f"GPU-h100-{n}", bus=f"00000000:{bus:02X}:00.0", switched=True) for n, bus in enumerate(buses)])


def four_4090() -> Machine:
    gpu = Gpu("", "NVIDIA GeForce RTX 4090", 24_564 * 2**20, 347 * 2**20, datacentre=False)
    return Machine([replace(gpu, uuid=f"GPU-4090-{n}", bus=f"00000000:{n + 1:02X}:00.0") for n in range(4)])


class _Functions:
    def __init__(self, machine: Machine):
        def asked(handle: Gpu) -> Gpu:
            if not machine.users:
                raise pynvml.NVMLError_Uninitialized()
            if handle.error is not None:
                raise handle.error
            return handle

        def about(
            answer: Callable[[Gpu], Any],
            refuses: Callable[[Gpu], bool] = lambda gpu: False,
            error: type[pynvml.NVMLError] = pynvml.NVMLError_NotSupported,
        ) -> Callable[..., Any]:
            def ask(handle: Gpu, *_: Any) -> Any:
                if refuses(asked(handle)):
                    raise error()
                return answer(handle)

            return ask

        def of_root(answer: Callable[[Gpu], Any]) -> Callable[..., Any]:
            return about(answer, lambda gpu: gpu.private, pynvml.NVMLError_NoPermission)

        def of_datacentre(answer: Callable[[Gpu], Any]) -> Callable[..., Any]:
            return about(answer, lambda gpu: not gpu.datacentre)

        def of_old(answer: Callable[[Gpu], Any]) -> Callable[..., Any]:
            return about(answer, lambda gpu: gpu.margin_c is not None)

        def of_new(answer: Callable[[Gpu], Any]) -> Callable[..., Any]:
            return about(answer, lambda gpu: gpu.margin_c is None)

        def init() -> None:
            if machine.init_error is not None:
                raise machine.init_error
            machine.users, machine.loaded = machine.users + 1, True

        def shutdown() -> None:
            if not machine.users or not machine.loaded:
                raise pynvml.NVMLError_Uninitialized()
            machine.users -= 1
            if not machine.users:
                machine.opened.clear()

        def handle_by_index(index: int) -> Gpu:
            if not machine.users:
                raise pynvml.NVMLError_Uninitialized()
            gpu = machine.gpus[index]
            if gpu.handle_error is not None:
                raise gpu.handle_error
            machine.opened.add(index)
            return gpu

        def handle_by_uuid(uuid: str) -> Gpu:
            return handle_by_index([gpu.uuid for gpu in machine.gpus].index(uuid))

        def set_limit(gpu: Gpu, milliwatts: int) -> None:
            if machine.set_limit_error is not None:
                raise machine.set_limit_error
            asked(gpu).limit_mw, machine.limits_set = milliwatts, machine.limits_set + 1

        def p2p(one: Gpu, other: Gpu, caps: int) -> int:
            assert caps == pynvml.NVML_P2P_CAPS_INDEX_NVLINK and one is not other
            if asked(one).switched and asked(other).switched:
                return pynvml.NVML_P2P_STATUS_OK
            return pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

        def fields(gpu: Gpu, ids: list[int]) -> list[Any]:
            value = types.SimpleNamespace(siVal=of_new(lambda _: -2)(gpu))
            return [types.SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=value)]

        def wait(events: Any, timeout_ms: int) -> Any:
            if not machine.xids:
                raise pynvml.NVMLError_Timeout()
            index, xid = machine.xids.pop(0)
            return types.SimpleNamespace(device=machine.gpus[index], eventData=xid)

        self.nvmlInit, self.nvmlShutdown = init, shutdown
        self.nvmlSystemGetDriverVersion = lambda: machine.driver
        self.nvmlDeviceGetCount = lambda: len(machine.gpus)
        self.nvmlDeviceGetHandleByIndex = handle_by_index
        self.nvmlDeviceGetIndex = about(lambda gpu: machine.gpus.index(gpu))
        self.nvmlDeviceGetName = about(lambda gpu: gpu.name)
        self.nvmlDeviceGetUUID = about(lambda gpu: gpu.uuid)
        self.nvmlDeviceGetCudaComputeCapability = about(lambda gpu: gpu.capability)
        self.nvmlDeviceGetMemoryInfo = of_root(
            lambda gpu: types.SimpleNamespace(
                total=gpu.memory_bytes, reserved=gpu.reserved_bytes, used=gpu.used_bytes + gpu.reserved_bytes
            )
        )
        self.nvmlDeviceGetPciInfo = about(lambda gpu: types.SimpleNamespace(busId=gpu.bus))
        self.nvmlDeviceGetP2PStatus = p2p
        self.nvmlDeviceGetMigMode = of_datacentre(lambda gpu: [int(gpu.mig), int(gpu.mig)])
        self.nvmlDeviceGetComputeMode = about(lambda gpu: gpu.mode)
        self.nvmlDeviceGetComputeRunningProcesses = of_root(
            lambda gpu: [types.SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in gpu.pids]
        )
        self.nvmlDeviceGetTemperature = about(lambda gpu: gpu.temperature_c)
        self.nvmlDeviceGetTemperatureV = about(lambda gpu: gpu.temperature_c)
        self.nvmlDeviceGetTemperatureThreshold = of_old(lambda gpu: 87)
        self.nvmlDeviceGetMarginTemperature = of_new(lambda gpu: gpu.margin_c)
        self.nvmlDeviceGetFieldValues = fields
        self.nvmlDeviceGetTotalEccErrors = of_datacentre(lambda gpu: gpu.ecc)
        self.nvmlDeviceGetRemappedRows = of_datacentre(lambda gpu: gpu.rows)
        self.nvmlDeviceGetPowerUsage = about(lambda gpu: gpu.power_mw)
        self.nvmlDeviceGetEnforcedPowerLimit = about(lambda gpu: gpu.limit_mw)
        self.nvmlDeviceGetPowerManagementLimit = of_datacentre(lambda gpu: gpu.limit_mw)
        self.nvmlDeviceGetPowerManagementDefaultLimit = of_datacentre(lambda gpu: 700_000)
        self.nvmlDeviceSetPowerManagementLimit = set_limit
        self.nvmlDeviceGetHandleByUUID = handle_by_uuid
        self.nvmlDeviceGetTotalEnergyConsumption = of_datacentre(lambda gpu: gpu.energy_mj)
        self.nvmlDeviceGetUtilizationRates = about(lambda gpu: types.SimpleNamespace(gpu=gpu.busy_percent, memory=20))
        self.nvmlDeviceGetClockInfo = about(lambda gpu: gpu.clock_mhz)
        self.nvmlDeviceGetCurrentClocksEventReasons = about(lambda gpu: gpu.throttles)
        self.nvmlEventSetCreate = lambda: object()
        self.nvmlEventSetFree = lambda events: None
        self.nvmlDeviceRegisterEvents = of_datacentre(lambda gpu: None)
        self.nvmlEventSetWait_v2 = wait
