"""What the doctor says of a machine, check by check, and that it reads this one."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.boot.box_state import read_end, read_pid
from appliance.config import load_config
from appliance.doctor import facts as facts_module
from appliance.doctor.checks import exit_code, findings
from appliance.doctor.facts import Facts, Quarantined, read
from appliance.last_backup import LastBackup
from runtime.devices.kind import Reading, Remark
from scheduler.core.inventory import Device
from scheduler.core.memory_reading import MemoryReading
from tests.unit.cli.test_tree import is_command

GB = 10**9
WELL = Facts(
    memory=MemoryReading(100 * GB, 80 * GB),
    shm_bytes=60 * GB,
    shm_free_bytes=60 * GB,
    disk_bytes=1000 * GB,
    disk_free_bytes=500 * GB,
    file_system="ext4",
    sync_s=(0.001, 0.002, 0.5),
    now_s=1e9,
    devices=(Device("n0/0", "n0", 0, "cuda", numa_node=0),),
    locks_pages=True,
    readings=(Reading("n0/0", 1e9, temperature_c=60, slowdown_c=87),),
    remarks=(Remark("persistence mode", True, "on", "on"),),
    features=frozenset({"sse2", "avx2", "avx512f"}),
    grants_tiles=False,
    huge_pages=True,
    map_count=1 << 20,
    overcommit=0,
    governors=frozenset({"performance"}),
    numa_balancing=False,
    numa_nodes=2,
    clock_synchronised=True,
    oom_kills=0,
    certificate_expires_s=1e9 + 90 * 86_400,
    backup=LastBackup("b", 1e9 - 3600, "/mnt", 1),
    ending_keys=(),
)


def wrong(facts: Facts) -> dict[str, str]:
    return {one.check: one.state for one in findings(facts) if one.state in ("warn", "fail")}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"state": "failed", "message": "port 8000 is in use"}, "it did not start: port 8000 is in use"),
        ({"state": "stopped", "message": "the disk is full"}, "it ended: the disk is full"),
        ({"state": "stopped", "message": ""}, ""),
        ({"state": "ready"}, "it was killed while ready"),
        ({}, ""),
    ],
)
def test_a_box_that_ended_by_itself_is_said_to_have_with_the_reason(tmp_path, fields, told):
    (tmp_path / "box.json").write_text(json.dumps(fields))
    assert read_end(tmp_path / "box.json") == told and read_end(tmp_path / "none") == ""
    (found,) = [one for one in findings(replace(WELL, ended=told)) if one.check == "box"]
    assert (found.state, found.found) == (("warn", f"does not run: {told}") if told else ("skip", "does not run"))


def test_what_is_to_be_typed_is_there():
    """A remedy said "`appliance backup`", which is a group of commands."""
    ill = replace(
        WELL,
        memory=MemoryReading(100 * GB, GB, stalled=12.0, swap_used=2 << 30),
        shm_bytes=GB,
        disk_free_bytes=GB,
        file_system="nfs4",
        sync_s=(1.0, 1.0),
        devices=(Device("n0/0", "n0", 0, "cuda", unfit="does not answer"),),
        readings=(Reading("n0/0", 1e9, temperature_c=86, slowdown_c=87),),
        remarks=(Remark("fabric", False, "not set up", "set up", "`systemctl restart it`", fails=True),),
        steered=("LD_PRELOAD",),
        huge_pages=False,
        open_files=1024,
        processes=1024,
        overcommit=2,
        clock_synchronised=False,
        oom_kills=1,
        certificate_expires_s=1e9,
        runs=True,
        troubles=("tier disk: no such place",),
        features=frozenset({"sse2", "amx_tile"}),
        quarantined=(Quarantined(Path("/box/quarantine/2026-01-01"), 3, 99),),
        ending_keys=("guest",),
    )
    remedies = [
        one.remedy for facts in (ill, replace(ill, backup=None)) for one in findings(facts) if one.state != "ok"
    ]
    assert len(remedies) > 30 and all(remedies)
    named = {command for remedy in remedies for command in re.findall(r"`appliance ([^`]*)`", remedy)}
    assert len(named) >= 8 and "gpu undrain n0/0" in named
    assert {command for command in named if not is_command(command)} == set()


def test_a_machine_that_is_well():
    assert wrong(WELL) == {} and exit_code(findings(WELL)) == 0
    assert len(findings(WELL)) >= 20


@pytest.mark.parametrize(
    "changes, check, state",
    [
        ({"memory": MemoryReading(100 * GB, 4 * GB)}, "memory available", "warn"),
        ({"memory": MemoryReading(100 * GB, 80 * GB, stalled=12.0)}, "memory pressure", "warn"),
        ({"memory": MemoryReading(100 * GB, 80 * GB, swap_used=2 << 30)}, "swap", "warn"),
        ({"oom_kills": 3}, "killed for memory", "warn"),
        ({"shm_bytes": 8 * GB}, "shared memory", "warn"),
        ({"disk_free_bytes": 40 * GB}, "disk free", "fail"),
        ({"file_system": "nfs4"}, "file system", "fail"),
        ({"sync_s": (0.02, 0.03)}, "disk sync", "warn"),
        ({"open_files": 1024}, "open files", "warn"),
        ({"processes": 4096}, "processes", "warn"),
        ({"map_count": 65_530}, "memory maps", "warn"),
        ({"locked_bytes": 8 << 20}, "locked memory", "warn"),
        ({"overcommit": 2}, "overcommit", "fail"),
        ({"governors": frozenset({"performance", "powersave"})}, "processor governor", "warn"),
        ({"numa_balancing": True}, "NUMA balancing", "warn"),
        ({"clock_synchronised": False}, "clock", "warn"),
        ({"refused": "its driver is too old", "devices": (), "readings": None}, "devices", "fail"),
        ({"devices": (Device("n0/0", "n0", 0, "cuda", numa_node=0, unfit="is cut by MIG"),)}, "device n0/0", "fail"),
        ({"readings": (Reading("n0/0", 1e9, faults=("reported Xid 79",)),)}, "device n0/0", "fail"),
        ({"readings": (Reading("n0/0", 1e9, lost="GPU is lost"),)}, "device n0/0", "fail"),
        ({"readings": (Reading("n0/0", 1e9, temperature_c=83, slowdown_c=87),)}, "device n0/0", "warn"),
        ({"readings": (Reading("n0/0", 1e9, ecc_uncorrected=2),)}, "device n0/0", "warn"),
        ({"readings": (Reading("n0/0", 1e9, throttled=("power_brake", "power_cap")),)}, "device n0/0", "warn"),
        ({"remarks": (Remark("memory correction", False, "off", "on", "switch it on"),)}, "memory correction", "warn"),
        ({"remarks": (Remark("fabric", False, "no", "yes", "start it", fails=True),)}, "fabric", "fail"),
        ({"devices": (Device("n0/0", "n0", 0, "cuda"),)}, "place of devices", "warn"),
        ({"foreign": ("n0/0 is used by 2 other processes",)}, "others' programs", "warn"),
        ({"steered": ("LD_PRELOAD",)}, "environment", "warn"),
        ({"huge_pages": False}, "huge pages", "warn"),
        ({"port_taken": "port 8000 is in use by nginx"}, "port", "fail"),
        ({"certificate_expires_s": 1e9 + 86_400}, "certificate", "warn"),
        ({"certificate_expires_s": 1e9 - 1}, "certificate", "fail"),
        ({"certificate_fault": "no PEM"}, "certificate", "fail"),
        ({"ending_keys": ("guest",)}, "keys", "warn"),
        ({"runs": True, "troubles": ("usage: disk full",)}, "box", "warn"),
        ({"features": frozenset({"sse2"}), "devices": ()}, "processor", "fail"),
        ({"features": WELL.features | {"amx_tile"}, "grants_tiles": False}, "AMX", "fail"),
        ({"quarantined": (Quarantined(Path("/box/quarantine/2026-01-01"), 3, 99),)}, "quarantine", "warn"),
        ({"backup": None}, "backup", "warn"),
        ({"backup": LastBackup("b", 1e9 - 30 * 3600, "/mnt", 1)}, "backup", "warn"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(changes, check, state):
    facts = replace(WELL, **changes)
    assert wrong(facts) == {check: state}
    (finding,) = [one for one in findings(facts) if one.check == check and one.state == state]
    assert finding.found and finding.remedy
    assert exit_code(findings(facts)) == {"fail": 1, "warn": 2}[state]


@pytest.mark.parametrize(
    ("features", "named"),
    [
        ({"avx2"}, "quantised"),
        ({"avx2", "avx512f", "avx512_bf16"}, "compute in bfloat16"),
        ({"avx2", "avx512f", "avx512_bf16", "amx_tile"}, "nearly equal tokens"),
    ],
)
def test_processor_of_cpu_devices_says_what_follows_from_its_features(features, named):
    facts = replace(
        WELL, features=frozenset({"sse2", *features}), grants_tiles=True, devices=(Device("n0/0", "n0", 0, "cpu"),)
    )
    (found,) = [one for one in findings(facts) if one.check == "processor"]
    assert found.state == "ok" and named in found.found


def test_quarantined_files_are_counted_by_the_day_they_were_found(tmp_path):
    for name, data in (("2026-01-01/files/a", b"abc"), ("2026-01-01/uploads/u/p", b"de"), ("2026-02-01/files/b", b"f")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "2026-03-01" / "files").mkdir(parents=True)
    found = [(one.folder.name, one.files, one.nbytes) for one in facts_module._quarantined(tmp_path)]
    assert found == [("2026-01-01", 2, 5), ("2026-02-01", 1, 1)]


def test_what_cannot_be_read_is_skipped_and_not_called_right():
    unknown = replace(
        WELL,
        sync_s=(),
        file_system="",
        overcommit=None,
        governors=frozenset(),
        numa_balancing=None,
        clock_synchronised=None,
        oom_kills=None,
        steered=None,
        huge_pages=None,
        ending_keys=None,
        remarks=(Remark("fabric", None, "", "set up"),),
        readings=(Reading("n0/0", 1e9, throttled=("power_cap",)),),
    )
    assert wrong(unknown) == {}
    skipped = {one.check for one in findings(unknown) if one.state == "skip"} - {"box"}
    assert skipped == {
        "disk sync",
        "file system",
        "overcommit",
        "processor governor",
        "NUMA balancing",
        "clock",
        "killed for memory",
        "environment",
        "huge pages",
        "fabric",
        "keys",
    }
    told = {one.check: one.found for one in findings(unknown)}
    assert told["environment"] == told["huge pages"] == "not reported here"


def test_this_machine_is_read_and_nothing_is_left(tmp_path):
    config = load_config(None, {"data_dir": str(tmp_path / "box" / "not" / "there"), "devices": 2})
    found = read(config, runs=False)
    assert len(found.devices) == 2 and found.readings is None and found.file_system
    assert len(found.sync_s) == facts_module.SYNCS and all(took_s > 0 for took_s in found.sync_s)
    assert found.shm_bytes > 0 and found.memory.total > 0
    assert list(tmp_path.iterdir()) == []


def test_limits_are_those_of_the_control_group_too(tmp_path):
    root = tmp_path / "root"
    for path, text in {
        "proc/self/cgroup": "0::/system.slice/box.service\n",
        "sys/fs/cgroup/system.slice/pids.max": "max\n",
        "sys/fs/cgroup/system.slice/box.service/pids.max": "512\n",
        "proc/sys/kernel/pid_max": "4194304\n",
        "proc/sys/kernel/threads-max": "200000\n",
        "proc/vmstat": "nr_free_pages 1\noom_kill 7\n",
        "proc/self/mountinfo": (
            "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / /srv rw,x shared:3 - nfs4 nas:/srv rw\n"
            "3 1 0:6 / /srvother rw - xfs /dev/sdb rw\n"
        ),
    }.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert facts_module._processes(root) == 512
    assert facts_module._oom_kills(root) == 7
    assert facts_module._file_system(root, Path("/srv/box")) == "nfs4"
    assert facts_module._file_system(root, Path("/home")) == "ext4"


def test_what_steers_the_box_is_read_of_its_own_environment_while_it_runs(tmp_path):
    for who, text in {"self": "PATH=/bin\0LD_PRELOAD=x.so\0", "77": "NCCL_DEBUG=INFO\0HOME=/\0NOT_NCCL_=1\0"}.items():
        file = tmp_path / "proc" / who / "environ"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (tmp_path / "box.json").write_text(json.dumps({"pid": 77}))
    assert facts_module._steered(tmp_path, None, ("NCCL_",)) == ("LD_PRELOAD",)
    assert facts_module._steered(tmp_path, read_pid(tmp_path / "box.json"), ("NCCL_",)) == ("NCCL_DEBUG",)
    assert facts_module._steered(tmp_path, 78, ()) is None, "it is another user's"
    assert read_pid(tmp_path / "none") is None


@pytest.mark.parametrize(("text", "given"), [("always [madvise] never", True), ("always madvise [never]", False)])
def test_huge_pages_are_as_the_kernel_says(tmp_path, text, given):
    assert facts_module._huge_pages(tmp_path) is None
    file = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert facts_module._huge_pages(tmp_path) is given


def test_a_full_disk_is_no_reason_to_fail(tmp_path, monkeypatch):
    def full(handle: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(facts_module.os, "write", full)
    assert facts_module._syncs(tmp_path) == () and list(tmp_path.iterdir()) == []
    assert shutil.disk_usage(tmp_path).total > 0
