"""Reads what the checks judge, in a few seconds and without a privilege. What cannot be read is None: its check is
skipped and says so."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from appliance import last_backup
from appliance.boot import endpoint
from appliance.boot.box_state import read_end, read_pid, read_troubles
from appliance.config import BoxConfig
from appliance.gateway.core.errors import ConfigInvalid
from appliance.gateway.http.certificates import Certificate
from appliance.last_backup import LastBackup
from appliance.paths import SHM_MOUNT, BoxPaths
from appliance.store.readers import reading_uri
from runtime.devices.cpu import host_features
from runtime.devices.kind import DevicesRefused, Reading, Remark
from runtime.devices.kinds import kind_of
from runtime.libc import libc
from scheduler.core.inventory import Device
from scheduler.core.memory_reading import MemoryReading
from scheduler.devices.discovery import check_build, discover_devices, foreign_use
from scheduler.devices.host_reading import read_memory

SYNCS = 20
KEYS_SAID_BEFORE_S = 7 * 86_400.0
_STA_UNSYNC = 0x0040  # adjtimex(2)
_SYS_ARCH_PRCTL, _ARCH_GET_XCOMP_SUPP, _XTILEDATA = 158, 0x1021, 18  # asm/prctl.h of Linux 5.16


@dataclass(frozen=True, slots=True)
class Quarantined:
    """What a start of the box found without a row in its database, and kept: a folder, its files and their bytes."""

    folder: Path
    files: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Bytes, seconds and counts as their names say. refused: why the devices cannot be used. readings: None for devices
    that report nothing. clock_synchronised: by the kernel's own flag. oom_kills: since the machine began. troubles: of
    a running box. ended: why one that does not run ended, if not in order. features: of the processor, as the kernel
    names them. grants_tiles: whether the kernel knows AMX tiles. ending_keys: names of API keys that expire within a
    week, by when."""

    memory: MemoryReading
    shm_bytes: int
    shm_free_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    file_system: str
    sync_s: tuple[float, ...]
    now_s: float
    devices: tuple[Device, ...] = ()
    refused: str = ""
    locks_pages: bool = False
    readings: tuple[Reading, ...] | None = None
    remarks: tuple[Remark, ...] = ()
    foreign: tuple[str, ...] = ()
    steered: tuple[str, ...] | None = ()
    huge_pages: bool | None = None
    locked_bytes: int | None = None
    open_files: int | None = None
    processes: int | None = None
    map_count: int | None = None
    overcommit: int | None = None
    governors: frozenset[str] = frozenset()
    numa_balancing: bool | None = None
    numa_nodes: int = 1
    clock_synchronised: bool | None = None
    oom_kills: int | None = None
    certificate_expires_s: float | None = None
    certificate_fault: str = ""
    runs: bool = False
    port_taken: str = ""
    troubles: tuple[str, ...] = ()
    ended: str = ""
    backup: LastBackup | None = None
    features: frozenset[str] = frozenset()
    grants_tiles: bool | None = None
    quarantined: tuple[Quarantined, ...] = ()
    ending_keys: tuple[str, ...] | None = None


def read(config: BoxConfig, *, runs: bool, root: Path = Path("/")) -> Facts:
    """`runs`: whether the box of this configuration is up. `root`: prefix of /proc and /sys."""
    paths = BoxPaths.of(Path(config.box.data_dir))
    folder = next(path for path in (paths.data_dir, *paths.data_dir.parents) if path.is_dir())
    shm, disk = shutil.disk_usage(SHM_MOUNT), shutil.disk_usage(folder)
    devices, refused = _devices(config)
    kind = kind_of(devices[0].kind) if devices else None
    watch = None if kind is None else kind.watch({device.index: device.id for device in devices})
    expires, fault = _certificate(config)
    return Facts(
        memory=read_memory(root),
        shm_bytes=shm.total,
        shm_free_bytes=shm.free,
        disk_bytes=disk.total,
        disk_free_bytes=disk.free,
        file_system=_file_system(root, folder),
        sync_s=_syncs(folder),
        now_s=time.time(),
        devices=devices,
        refused=refused,
        locks_pages=kind is not None and kind.locks_pages,
        readings=None if watch is None else watch(()),
        remarks=() if kind is None else kind.remarks({device.index: device.id for device in devices}),
        foreign=() if runs or not devices else tuple(foreign_use(devices)),
        steered=_steered(root, read_pid(paths.state_file) if runs else None, kind.steered_by if kind else ()),
        huge_pages=_huge_pages(root),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=_processes(root),
        map_count=_number(root / "proc/sys/vm/max_map_count"),
        overcommit=_number(root / "proc/sys/vm/overcommit_memory"),
        governors=_governors(root),
        numa_balancing=_flag(root / "proc/sys/kernel/numa_balancing"),
        numa_nodes=max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*")))),
        clock_synchronised=_synchronised(),
        oom_kills=_oom_kills(root),
        certificate_expires_s=expires,
        certificate_fault=fault,
        runs=runs,
        port_taken="" if runs else endpoint.why_not(config.box.host, config.box.port),
        troubles=tuple(f"{one['name']}: {one['why']}" for one in read_troubles(paths.state_file)) if runs else (),
        ended="" if runs else read_end(paths.state_file),
        backup=last_backup.read(paths.last_backup),
        features=host_features(),
        grants_tiles=_grants_tiles(),
        quarantined=tuple(_quarantined(paths.quarantine)),
        ending_keys=_ending_keys(paths.database),
    )


