"""The table of kinds of devices: what is asked of a row, and that one more row is all that a third kind needs."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pynvml
import pytest
import torch

from appliance.node_config import device_environment
from runtime.devices import kinds
from runtime.devices.kind import DeviceKind, Found, Reading
from runtime.devices.kinds import KINDS, UnknownDeviceKind, kind_of
from scheduler.core.config import SchedulerConfig
from scheduler.devices.discovery import discover_devices
from scheduler.devices.health import failing
from scheduler.devices.readings import DeviceReadings
from serve.core.spec import ReplicaSpec
from serve.vllm.arguments import engine_arguments, engine_environment
from tests.devices_support.nvml import eight_h100
from train.plan.errors import InvalidSpec
from train.plan.spec import TrainSpec

GIB = 2**30


class Abacus(DeviceKind):
    """Two devices of 64 GiB, of which the second has lost its beads."""

    name = "abacus"
    title = "abacus"
    torch_type = "privateuseone"
    accelerator = "counter"
    context_bytes = 2**30
    asleep_bytes = 2**29
    collectives = "beads"

    def present(self):
        return True

    def probe(self):
        return tuple(Found(index, "Abacus 2", 64 * GIB, 0, frozenset({1 - index})) for index in range(2))

    def visibility(self, devices):
        return {"ABACUS_VISIBLE": "+".join(map(str, devices))}

    def watch(self, devices):
        return lambda let_go: tuple(
            Reading(device_id, 1.0, lost="beads" if index else "")
            for index, device_id in devices.items()
            if device_id not in let_go
        )

    def fork_environment(self):
        return {"ABACUS_STAYS": "still"}

    def library_environment(self, caches: Path):
        return {"ABACUS_CACHE": str(caches / "beads")}

    def collectives_environment(self, interface):
        return {"BEADS_OVER": interface}

    def engine_arguments(self):
        return ["--additional-config", '{"rods": "let go"}']

    def engine_environment(self):
        return {"VLLM_ABACUS": "1"}


@pytest.fixture
def abacus(monkeypatch):
    def no_driver():
        raise pynvml.NVMLError_LibraryNotFound()

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    monkeypatch.setitem(KINDS, Abacus.name, Abacus())


def test_a_third_kind_is_found_before_the_host_and_watched(abacus):
    devices = discover_devices("auto", "n7")
    assert [(device.id, device.kind, device.memory_bytes) for device in devices] == [
        ("n7/0", "abacus", 64 * GIB),
        ("n7/1", "abacus", 64 * GIB),
    ]
    assert devices[0].linked == {"n7/1"} and devices[0].numa_node == 0
    told = {reading.device_id: (reading,) for reading in DeviceReadings(devices).read()}
    found = failing(told, (), 1.0, SchedulerConfig())
    assert {device: failure.reason for device, failure in found.items()} == {"n7/1": "does not answer any more (beads)"}
    assert {device.kind for device in discover_devices(3)} == {"cpu"}, "a number asks for logical devices still"
    assert kinds.present().name == "abacus"


def test_a_third_kind_shows_its_devices_to_engines_and_ranks(abacus, tmp_path):
    assert device_environment("abacus", tmp_path) == {
        "DS_ACCELERATOR": "counter",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",
        "ABACUS_STAYS": "still",
        "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "ABACUS_CACHE": str(tmp_path / "beads"),
    }
    replica = ReplicaSpec("r", "m", "v", "/v", "/s.sock", (0, 1), "abacus", "/shm", GIB, tensor_parallel=2)
    env = engine_environment(replica, 1)
    assert env["ABACUS_VISIBLE"] == "0+1" and "CUDA_VISIBLE_DEVICES" not in env
    assert (env["BEADS_OVER"], env["VLLM_ABACUS"]) == ("lo", "1")
    assert {name for name in env if "NCCL" in name or "FLASHINFER" in name} == set()
    arguments = engine_arguments(replica, {}, None)
    assert arguments[arguments.index("--additional-config") + 1] == '{"rods": "let go"}'
    assert not {"--enable-sleep-mode", "--sleep-mode-offload-cudagraph", "--compilation-config"} & {*arguments}
    spec = TrainSpec("j", "/b", "/t", "/r", "/shm", "ft:x", device_kind="abacus")
    assert TrainSpec.from_json(spec.to_json()) == spec
    assert kind_of(spec.device_kind).collectives == "beads"
    assert [kind_of(kind).address(3) for kind in ("abacus", "cuda", "cpu")] == ["3", "3", "cpu"]


def test_a_kind_that_is_no_row_is_refused_by_name():
    with pytest.raises(UnknownDeviceKind, match="'abacus' is not known; expected one of cuda, cpu"):
        kind_of("abacus")
    with pytest.raises(InvalidSpec, match="abacus"):
        TrainSpec("j", "/b", "/t", "/r", "/shm", "ft:x", device_kind="abacus")


def test_processes_see_their_devices_as_the_driver_numbers_them():
    shown = {"CUDA_VISIBLE_DEVICES": "5,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert kind_of("cuda").visibility([5, 2]) == shown and kind_of("cpu").visibility([5]) == {}


def test_of_torch_names_the_kind_of_a_device(abacus):
    assert kinds.of_torch(torch.device("cpu")) is kinds.HOST
    assert kinds.of_torch(torch.device("cuda", 3)).name == "cuda"
    assert kinds.of_torch(torch.device("privateuseone")).name == "abacus"
    with pytest.raises(UnknownDeviceKind, match="'xla'"):
        kinds.of_torch(torch.device("xla"))
    assert kinds.in_host_memory(torch.zeros(1).device)


def test_a_processs_copies_to_a_gpu_share_two_streams(monkeypatch):
    """Each had a new one, of 32 that torch hands out, and each kept memory."""
    made, entered = [], []

    class Stream:
        def __init__(self, device):
            made.append(device)

        def wait_stream(self, other):
            entered.append((self, other))

    for name, value in {
        "is_initialized": lambda: True,
        "current_device": lambda: 7,
        "Stream": Stream,
        "default_stream": lambda: "default",
        "stream": lambda stream: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for _ in range(6):
        with kind_of("cuda").copy_stream():
            pass
    assert made == [7, 7] and len(entered) == 6 and len({id(stream) for stream, _ in entered}) == 2
    assert {other for _, other in entered} == {"default"}


def test_the_table_costs_no_torch():
    code = "import sys, runtime.devices.kinds; print(sorted({'torch', 'vllm', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("loaded", [True, False], ids=["pynvml too", "other handles alone"])
def test_a_parent_closes_nvml_whoever_opened_it(monkeypatch, loaded):
    """torch.cuda.is_available(), which Triton asks at its import, starts NVML by a handle of its own and never ends
    it; the driver resets no GPU whose file is open."""
    machine = eight_h100()
    machine.users, machine.loaded = 3, loaded
    machine.install(monkeypatch)
    kinds.before_fork()
    assert machine.users == 0
    kind_of("cuda").after_fork()
    assert machine.users == 1, "a rank asks NVML for free memory"


def test_a_worker_compiles_kernels_with_all_processors(monkeypatch):
    """What keeps compilers from running in a parent that forks had a worker compile its own one after the other."""
    monkeypatch.setattr(sys, "path", [])
    for name, value in kinds.fork_environment().items():
        monkeypatch.setenv(name, value)
    kind_of("cpu").in_worker()
    assert os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] == "1"
    kind_of("cuda").in_worker()
    assert "HUMMING_DISABLE_PARALLEL_BUILD" not in os.environ


@pytest.mark.parametrize("own", ["", "/usr/local/nvidia/lib"])
def test_programs_of_a_worker_find_what_nvrtc_loads_by_its_name(own, monkeypatch, tmp_path):
    """Kernels for few bits on Hopper are compiled by a program that humming-kernels starts, and NVRTC among the
    packages names no folder for its builtins: "failed to open libnvrtc-builtins.so.13.0"."""
    library = tmp_path / "site-packages" / "nvidia" / "cu13" / "lib" / "libnvrtc-builtins.so.13.0"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.setenv("LD_LIBRARY_PATH", own)
    kind_of("cuda").in_worker()
    found = os.environ["LD_LIBRARY_PATH"].split(":")
    assert str(library.parent) in found
    assert not own or found[0] == own
