"""Finds and watches NVIDIA GPUs, and sets their power limits, through NVML.

An Xid is the driver's number for an error of a GPU. The tables below follow NVIDIA's catalogue of Xid errors
(docs.nvidia.com/deploy/xid-errors), its column "immediate action", as of October 2025.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml

from runtime.devices.kind import DevicesRefused, Found, Reading

LEAST_DRIVER = 580  # CUDA 13, which the lock's torch and vLLM are built for, needs it; images/install.sh checks it too
LEAST_CAPABILITY = (8, 0)  # bfloat16 and FlashAttention in engines and ranks need it (vllm/platforms/cuda.py)
NO_ANSWER = "does not answer"
_WATCHED = pynvml.nvmlEventTypeXidCriticalError
CONTROL = Path("/dev/nvidiactl")
NO_DRIVER = (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded, pynvml.NVMLError_NoPermission)
_NOT_REPORTED = (
    pynvml.NVMLError_NotSupported,
    pynvml.NVMLError_NoPermission,
    pynvml.NVMLError_InvalidArgument,
    pynvml.NVMLError_FunctionNotFound,  # absent from this driver's version
)
_THROTTLES = (
    (pynvml.nvmlClocksThrottleReasonSwThermalSlowdown | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown, "heat"),
    (pynvml.nvmlClocksThrottleReasonHwSlowdown, "hardware"),
    (pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, "power_brake"),
    (pynvml.nvmlClocksThrottleReasonSwPowerCap, "power_cap"),
)
_EXCLUSIVE = {
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive process",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
}
# Catalogue: "restart the application". A program caused the error, or, as with a contained memory error (94), only one
# program suffers. Its rank or engine ends, and that death is counted (scheduler.devices.health).
_OF_THE_APPLICATION = frozenset(
    {8, 11, 13, 25, 31, 32, *range(39, 42), 60, *range(68, 73), *range(75, 78), 80, *range(82, 87), 88, 89, 94}
    | {*range(96, 106), *range(126, 136), 139}
)
# Catalogue: "ignore" or "observe", such as a replaced memory row (63). 45 is the end of a channel after another Xid,
# which is reported too; 154 only changes the advice of another Xid.
_TO_OBSERVE = frozenset({14, 37, 38, 43, 44, 45, 63, 66, 67, 93, 106, 107, 121, 137, 141, 152, 153, 154, 157, 160, 161})
_CORRECTED_ERRORS = 92  # "observe" there: a high error rate; a box has no observer, so treat it as a fault
_RESET = frozenset({46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
_ON_CPU = (
    "To run on logical CPU devices meanwhile, install the CPU build (APPLIANCE_BUILD=cpu) and set [box] devices to a "
    "number, such as 8."
)


@contextmanager
def session() -> Iterator[None]:
    """Keep NVML open in the context; the driver cannot reset an open GPU. Raises NVMLError."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def probe() -> tuple[Found, ...]:
    """See DeviceKind.probe. Reads NUMA node and NVLink peers if the driver reports them (NVML API reference,
    nvmlDeviceGetP2PStatus). Leaves out GPUs too old for engines and ranks, such as a small one for a screen."""
    try:
        with session():
            version = pynvml.nvmlSystemGetDriverVersion()
            if int(version.partition(".")[0]) < LEAST_DRIVER:
                raise DevicesRefused(
                    f"NVIDIA driver {version} is too old: the CUDA 13 libraries of this build need {LEAST_DRIVER} or "
                    f"newer. Update it (Debian, Ubuntu: `apt-get install nvidia-driver-{LEAST_DRIVER}`). {_ON_CPU}"
                )
            handles = dict(enumerate(_handles()))
            old = {index: words for index, handle in handles.items() if (words := _too_old(handle))}
            peers = {index: handle for index, handle in handles.items() if index not in old}
            gpus = [_found(index, peers) for index in peers]
    except NO_DRIVER:
        return ()
    except pynvml.NVMLError_LibRmVersionMismatch as error:
        raise DevicesRefused(
            "the kernel's NVIDIA driver and its library libnvidia-ml have different versions, as after an "
            f"update without a reboot: reboot, or reload the kernel module (`rmmod nvidia_uvm nvidia && modprobe "
            f"nvidia`). {_ON_CPU}"
        ) from error
    except pynvml.NVMLError as error:
        raise DevicesRefused(
            f"NVML, the NVIDIA driver's library, does not start ({error}); run `nvidia-smi` for details. {_ON_CPU}"
        ) from error
    if old and not gpus:
        raise DevicesRefused(f"the NVIDIA GPUs of this machine are too old: {next(iter(old.values()))}. {_ON_CPU}")
    if gpus and not CONTROL.exists():  # every computing process detects GPUs by this file, before it imports anything
        raise DevicesRefused(
            f"NVML names {len(gpus)} NVIDIA GPUs ({gpus[0].name}), but {CONTROL} does not exist, as "
            f"under WSL2, on which the box does not run. {_ON_CPU}"
        )
    # A GPU of unknown memory counts as equal to the others: plans assume equal devices.
    alike_bytes = min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes), default=0)
    if gpus and not alike_bytes:
        raise DevicesRefused(
            f"the driver names {len(gpus)} NVIDIA GPUs and none of them can be used (the first {gpus[0].unfit}); run "
            f"`nvidia-smi` and `dmesg | grep -i xid` for details. {_ON_CPU}"
        )
    return tuple(gpu if gpu.memory_bytes else replace(gpu, memory_bytes=alike_bytes) for gpu in gpus)


