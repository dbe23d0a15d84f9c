"""How NVIDIA GPUs are set up and connected, as NVML tells it: what the doctor looks at beside their health.

Sources of what is wanted: Azure's node health checks, NVIDIA's DCGM, and NVML's reference. A link to the host is judged
by its width alone: its generation falls while nobody copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pynvml

from runtime.devices.kind import Remark

MOST_REPLACED_ROWS = 512  # of a GPU's memory; Azure hands a node back that has more
MOST_LASTING_ERRORS = 4  # uncorrected ones of on-chip memory in a GPU's life, after which NVIDIA replaces it
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
    """`ask`: what a GPU tells, None if it does not; raises NVMLError. `well`: of that, and of the most that a GPU of
    the machine has. `many`: only where the machine has several."""

    name: str
    ask: Callable[[Any], Any]
    well: Callable[[Any, Any], bool]
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
    most = max((answer for answer in devices_of if answer is not None), default=None)
    for answer, ids in devices_of.items():
        of_all = len(ids) == len(devices)
        if answer is None:
            if of_all:
                yield Remark(check.name, None, "", check.wanted)
            continue
        where = "" if of_all else f" ({', '.join(ids)})"
        well = check.well(answer, most)
        yield Remark(check.name, well, check.words(answer) + where, check.wanted, check.remedy, check.fails)


def _lasting_errors(handle: Any) -> int:
    errors = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    pynvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(errors))
    return int(errors.aggregateUncParity + errors.aggregateUncSecDed)


def _recovery(handle: Any) -> int | None:
    (field,) = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    return int(field.value.uiVal) if field.nvmlReturn == pynvml.NVML_SUCCESS else None


def _lanes(handle: Any) -> tuple[int, int] | None:
    now, most = pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle), pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    return (now, most) if now and most else None  # a virtual machine may hide them


def _links(handle: Any) -> int | None:
    """How many NVLinks are up; None if it has none."""
    up = []
    with suppress(pynvml.NVMLError):  # beyond the last one
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            up.append(pynvml.nvmlDeviceGetNvLinkState(handle, link))
    return sum(map(bool, up)) if up else None


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
        lambda action, _: action == pynvml.NVML_GPU_RECOVERY_ACTION_NONE,
        lambda action: f"needs {_RECOVERIES.get(action, f'action {action}')}",
        "needs nothing",
        f"what it asks for; a reset: {_RESET}",
        fails=True,
    ),
    _Check(
        "persistence mode",
        lambda handle: bool(pynvml.nvmlDeviceGetPersistenceMode(handle)),
        lambda on, _: on,
        lambda on: "on" if on else "off",
        "on",
        "`nvidia-smi -pm 1`, or start nvidia-persistenced: a driver that nobody has open forgets limits and sets up "
        "its devices anew each time",
    ),
    _Check(
        "memory correction",
        lambda handle: tuple(map(bool, pynvml.nvmlDeviceGetEccMode(handle))),
        lambda modes, _: all(modes),
        lambda modes: " now, ".join("on" if on else "off" for on in modes) + " after a restart",
        "on",
        "`nvidia-smi -e 1`, then restart the machine: without it wrong bits are not noticed",
    ),
    _Check(
        "memory rows",
        lambda handle: pynvml.nvmlDeviceGetRemappedRows(handle)[1:3],
        lambda rows, _: rows[0] <= MOST_REPLACED_ROWS and not rows[1],
        lambda rows: f"{rows[0]} replaced" + (", a further one at the next reset" if rows[1] else ""),
        f"at most {MOST_REPLACED_ROWS}, none that waits for a reset",
        f"{_RESET}; with more rows than that have it replaced",
    ),
    _Check(
        "lasting memory errors",
        _lasting_errors,
        lambda count, _: count <= MOST_LASTING_ERRORS,
        lambda count: f"{count} uncorrected ones in its life",
        f"at most {MOST_LASTING_ERRORS}",
        "have it replaced",
    ),
    _Check(
        "link to the host",
        _lanes,
        lambda lanes, _: lanes[0] >= lanes[1],
        lambda lanes: f"{lanes[0]} lanes of {lanes[1]}",
        "all of them",
        "seat it anew, look at its slot and at the BIOS; `nvbandwidth` measures its copies",
    ),
    _Check(
        "links between devices",
        _links,
        lambda links, most: links == most,
        lambda links: f"{links} up",
        "as many as its neighbours'",
        "`nvidia-smi nvlink -s` says which are down; restart nvidia-fabricmanager, then the machine, else its board",
        many=True,
    ),
    _Check(
        "fabric",
        _fabric,
        lambda joined, _: joined,
        lambda joined: "set up" if joined else "not set up",
        "set up",
        "`systemctl restart nvidia-fabricmanager`, in the driver's very version",
        fails=True,
        many=True,
    ),
)
