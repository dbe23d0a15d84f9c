"""Devices of simulated machines: discovery, health readings, and cordons that follow from readings."""

import asyncio
import threading
from dataclasses import replace

import pynvml
import pytest

from runtime.devices import kinds
from runtime.devices.kind import DevicesRefused, Reading
from runtime.devices.nvml import fault_of
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Device
from scheduler.devices import discovery
from scheduler.devices.health import DeviceReadings, failing
from tests.devices_support.nvml import GIB, Machine, eight_h100, four_4090


def test_discover_without_driver_returns_8_logical_devices(monkeypatch):
    def no_driver():
        raise pynvml.NVMLError_LibraryNotFound()

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    devices = discovery.discover_devices("auto")
    assert [d.id for d in devices] == [f"n0/{i}" for i in range(8)]
    assert {d.kind for d in devices} == {"cpu"}
    assert all(d.memory_bytes > 0 for d in devices)


def test_discover_8_h100_returns_memory_and_peers(monkeypatch):
    machine = eight_h100().install(monkeypatch)
    devices = discovery.discover_devices("auto")
    first = devices[0]
    assert (first.id, first.kind, first.name, first.memory_bytes) == ("n0/0", "cuda", "NVIDIA H100 80GB HBM3", 80 * GIB)
    assert [device.linked for device in devices] == [{f"n0/{m}" for m in range(8) if m != n} for n in range(8)]
    assert [device.uuid for device in devices] == [f"GPU-h100-{n}" for n in range(8)]
    assert not any(device.unfit for device in devices)
    assert machine.users == 0, "NVML stays open in no process that only looked"


def test_device_memory_excludes_driver_reserve(monkeypatch):
    four_4090().install(monkeypatch)
    assert {device.memory_bytes for device in discovery.discover_devices("auto")} == {24_217 * 2**20}
    ask = pynvml.nvmlDeviceGetMemoryInfo

    def without_version_2(handle, version=None):
        if version is not None:
            raise pynvml.NVMLError_NotSupported()
        return ask(handle)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", without_version_2)
    assert {device.memory_bytes for device in discovery.discover_devices("auto")} == {24_564 * 2**20}


def test_discover_on_wsl2_is_refused(monkeypatch):
    machine = replace(four_4090(), control=False).install(monkeypatch)
    with pytest.raises(DevicesRefused, match=r"4 NVIDIA GPUs \(NVIDIA GeForce RTX 4090\).*WSL2.*\[box\] devices"):
        discovery.discover_devices("auto")
    assert kinds.present() is kinds.HOST and machine.users == 0


@pytest.mark.parametrize("where", ["handle_error", "error"])
@pytest.mark.parametrize("error", [pynvml.NVMLError_GpuIsLost(), pynvml.NVMLError_Unknown()], ids=["lost", "unknown"])
def test_discover_marks_only_unresponsive_gpu_unfit(monkeypatch, where, error):
    machine = eight_h100()
    setattr(machine.gpus[3], where, error)
    machine.install(monkeypatch)
    devices = discovery.discover_devices("auto")
    assert [device.index for device in devices] == list(range(8))
    assert devices[3].unfit == f"does not answer ({error})" and devices[3].memory_bytes == 80 * GIB
    assert [device.id for device in devices if device.unfit] == ["n0/3"]
    assert devices[0].linked == {f"n0/{n}" for n in (1, 2, 4, 5, 6, 7)}
    assert machine.users == 0


def test_discover_names_remedy_for_mig_and_exclusive_mode(monkeypatch):
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


def test_discover_skips_gpu_without_bfloat16(monkeypatch):
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
def test_discover_without_usable_gpu_explains_refusal(monkeypatch, machine, says):
    machine.install(monkeypatch)
    with pytest.raises(DevicesRefused, match=says):
        discovery.discover_devices("auto")


CONFIG = SchedulerConfig(hot_for_s=30)


def readings_of(count: int) -> DeviceReadings:
    return DeviceReadings(tuple(Device(f"n0/{i}", "n0", i, "cuda") for i in range(count)))


def judged(*readings: Reading) -> dict[str, str]:
    found = failing({"n0/0": readings}, CONFIG)
    return {device_id: failure.reason for device_id, failure in found.items()}


def at(second: float, **told) -> Reading:
    return Reading("n0/0", second, **told)


@pytest.mark.parametrize(
    "xid, says",
    [
        (79, "restart"),
        (48, "catalogue"),
        (9999, "catalogue"),
        (95, "reset"),
        (109, "reset"),
        (119, "reset"),
        (92, "diag"),
    ]
    + [(xid, "") for xid in (13, 31, 32, 43, 45, 63, 69, 80, 94, 154)],
)
def test_only_hardware_xids_are_faults(xid, says):
    fault = fault_of(xid)
    assert says in fault and (str(xid) in fault) is bool(says)


def test_only_memory_errors_since_first_reading_are_faults():
    assert judged(at(1, ecc_uncorrected=3), at(6, ecc_uncorrected=3)) == {}
    assert judged(at(1, ecc_uncorrected=3), at(6, ecc_uncorrected=4)) == {"n0/0": "had 1 uncorrected memory error"}
    assert judged(at(1), at(6, ecc_uncorrected=9)) == {}, "no earlier count to compare with"


def test_only_lasting_heat_is_a_fault():
    hot = [at(second, temperature_c=90, slowdown_c=87) for second in range(0, 31, 5)]
    assert judged(*hot[:-1]) == {}
    assert judged(*hot) == {"n0/0": "was at 90 °C for 30 s, over its 87 °C"}
    assert judged(*hot, at(35, temperature_c=80, slowdown_c=87)) == {}
    assert judged(hot[0], at(15, temperature_c=80, slowdown_c=87), *hot[-2:]) == {}
    assert judged(*(at(second, temperature_c=90) for second in range(0, 60, 5))) == {}, "no threshold is known"


