"""Devices are measured by real processes: the logical ones by the code that measures GPUs."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

import pytest

from scheduler.devices.discovery import logical_devices
from scheduler.devices.measure import DeviceProcesses, NotMeasured


async def test_two_logical_devices_are_measured_alone_and_together(tmp_path):
    processes = DeviceProcesses(logical_devices(2), numa_bind=True, folder=tmp_path)
    rates, wrong = await processes.alone("n0/0")
    assert set(rates) == {"from host", "to host", "memory", "products"} and wrong == []
    assert all(rate > 1e7 for rate in rates.values())
    assert (await processes.together(["n0/0", "n0/1"]))["all-reduce of 2"] > 1e6
    assert list(tmp_path.iterdir()) == []


def test_what_others_hold_of_its_memory_is_no_fault_of_a_device():
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB."
    assert not NotMeasured.of_device(f"its measurement failed: {memory}").by_device
    fault = pickle.loads(pickle.dumps(NotMeasured.of_device("its measurement did not end within 180 s")))
    assert fault.by_device and not NotMeasured("its node n1 does not answer").by_device, "as another node tells it"


async def test_a_measurement_that_hangs_is_ended(tmp_path):
    processes = DeviceProcesses(logical_devices(1), numa_bind=True, folder=tmp_path, limit_s=0.05)
    began_s = time.monotonic()
    with pytest.raises(NotMeasured, match="did not end within"):
        await processes.alone("n0/0")
    assert time.monotonic() - began_s < 60
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not [pid for pid in children if "device_rates" in Path(f"/proc/{pid}/cmdline").read_text()]
