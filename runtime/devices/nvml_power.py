"""Sets power limits of NVIDIA GPUs through NVML, which lets root alone do it.

NVML is opened for each call and closed after it: the driver resets no GPU that somebody has open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pynvml

from runtime.devices.kind import PowerControl, PowerLimits, PowerRefused


class NvmlPower(PowerControl):
    """Controls the power of all GPUs of this machine, by UUID."""

    def limits(self) -> dict[str, PowerLimits]:
        with _nvml():
            found = {}
            for index in range(pynvml.nvmlDeviceGetCount()):
                try:
                    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                    uuid = pynvml.nvmlDeviceGetUUID(handle)
                    default = pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)
                    limit = pynvml.nvmlDeviceGetPowerManagementLimit(handle)
                except pynvml.NVMLError:  # lost, or of a kind whose limit cannot be set: it is left out
                    continue
                name = uuid if isinstance(uuid, str) else uuid.decode()
                found[name] = PowerLimits(limit / 1000, default / 1000)
            return found

    def set_limit(self, uuid: str, limit_w: float) -> None:
        with _nvml():
            pynvml.nvmlDeviceSetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByUUID(uuid), round(limit_w * 1000))


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
