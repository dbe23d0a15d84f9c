"""Device discovery, with NVML's answers replaced by recorded shapes."""

import types

import pynvml
import pytest

from scheduler.devices import discovery


def test_a_machine_without_a_driver_gets_eight_logical_devices(monkeypatch):
    def no_driver():
        raise pynvml.NVMLError_LibraryNotFound()

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    devices = discovery.discover_devices("auto")
    assert [d.id for d in devices] == [f"n0/{i}" for i in range(8)]
    assert {d.kind for d in devices} == {"cpu"}
    assert all(d.memory_bytes > 0 for d in devices)


def test_a_number_asks_for_that_many_logical_devices():
    assert [d.id for d in discovery.discover_devices(4, node="n3")] == ["n3/0", "n3/1", "n3/2", "n3/3"]


@pytest.fixture
def two_linked_gpus(monkeypatch):
    buses = ["00000000:17:00.0", "00000000:3D:00.0"]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda i: i)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda h: "NVIDIA H200")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda h: types.SimpleNamespace(total=141 * 2**30))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPciInfo", lambda h: types.SimpleNamespace(busId=buses[h]))

    def status(one, other, caps):
        assert one != other and caps == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        return pynvml.NVML_P2P_STATUS_OK

    # An NVSwitch box: each link's far end is the switch, which is no GPU.
    monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", status)
    switch = types.SimpleNamespace(busId="00000000:05:00.0")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkRemotePciInfo", lambda h, link: switch)


def test_gpus_are_named_with_memory_and_nvlink_peers(two_linked_gpus):
    first, second = discovery.discover_devices("auto")
    assert (first.id, first.kind, first.name, first.memory_bytes) == ("n0/0", "cuda", "NVIDIA H200", 141 * 2**30)
    assert first.nvlink_peers == {"n0/1"} and second.nvlink_peers == {"n0/0"}


@pytest.mark.parametrize("answer", [pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED, pynvml.NVMLError_NotSupported()])
def test_gpus_without_nvlink_between_them_are_no_peers(two_linked_gpus, monkeypatch, answer):
    def status(one, other, caps):
        if isinstance(answer, pynvml.NVMLError):
            raise answer
        return answer

    monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", status)
    assert [device.nvlink_peers for device in discovery.discover_devices("auto")] == [frozenset(), frozenset()]