def _devices(config: BoxConfig) -> tuple[tuple[Device, ...], str]:
    try:
        devices = discover_devices(config.box.devices, untried=config.box.untried_devices)
        check_build(devices)
        return devices, ""
    except DevicesRefused as error:
        return (), str(error)


def _quarantined(root: Path) -> Iterator[Quarantined]:
    for day in sorted(root.iterdir()) if root.is_dir() else []:
        sizes = [path.lstat().st_size for path in day.rglob("*") if not path.is_dir()]
        if sizes:
            yield Quarantined(day, len(sizes), sum(sizes))


def _grants_tiles() -> bool | None:
    """Whether the kernel lets processes ask for AMX tiles (arch_prctl(2)); None on processors of another kind."""
    if os.uname().machine != "x86_64":
        return None
    supported = ctypes.c_uint64()
    if libc.syscall(_SYS_ARCH_PRCTL, _ARCH_GET_XCOMP_SUPP, ctypes.byref(supported)) != 0:
        return False
    return bool(supported.value >> _XTILEDATA & 1)


def _ending_keys(database: Path) -> tuple[str, ...] | None:
    try:
        with closing(sqlite3.connect(reading_uri(database), uri=True)) as connection:
            return tuple(
                name
                for (name,) in connection.execute(
                    "SELECT name FROM keys WHERE expires_s <= ? AND revoked_s IS NULL ORDER BY expires_s",
                    (time.time() + KEYS_SAID_BEFORE_S,),
                )
            )
    except sqlite3.Error:
        return None  # there is no box yet, or its database is of an earlier release


def _certificate(config: BoxConfig) -> tuple[float | None, str]:
    files = config.gateway.tls_cert_path, config.gateway.tls_key_path
    if files[0] is None or files[1] is None:
        return None, ""
    try:
        return Certificate(files[0], files[1]).expires_s, ""
    except ConfigInvalid as error:
        return None, str(error)


def _syncs(folder: Path) -> tuple[float, ...]:
    """How long a small write takes to be on the disk, some times; none where this user may not write."""
    path, took = folder / f".doctor-{os.getpid()}", []
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return ()
    try:
        for _ in range(SYNCS):
            began_s = time.perf_counter()
            os.write(handle, bytes(4096))
            os.fdatasync(handle)
            took.append(time.perf_counter() - began_s)
    except OSError:
        return ()
    finally:
        os.close(handle)
        path.unlink(missing_ok=True)
    return tuple(took)


def _file_system(root: Path, folder: Path) -> str:
    """The type of the mount below `folder` (proc_pid_mountinfo(5)); "" if unknown."""
    found, resolved = ("", ""), folder.resolve()
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        mounted = Path(before.split()[4].replace("\\040", " "))
        if resolved.is_relative_to(mounted) and len(str(mounted)) >= len(found[0]):
            found = (str(mounted), after.split()[0])
    return found[1]


def _limit(name: int) -> int | None:
    """The hard limit, which the box raises its own to; None: unlimited."""
    hard = resource.getrlimit(name)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def _processes(root: Path) -> int | None:
    """The lowest bound on processes and threads: of the kernel, of this user, of the control groups above us."""
    bounds = [_number(root / "proc/sys/kernel" / name) for name in ("pid_max", "threads-max")]
    bounds.append(_limit(resource.RLIMIT_NPROC))
    try:
        group = (root / "proc/self/cgroup").read_text().splitlines()[-1].rpartition(":")[2].strip("/")
    except (OSError, IndexError):
        group = ""
    here = Path(group)
    bounds += [_number(root / "sys/fs/cgroup" / part / "pids.max") for part in (here, *here.parents)]
    return min((bound for bound in bounds if bound is not None), default=None)


def _governors(root: Path) -> frozenset[str]:
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    return frozenset(_text(file) for file in files) - {""}


def _steered(root: Path, pid: int | None, names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Which of these names the box's environment has while it runs, else ours, with which it would be started; None if
    this user may not read it."""
    try:
        environment = (root / "proc" / str(pid or "self") / "environ").read_text(errors="replace").split("\0")
    except OSError:
        return None
    there = (pair.partition("=")[0] for pair in environment)
    return tuple(sorted(name for name in there if name.startswith(("LD_PRELOAD", *names))))


def _huge_pages(root: Path) -> bool | None:
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return "[never]" not in text if text else None


def _synchronised() -> bool | None:
    """Whether something disciplines the clock, by adjtimex(2), which only reads here."""
    room = (ctypes.c_char * 512)()  # struct timex: `modes` is 0, and 208 bytes long at most
    if libc.adjtimex(ctypes.byref(room)) < 0:
        return None
    status_at = ctypes.sizeof(ctypes.c_long) * 5  # after modes (padded), offset, freq, maxerror, esterror
    return not int.from_bytes(bytes(room)[status_at : status_at + 4], "little") & _STA_UNSYNC


def _oom_kills(root: Path) -> int | None:
    for line in _text(root / "proc/vmstat").splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdigit():
            return int(value)
    return None


def _flag(path: Path) -> bool | None:
    number = _number(path)
    return None if number is None else bool(number)


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not on this kernel, or not ours to read
        return ""
