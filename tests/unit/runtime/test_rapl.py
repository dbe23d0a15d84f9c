"""The energy counters of the host's processors, on folders as the kernel has them."""

from __future__ import annotations

from pathlib import Path

from runtime.devices import cpu, rapl
from runtime.devices.rapl import HostEnergy


def zone(folder: Path, place: str, name: str, uj: int, wraps_at_uj: int = 1_000_000) -> Path:
    made = folder / place
    made.mkdir(parents=True)
    (made / "name").write_text(f"{name}\n")
    (made / "max_energy_range_uj").write_text(f"{wraps_at_uj}\n")
    (made / "energy_uj").write_text(f"{uj}\n")
    return made / "energy_uj"


def test_packages_and_their_memory_count_and_what_is_in_a_package_does_not_twice(tmp_path):
    package = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    core, memory = zone(tmp_path, "intel-rapl:0:0", "core", 0), zone(tmp_path, "intel-rapl:0:1", "dram", 10)
    zone(tmp_path, "intel-rapl:1", "psys", 5)
    host = HostEnergy.find(tmp_path)
    assert host is not None and host.joules() == 0
    package.write_text("950000"), core.write_text("999"), memory.write_text("50010")
    assert host.joules() == 0.1
    package.write_text("50000")  # it has begun anew at its end
    assert host.joules() == 0.2
    package.unlink()
    assert host.joules() is None


def test_without_leave_or_without_counters_nothing_is_told(tmp_path):
    assert HostEnergy.find(tmp_path) is None
    zone(tmp_path, "intel-rapl:0", "package-0", 0).unlink()
    zone(tmp_path, "intel-rapl:0:1", "dram", 0)
    assert HostEnergy.find(tmp_path) is None, "memory alone is not the host"


def test_logical_devices_have_equal_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(rapl, "ZONES", tmp_path)
    assert cpu.KIND.watch({0: "n0/0"}) is None
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0, 10**9)
    read = cpu.KIND.watch({0: "n0/0", 1: "n0/1"})
    assert read is not None
    package.write_text("8000000")
    assert [(one.device_id, one.energy_j) for one in read(())] == [("n0/0", 4.0), ("n0/1", 4.0)]
    assert [one.device_id for one in read(["n0/0"])] == ["n0/1"]