@pytest.mark.parametrize(
    ("slow", "lasts_s", "cordoned"),
    [({0}, 300, {"n0/0"}), ({0}, 295, set()), ({0, 1}, 300, set()), ({0, 1, 2}, 300, set())],
    ids=["one", "not yet", "half of them", "most"],
)
def test_slow_device_is_cordoned_only_if_most_are_fast(slow, lasts_s, cordoned):
    def history(device: int) -> tuple[Reading, ...]:
        why = ("power_brake",) if device in slow else ("power_cap",)
        return tuple(Reading(f"n0/{device}", float(at_s), throttled=why) for at_s in range(0, lasts_s + 1, 5))

    assert set(failing({f"n0/{device}": history(device) for device in range(4)}, CONFIG)) == cordoned


def test_readings_include_all_driver_values(monkeypatch):
    machine = Machine([eight_h100().gpus[0], four_4090().gpus[1]]).install(monkeypatch)
    readings = readings_of(2)
    first, second = readings.read()
    assert (first.device_id, first.ecc_uncorrected, first.temperature_c, first.slowdown_c) == ("n0/0", 0, 41, 87)
    assert (second.ecc_uncorrected, second.faults, second.temperature_c) == (None, (), 41)
    assert (first.uuid, second.uuid) == ("GPU-h100-0", "GPU-4090-1")
    assert (first.power_w, first.power_limit_w, first.energy_j) == (310.5, 700.0, 5000.0)
    assert (first.busy, first.memory_used_bytes, first.clock_hz, first.throttled) == (0.97, 500 * 2**20, 1.755e9, ())
    assert (second.energy_j, second.power_w) == (None, 310.5), "a GeForce does not count what it draws"
    machine.gpus[0].throttles = 0x4 | 0x40 | 0x80
    assert readings.read()[0].throttled == ("heat", "power_brake", "power_cap")
    machine.xids, machine.gpus[0].ecc = [(0, 79), (1, 79), (0, 31)], 2
    machine.gpus[1].error = pynvml.NVMLError_GpuIsLost()
    again, lost = readings.read()
    assert (again.faults, again.ecc_uncorrected, lost.lost) == ((fault_of(79),), 2, "GPU is lost")
    told = {"n0/0": (first, again), "n0/1": (second, lost)}
    assert {name: failure.reason for name, failure in failing(told, CONFIG).items()} == {
        "n0/0": fault_of(79),
        "n0/1": "does not answer any more (GPU is lost)",
    }


def test_slowdown_temperature_is_computed_from_margin(monkeypatch):
    machine = eight_h100()
    gpu = machine.gpus[0]
    gpu.margin_c = 44
    machine.install(monkeypatch)
    read = readings_of(1).read
    assert [(one.temperature_c, one.slowdown_c) for one in read()] == [(41, 87)]
    gpu.temperature_c, gpu.margin_c = 88, -3
    assert [(one.temperature_c, one.slowdown_c) for one in read()] == [(88, 87)]
    machine.lacks = ("nvmlDeviceGetMarginTemperature",)
    machine.install(monkeypatch)
    assert [(one.temperature_c, one.slowdown_c, one.lost) for one in read()] == [(88, None, "")]


def test_read_without_a_gpu_closes_it_and_reports_xids_of_others(monkeypatch):
    """`nvidia-smi --gpu-reset` refuses a GPU that any process has open, even for monitoring."""
    machine = eight_h100().install(monkeypatch)
    pynvml.nvmlInit()  # a library in this process, such as torch, does this too
    readings = readings_of(8)
    assert len(readings.read()) == 8 and machine.opened == set(range(8))
    machine.xids = [(5, 79), (3, 79)]
    told = {reading.device_id: reading for reading in readings.read(frozenset({"n0/3"}))}
    assert machine.opened == {0, 1, 2, 4, 5, 6, 7}
    assert "n0/3" not in told and told["n0/5"].faults == (fault_of(79),)
    machine.xids = [(6, 79)]
    assert readings.read(frozenset({"n0/3"}))[5].faults == (fault_of(79),)
    assert machine.opened == {0, 1, 2, 4, 5, 6, 7}
    assert len(readings.read()) == 8 and machine.opened == set(range(8))


async def test_two_concurrent_looks_both_return_all_readings(monkeypatch):
    eight_h100().install(monkeypatch)
    readings = readings_of(8)
    assert [len(found) for found in await asyncio.gather(readings.look(), readings.look())] == [8, 8]


async def test_look_with_hanging_driver_blocks_only_one_thread(monkeypatch):
    machine = eight_h100().install(monkeypatch)
    readings = readings_of(8)
    assert len(await readings.look()) == 8
    monkeypatch.setattr("scheduler.devices.health.PATIENCE_S", 0.01)
    hung, answer, asked, ask = threading.Event(), threading.Event(), [], pynvml.nvmlDeviceGetRemappedRows

    def hangs(handle):
        asked.append(handle)
        hung.set()
        assert answer.wait(60)
        return ask(handle)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetRemappedRows", hangs)
    machine.xids = [(5, 79)]
    assert await readings.look() == () and await asyncio.to_thread(hung.wait, 60)
    assert [await readings.look() for _ in range(5)] == [()] * 5 and len(asked) == 1
    monkeypatch.setattr("scheduler.devices.health.PATIENCE_S", 60)
    answer.set()
    late = {reading.device_id: reading for reading in await readings.look({"n0/3"})}
    assert late["n0/5"].faults == (fault_of(79),), "the driver tells it once"
    assert late.keys() == {f"n0/{n}" for n in (0, 1, 2, 4, 5, 6, 7)}