def foreign() -> dict[int, str]:
    """See DeviceKind.foreign."""
    processes: dict[int, str] = {}
    with suppress(pynvml.NVMLError), session():
        for index, handle in enumerate(_handles()):
            if words := _processes(handle):
                processes[index] = words
    return processes


def close() -> None:
    """Close every GPU that this process opened through NVML, whichever library opened it. DeepSpeed's accelerator keeps
    NVML open after its import, as do Triton's import and every torch.cuda.is_available() that queries NVML. Forks would
    inherit the open device files, and the driver cannot reset an open device."""
    try:
        pynvml.nvmlInit()  # otherwise pynvml reports that nothing is open
    except pynvml.NVMLError:
        return
    while True:
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:  # NVML counts its openers; all are closed now
            return


def _handles() -> Iterator[Any]:
    """The handle of each GPU, or the NVMLError if it does not answer."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            yield pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            yield error


def _answering(handle: Any) -> Any:
    """Return the handle. Raises the NVMLError if the GPU did not answer."""
    if isinstance(handle, pynvml.NVMLError):
        raise handle
    return handle


def _too_old(handle: Any) -> str:
    """Why this GPU is too old for engines and ranks; "" if it is not, or if it does not answer."""
    try:
        capability = pynvml.nvmlDeviceGetCudaComputeCapability(_answering(handle))
        name = pynvml.nvmlDeviceGetName(handle)
    except pynvml.NVMLError:
        return ""
    if capability >= LEAST_CAPABILITY:
        return ""
    return (
        f"{name} is of compute capability {'.'.join(map(str, capability))}, and the box needs "
        "at least 8.0 (Ampere) for bfloat16 and FlashAttention"
    )


def _found(index: int, handles: Mapping[int, Any]) -> Found:
    try:
        handle = _answering(handles[index])
        reason = unfit(handle)
        # With MIG the driver reports a GPU's memory only to root (NVML API, nvmlDeviceGetMemoryInfo).
        memory_bytes = _ask(lambda: _usable_bytes(handle)) if reason else _usable_bytes(handle)
        return Found(
            index=index,
            name=pynvml.nvmlDeviceGetName(handle),
            memory_bytes=memory_bytes or 0,
            numa_node=numa_node(handle),
            linked=frozenset(n for n, other in handles.items() if n != index and _linked(handle, other)),
            uuid=_ask(lambda: pynvml.nvmlDeviceGetUUID(handle)) or "",
            unfit=reason,
        )
    except pynvml.NVMLError as error:
        return Found(index, "NVIDIA GPU", 0, unfit=f"{NO_ANSWER} ({error})")


def _usable_bytes(handle: Any) -> int:
    """Memory that CUDA can allocate. Driver and firmware keep some hundreds of MB of the total that NVML and nvidia-smi
    report (NVML API, nvmlMemory_v2_t)."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    except pynvml.NVMLError_NotSupported:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return int(memory.total) - int(memory.reserved)


