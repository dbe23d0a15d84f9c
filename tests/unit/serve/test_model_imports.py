"""A model's class is imported in a process that will fork: kernels are told of the GPU, and CUDA is not started."""

from types import SimpleNamespace

import pytest
import torch
import torch.cuda

from runtime.devices.kinds import kind_of
from serve.vllm.patches import with_device_at_import

triton = pytest.importorskip("triton")

H100 = SimpleNamespace(get_device_capability=lambda: (9, 0), get_device_name=lambda: "NVIDIA H100 80GB HBM3")
RTX_4090 = SimpleNamespace(get_device_capability=lambda: (8, 9), get_device_name=lambda: "NVIDIA GeForce RTX 4090")
ASKED = ("get_device_name", "get_device_capability", "device_count")


def asking(model):
    """What vllm/third_party/flash_linear_attention/ops/utils.py asks while it is imported."""
    driver = triton.runtime.driver.active
    shared = [driver.utils.get_device_properties(i)["max_shared_mem"] for i in range(torch.cuda.device_count())]
    target = driver.get_current_target()
    return target.backend, target.arch, torch.cuda.get_device_name(0), torch.cuda.get_device_capability(), shared


@pytest.mark.parametrize(
    ("platform", "told"),
    [
        (H100, ("cuda", 90, "NVIDIA H100 80GB HBM3", (9, 0), [232448])),
        (RTX_4090, ("cuda", 89, "NVIDIA GeForce RTX 4090", (8, 9), [101376])),
    ],
)
def test_kernels_that_ask_at_import_are_told_without_starting_cuda(monkeypatch, platform, told):
    started = []
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: started.append(True))
    before, driver = [getattr(torch.cuda, call) for call in ASKED], triton.runtime.driver._active
    assert with_device_at_import(asking, platform, kind_of("cuda"))(None) == told
    assert not started
    assert [getattr(torch.cuda, call) for call in ASKED] == before
    assert triton.runtime.driver._active is driver
