"""Setup by each kind of device for the processes that compute on it."""

import os
import sys

import pytest

from runtime.devices.kinds import ACCELERATORS, FORK_ENVIRONMENT, accelerator, before_fork, kind_of
from tests.devices_support.nvml import eight_h100


def test_visibility_numbers_devices_like_the_driver():
    shown = {"CUDA_VISIBLE_DEVICES": "5,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_SOCKET_IFNAME": "lo"}
    assert kind_of("cuda").visibility([5, 2]) == shown and kind_of("cpu").visibility([5]) == {}


@pytest.mark.parametrize("loaded", [True, False], ids=["pynvml too", "other handles alone"])
def test_before_fork_closes_nvml_opened_by_any_library(monkeypatch, loaded):
    """Triton's import calls torch.cuda.is_available(), which opens NVML for good and so blocks a GPU reset."""
    machine = eight_h100()
    machine.users, machine.loaded = 3, loaded
    machine.install(monkeypatch)
    before_fork()
    assert machine.users == 0
    kind_of("cuda").after_fork()
    assert machine.users == 1, "a rank asks NVML for free memory"


def test_worker_compiles_kernels_on_all_cpus(monkeypatch):
    """The setting against compilers in a forking parent must not slow compilation in a worker."""
    monkeypatch.setattr(sys, "path", [])
    for name, value in FORK_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    kind_of("cpu").in_worker()
    assert os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] == "1"
    kind_of("cuda").in_worker()
    assert "HUMMING_DISABLE_PARALLEL_BUILD" not in os.environ


def test_accelerator_is_matched_by_words_of_driver_name():
    for key, name in (("rtx-a6000", "NVIDIA RTX A6000"), ("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation")):
        assert accelerator(name) is ACCELERATORS[key]
    for name in ("Quadro RTX 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "NVIDIA GeForce RTX 4090 D"):
        assert accelerator(name) is None
