"""Sets power limits and clock limits of NVIDIA GPUs through NVML, which lets root alone do it.

NVML is opened for each call and closed after it: the driver resets no GPU that somebody has open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pynvml

from runtime.devices.kind import PowerControl, PowerLimits, PowerRefused

LEAST_CLOCK_MHZ = 0  # the lower end of a locked range; the driver raises it to the least that it supports


class NvmlPower(PowerControl):
    """Controls the power of all GPUs of this machine, by UUID."""

    def code(self) -> list[str]:
        return [__file__, pynvml.__file__]

    def limits(self) -> dict[str, PowerLimits]:
        with _nvml():
            found = {}
            for index in range(pynvml.nvmlDeviceGetCount()):
                try:
                    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                    uuid = pynvml.nvmlDeviceGetUUID(handle)
                    least, most = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
                    limit = pynvml.nvmlDeviceGetPowerManagementLimit(handle)
                except pynvml.NVMLError:  # lost, or of a kind whose limit cannot be set: it has no profile
                    continue
                name = uuid if isinstance(uuid, str) else uuid.decode()
                found[name] = PowerLimits(limit / 1000, least / 1000, most / 1000)
            return found

    def set_limit(self, uuid: str, limit_w: float) -> None:
        with _nvml():
            pynvml.nvmlDeviceSetPowerManagementLimit(_handle(uuid), round(limit_w * 1000))

    def set_clock(self, uuid: str, most_mhz: int | None) -> None:
        with _nvml():
            if most_mhz is None:
                pynvml.nvmlDeviceResetGpuLockedClocks(_handle(uuid))
            else:
                pynvml.nvmlDeviceSetGpuLockedClocks(_handle(uuid), LEAST_CLOCK_MHZ, most_mhz)


@contextmanager
def _nvml() -> Iterator[None]:
    """Raises PowerRefused for what NVML refuses."""
    try:
        pynvml.nvmlInit()
        try:
            yield
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise PowerRefused(f"the driver says: {error}") from error


def _handle(uuid: str) -> Any:
    return pynvml.nvmlDeviceGetHandleByUUID(uuid)
