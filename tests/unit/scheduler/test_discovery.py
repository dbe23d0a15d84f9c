"""Device discovery, on machines that this one is not: NVML's answers and the files of AMD's driver are written down."""

from dataclasses import replace

import pynvml
import pytest

from runtime.devices import kinds
from runtime.devices.kind import DevicesRefused
from scheduler.devices import discovery
from tests.devices_support.nvml import GIB, Machine, eight_h100, four_4090


def test_a_machine_without_a_driver_gets_eight_logical_devices(monkeypatch):
    def no_driver():
        raise pynvml.NVMLError_LibraryNotFound()

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    devices = discovery.discover_devices("auto")
    assert [d.id for d in devices] == [f"n0/{i}" for i in range(8)]
    assert {d.kind for d in devices} == {"cpu"}
    assert all(d.memory_bytes > 0 for d in devices)


def test_eight_h100_behind_a_switch_are_named_with_memory_and_peers(monkeypatch):
    machine = eight_h100().install(monkeypatch)
    devices = discovery.discover_devices("auto")
    first = devices[0]
    assert (first.id, first.kind, first.name, first.memory_bytes) == ("n0/0", "cuda", "NVIDIA H100 80GB HBM3", 80 * GIB)
    assert [device.linked for device in devices] == [{f"n0/{m}" for m in range(8) if m != n} for n in range(8)]
    assert [device.uuid for device in devices] == [f"GPU-h100-{n}" for n in range(8)]
    assert not any(device.unfit for device in devices)
    assert machine.users == 0, "NVML stays open in no process that only looked"


def test_plans_do_not_count_on_what_the_driver_keeps_of_a_gpus_memory(monkeypatch):
    four_4090().install(monkeypatch)
    assert {device.memory_bytes for device in discovery.discover_devices("auto")} == {24_217 * 2**20}
    ask = pynvml.nvmlDeviceGetMemoryInfo

    def without_version_2(handle, version=None):
        if version is not None:
            raise pynvml.NVMLError_NotSupported()
        return ask(handle)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", without_version_2)
    assert {device.memory_bytes for device in discovery.discover_devices("auto")} == {24_564 * 2**20}


def test_gpus_of_wsl2_which_no_process_takes_for_such_are_refused(monkeypatch):
    machine = replace(four_4090(), control=False).install(monkeypatch)
    with pytest.raises(DevicesRefused, match=r"4 NVIDIA GPUs \(NVIDIA GeForce RTX 4090\).*WSL2.*\[box\] devices"):
        discovery.discover_devices("auto")
    assert kinds.present() is kinds.HOST and machine.users == 0


@pytest.mark.parametrize("where", ["handle_error", "error"])
@pytest.mark.parametrize("error", [pynvml.NVMLError_GpuIsLost(), pynvml.NVMLError_Unknown()], ids=["lost", "unknown"])
def test_a_gpu_that_does_not_answer_takes_no_other_with_it(monkeypatch, where, error):
    machine = eight_h100()
    setattr(machine.gpus[3], where, error)
    machine.install(monkeypatch)
    devices = discovery.discover_devices("auto")
    assert [device.index for device in devices] == list(range(8))
    assert devices[3].unfit == f"does not answer ({error})" and devices[3].memory_bytes == 80 * GIB
    assert [device.id for device in devices if device.unfit] == ["n0/3"]
    assert devices[0].linked == {f"n0/{n}" for n in (1, 2, 4, 5, 6, 7)}
    assert machine.users == 0


def test_mig_and_exclusive_mode_are_said_with_the_remedy(monkeypatch):
    machine = eight_h100()
    machine.gpus[1].mig = True
    machine.gpus[2].mode = pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    machine.gpus[4].mode = pynvml.NVML_COMPUTEMODE_PROHIBITED
    machine.install(monkeypatch)
    unfit = {device.id: device.unfit for device in discovery.discover_devices("auto") if device.unfit}
    assert unfit.keys() == {"n0/1", "n0/2", "n0/4"}
    assert "mode prohibited" in unfit["n0/4"] and "-c DEFAULT" in unfit["n0/4"]
    assert "MIG" in unfit["n0/1"] and "-mig 0" in unfit["n0/1"]
    assert "exclusive process" in unfit["n0/2"] and "-c DEFAULT" in unfit["n0/2"]


def test_a_gpu_that_computes_no_bfloat16_is_no_device(monkeypatch):
    small = {"name": "NVIDIA T400 4GB", "memory_bytes": 4 * GIB, "capability": (7, 5), "datacentre": False}
    machine = eight_h100()
    machine.gpus[2] = replace(machine.gpus[2], **small)
    machine.install(monkeypatch)
    devices = discovery.discover_devices("auto")
    assert [device.index for device in devices] == [0, 1, 3, 4, 5, 6, 7], "CUDA numbers it all the same"
    assert min(device.memory_bytes for device in devices) == 80 * GIB
    assert devices[0].linked == {f"n0/{n}" for n in (1, 3, 4, 5, 6, 7)}
    Machine([machine.gpus[2]]).install(monkeypatch)
    with pytest.raises(DevicesRefused, match=r"too old: NVIDIA T400 4GB is of compute capability 7\.5.*8\.0.*\[box\]"):
        discovery.discover_devices("auto")


@pytest.mark.parametrize(
    "machine, says",
    [
        (Machine([], init_error=pynvml.NVMLError_LibRmVersionMismatch()), "different versions.*reboot"),
        (Machine([], init_error=pynvml.NVMLError_Unknown()), "does not start"),
        (replace(four_4090(), gpus=[replace(four_4090().gpus[0], error=pynvml.NVMLError_GpuIsLost())]), "none of them"),
    ],
    ids=["updated under way", "unknown", "all lost"],
)
def test_a_machine_whose_gpus_cannot_be_used_is_refused_in_words(monkeypatch, machine, says):
    machine.install(monkeypatch)
    with pytest.raises(DevicesRefused, match=says):
        discovery.discover_devices("auto")
