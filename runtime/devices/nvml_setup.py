"""How NVIDIA GPUs are set up and connected, as NVML tells it: what the doctor looks at beside their health.

What NVML itself judges or the box rests on; `dcgmi health` and `dcgmi diag` look at memory and links.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pynvml

from runtime.devices.kind import Remark

_RESET = "`appliance gpu drain`, `nvidia-smi --gpu-reset`, `appliance gpu undrain`, each with the device"
_RECOVERIES = {
    pynvml.NVML_GPU_RECOVERY_ACTION_NONE: "nothing",
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "a reset",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "a restart of the machine",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "that its neighbours are drained",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "to be drained and reset",
    pynvml.NVML_GPU_RECOVERY_ACTION_BUS_RESET: "a reset of its bus",
    pynvml.NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT: "that the machine is switched off and on",
}


@dataclass(frozen=True, slots=True)
class _Check:
    """`ask`: what a GPU tells, None if it does not; raises NVMLError. `many`: only where the machine has several."""

    name: str
    ask: Callable[[Any], Any]
    well: Callable[[Any], bool]
    words: Callable[[Any], str]
    wanted: str
    remedy: str
    fails: bool = False
    many: bool = False


def remarks(devices: Mapping[int, str]) -> tuple[Remark, ...]:
    """One remark for each check and each answer to it. devices: the GPUs {index: id}."""
    pynvml.nvmlInit()
    try:
        return tuple(
            remark for check in _CHECKS if len(devices) > 1 or not check.many for remark in _of(check, devices)
        )
    finally:
        pynvml.nvmlShutdown()


def _of(check: _Check, devices: Mapping[int, str]) -> Iterator[Remark]:
    devices_of: dict[Any, list[str]] = {}
    for index, device_id in devices.items():
        answer = None
        with suppress(pynvml.NVMLError):  # not told by this GPU, or it is lost, which its reading says
            answer = check.ask(pynvml.nvmlDeviceGetHandleByIndex(index))
        devices_of.setdefault(answer, []).append(device_id)
    for answer, ids in devices_of.items():
        of_all = len(ids) == len(devices)
        if answer is None:
            if of_all:
                yield Remark(check.name, None, "", check.wanted)
            continue
        where = "" if of_all else f" ({', '.join(ids)})"
        well = check.well(answer)
        yield Remark(check.name, well, check.words(answer) + where, check.wanted, check.remedy, check.fails)


def _recovery(handle: Any) -> int | None:
    (field,) = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    return int(field.value.uiVal) if field.nvmlReturn == pynvml.NVML_SUCCESS else None


def _fabric(handle: Any) -> bool | None:
    """Whether the fabric of NVSwitches has taken it in; None if it is on none."""
    fabric = pynvml.c_nvmlGpuFabricInfoV_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(fabric))
    if fabric.state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return None
    return bool(fabric.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and fabric.status == pynvml.NVML_SUCCESS)


_CHECKS = (
    _Check(
        "driver's advice",
        _recovery,
        lambda action: action == pynvml.NVML_GPU_RECOVERY_ACTION_NONE,
        lambda action: f"needs {_RECOVERIES.get(action, f'action {action}')}",
        "needs nothing",
        f"what it asks for; a reset: {_RESET}",
        fails=True,
    ),
    _Check(
        "persistence mode",
        lambda handle: bool(pynvml.nvmlDeviceGetPersistenceMode(handle)),
        lambda on: on,
        lambda on: "on" if on else "off",
        "on",
        "`nvidia-smi -pm 1`, or start nvidia-persistenced: a driver that nobody has open forgets limits and sets up "
        "its devices anew each time",
    ),
    _Check(
        "fabric",
        _fabric,
        lambda joined: joined,
        lambda joined: "set up" if joined else "not set up",
        "set up",
        "`systemctl restart nvidia-fabricmanager`, in the driver's very version",
        fails=True,
        many=True,
    ),
)
