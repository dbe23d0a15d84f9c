"""What NVIDIA's driver tells of the health of this node's GPUs, through NVML; nothing where there is none."""

from __future__ import annotations

import time

import pynvml

from scheduler.core.inventory import Device
from scheduler.devices.health import Reading

_WATCHED = pynvml.nvmlEventTypeXidCriticalError


class DeviceReadings:
    """Reads on demand. Xids are collected by the driver from the first `read` on."""

    def __init__(self, devices: tuple[Device, ...]):
        self._devices = {device.index: device.id for device in devices if device.kind == "cuda"}
        self._events = None

    def read(self) -> tuple[Reading, ...]:
        """One reading per GPU; milliseconds, to be called off the event loop."""
        if not self._devices:
            return ()
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
            except pynvml.NVMLError:  # the timeout, as a rule: there is no other event
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
        """None where this kind of GPU does not tell."""
        try:
            return question()
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission, pynvml.NVMLError_InvalidArgument):
            return None


def _handle(index: int):
    return pynvml.nvmlDeviceGetHandleByIndex(index)