def unfit(handle: Any) -> str:
    """Why a GPU that answers must not be used; "" if it may be."""
    mig = _ask(lambda: pynvml.nvmlDeviceGetMigMode(handle))
    if mig and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
        return "is partitioned by MIG, which the box does not support; `nvidia-smi -i N -mig 0` disables MIG"
    mode = _ask(lambda: pynvml.nvmlDeviceGetComputeMode(handle))
    if mode in _EXCLUSIVE:
        return (
            f"is in compute mode {_EXCLUSIVE[mode]}, in which two engines cannot share a GPU; "
            "`nvidia-smi -i N -c DEFAULT` resets it"
        )
    return ""


def _processes(handle: Any) -> str:
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(_answering(handle))
        used_bytes = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    except pynvml.NVMLError:
        return ""
    if not processes:
        return ""
    shown = ", ".join(str(process.pid) for process in processes[:4]) + (", …" if len(processes) > 4 else "")
    return (
        f"is used by {len(processes)} other process{'es' * (len(processes) > 1)} (pid {shown}), {used_bytes / 1e9:.1f} "
        "GB of its memory are used: engines and ranks there will lack planned memory"
    )


def numa_node(handle: Any) -> int | None:
    bus = pynvml.nvmlDeviceGetPciInfo(handle).busId.lower()[-12:]  # NVML's PCI domain has 8 digits, sysfs's 4
    try:
        number = int(Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return number if number >= 0 else None


def _linked(handle: Any, other: Any) -> bool:
    """Whether NVLink joins two GPUs, directly or through an NVSwitch. (With a switch, the remote address of a link
    names the switch, not a GPU.)"""
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(handle, _answering(other), pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except pynvml.NVMLError:
        return False
    return status == pynvml.NVML_P2P_STATUS_OK


def _ask(question: Callable[[], Any], errors: tuple[type[Exception], ...] = _NOT_REPORTED) -> Any:
    """Return the answer to an NVML query; None if this kind of GPU does not support the query."""
    try:
        return question()
    except errors:
        return None


def fault_of(xid: int) -> str:
    """The GPU fault that this Xid reports and the remedy, in words that complete "the GPU ..."; "" if none."""
    if xid in _OF_THE_APPLICATION or xid in _TO_OBSERVE:
        return ""
    if xid == _CORRECTED_ERRORS:
        return f"reported Xid {xid}: its memory corrects many errors; test it (`dcgmi diag -r 3`), then put it back"
    if xid in _RESET:
        return f"reported Xid {xid} and needs a reset (`nvidia-smi --gpu-reset`)"
    if xid == 79:
        return f"reported Xid {xid}: it fell off the bus; restart the machine"
    return f"reported Xid {xid}; NVIDIA's catalogue of Xid errors says what to do"


class Watch:
    """Reads the GPUs on demand. From the first `read` on, the driver collects Xids of each GPU that answered it.

    A GPU whose handle was requested stays open until NVML is closed, and the driver resets no GPU that a process has
    open, not even for monitoring (nvidia-smi, --gpu-reset). Releasing a GPU therefore closes NVML and opens it again.
    """

    def __init__(self, devices: Mapping[int, str]):
        self._devices = dict(devices)
        self._watched: tuple[int, ...] = ()  # indices of the GPUs whose Xids the driver collects in `_events`
        self._events: Any = None

    def read(self, released: Collection[str]) -> tuple[Reading, ...]:
        """One reading of each GPU. `released`: ids of GPUs to release and skip."""
        kept = tuple(index for index, device_id in self._devices.items() if device_id not in released)
        faults = {} if self._events is None else self._new_faults()
        if self._events is None or kept != self._watched:
            self._open(kept)
        return tuple(self._reading(index, faults.get(index, ())) for index in kept)

    def _open(self, indices: tuple[int, ...]) -> None:
        if self._events is not None:
            events, self._events = self._events, None
            pynvml.nvmlEventSetFree(events)
            close()
        pynvml.nvmlInit()
        events = pynvml.nvmlEventSetCreate()
        for index in indices:
            with suppress(pynvml.NVMLError):  # this GPU reports no Xids, or is lost, as its reading will show
                pynvml.nvmlDeviceRegisterEvents(pynvml.nvmlDeviceGetHandleByIndex(index), _WATCHED, events)
        self._watched, self._events = indices, events

    def _new_faults(self) -> dict[int, tuple[str, ...]]:
        faults: dict[int, tuple[str, ...]] = {}
        while True:
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError:  # usually the timeout: no event is left
                return faults
            try:
                index = pynvml.nvmlDeviceGetIndex(event.device)
            except pynvml.NVMLError:  # the GPU fell off the bus with this Xid: its reading reports the loss
                continue
            if fault := fault_of(int(event.eventData)):
                faults[index] = (*faults.get(index, ()), fault)

    def _reading(self, index: int, faults: tuple[str, ...]) -> Reading:
        device_id, now_s = self._devices[index], time.time()
        try:
            fields = _answered(pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError as error:
            fields = {"lost": str(error)}
        faults += fields.pop("faults", ())
        return Reading(device_id, now_s, faults, **fields)


def _answered(handle: Any) -> dict[str, Any]:
    """The fields of a Reading. Raises NVMLError if the GPU is lost."""
    remap_failed = (_ask(lambda: pynvml.nvmlDeviceGetRemappedRows(handle)) or (0, 0, 0, 0))[3]
    kind, since = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    heat = _ask(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
    if heat is None:  # drivers of CUDA 14 only support this newer call (nvidia-ml-py)
        heat = _ask(lambda: pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU))
    return {
        "faults": ("could not remap a row of its memory",) if remap_failed else (),
        "ecc_uncorrected": _ask(lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, since)),
        "temperature_c": heat,
        "slowdown_c": _slowdown(handle, heat),
        "unfit": unfit(handle),
        "uuid": _ask(lambda: pynvml.nvmlDeviceGetUUID(handle)) or "",
        **_meters(handle),
    }


def _slowdown(handle: Any, heat: int | None) -> int | None:
    """The temperature in °C at which the GPU slows down. From Ada and Hopper on, a GPU may only report its margin to
    the limit, and how far beyond the limit it slows down (NVML API, nvmlDeviceGetTemperatureThreshold)."""
    threshold: int | None = _ask(
        lambda: pynvml.nvmlDeviceGetTemperatureThreshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    )
    if threshold or heat is None:
        return threshold
    margin = _ask(lambda: pynvml.nvmlDeviceGetMarginTemperature(handle))
    fields = _ask(lambda: pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT]))
    if margin is None or not fields or fields[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return heat + margin - int(fields[0].value.siVal)


def _meters(handle: Any) -> dict[str, Any]:
    """Meters of the GPU, in base units. A meter that fails is None and does not make a GPU count as lost."""

    def ask(question: Callable[..., Any], *more: Any) -> Any:
        return _ask(lambda: question(handle, *more), (pynvml.NVMLError,))

    def scaled(value: Any, by: float) -> float | None:
        return None if value is None else value * by

    busy, memory = ask(pynvml.nvmlDeviceGetUtilizationRates), ask(pynvml.nvmlDeviceGetMemoryInfo)
    reasons = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
    return {
        "power_w": scaled(ask(pynvml.nvmlDeviceGetPowerUsage), 1e-3),
        "power_limit_w": scaled(ask(pynvml.nvmlDeviceGetEnforcedPowerLimit), 1e-3),
        "energy_j": scaled(ask(pynvml.nvmlDeviceGetTotalEnergyConsumption), 1e-3),
        "busy": None if busy is None else busy.gpu * 1e-2,
        "memory_used_bytes": None if memory is None else int(memory.used),
        "clock_hz": scaled(ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM), 1e6),
        "throttled": tuple(word for bits, word in _THROTTLES if reasons & bits),
    }


def set_power_limits(uuids: Collection[str], limit_w: float | None) -> dict[str, str]:
    """See DeviceKind.set_power_limits. NVML is open only during the call."""
    refused = {}
    try:
        with session():
            for uuid in uuids:
                try:
                    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                    default_mw = pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)
                    now_mw = pynvml.nvmlDeviceGetPowerManagementLimit(handle)
                except pynvml.NVMLError:  # lost, or its limit cannot be set: skip it
                    continue
                wanted_mw = default_mw if limit_w is None else round(limit_w * 1000)
                try:
                    if wanted_mw != now_mw:
                        pynvml.nvmlDeviceSetPowerManagementLimit(handle, wanted_mw)
                except pynvml.NVMLError as error:
                    refused[uuid] = f"the driver says: {error}"
    except pynvml.NVMLError as error:
        return dict.fromkeys(uuids, f"the driver says: {error}")
    return refused
