"""The checks of `appliance doctor`: each is fast, needs no privileges, and reports a state and a remedy.

    python -m appliance.boot.doctor --config FILE [--runs]      prints them as JSON

A check whose state cannot be read is reported as skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from appliance.backup import read_last
from appliance.boot.main import port_taken
from appliance.cli.locate import BoxFile
from appliance.config import BoxConfig, load_resolved
from appliance.gateway.core.errors import ConfigInvalid
from appliance.gateway.server.certificates import WARN_BEFORE_S, Certificate
from appliance.memory.memory_policy import gb
from appliance.paths import SHM_MOUNT, BoxPaths
from runtime.devices.kind import DevicesRefused, Reading, host_features
from runtime.devices.kinds import HOST, kind_of
from scheduler.core.workload import Device
from scheduler.devices.discovery import check_build, discover_devices, foreign_use
from scheduler.devices.host_reading import read_memory

State = Literal["ok", "warn", "fail", "skip"]

DAY_S = 86_400.0
OPEN_FILES = 65_536  # each engine, rank and client connection opens several
DISK_SHARE = 0.05
MARGIN_C = 5  # warn from this many degrees below a device's slow-down temperature
BACKUP_LATE_S = 26 * 3600.0  # the same limit as the alert BackupOld
REMOTE_FILE_SYSTEMS = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "fuse.glusterfs", "ceph", "lustre")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. found, wanted: actual and expected state, as texts. remedy: what to do, or ""."""

    check: str
    state: State
    found: str
    wanted: str = ""
    remedy: str = ""


def findings(config: BoxConfig, *, runs: bool) -> list[Finding]:
    """Run all checks. runs: whether the box of this configuration is up."""
    paths = BoxPaths.of(Path(config.box.data_dir))
    folder = next(path for path in (paths.data_dir, *paths.data_dir.parents) if path.is_dir())
    return [
        *_devices(config, runs),
        *_memory(),
        *_disk(folder),
        *_machine(config, runs),
        *_box(paths.data_dir, runs),
        *_keys(paths.database),
        *_backup(paths.last_backup),
    ]


def exit_code(findings: list[Finding]) -> int:
    """Return 0 if all checks pass, 1 if one fails, 2 if one warns."""
    states = {finding.state for finding in findings}
    return 1 if "fail" in states else 2 if "warn" in states else 0


def _judged(check: str, well: bool | None, found: str, wanted: str, remedy: str, bad: State = "warn") -> Finding:
    """Build a finding, with the remedy if it is needed. well: whether the check passed, None if unknown. bad: the state
    of a check that did not pass."""
    if well is None:
        return Finding(check, "skip", found or "not reported here", wanted)
    return Finding(check, "ok", found, wanted) if well else Finding(check, bad, found, wanted, remedy)


def _devices(config: BoxConfig, runs: bool) -> Iterator[Finding]:
    devices: tuple[Device, ...] = ()
    refused = ""
    try:
        devices = discover_devices(config.box.devices)
        check_build(devices)
    except DevicesRefused as error:
        refused = str(error)
    count = f"{len(devices)} of kind {devices[0].kind}" if devices else "none"
    yield _judged("devices", not refused, refused or count, "usable devices", refused, "fail")
    for device in devices:
        if device.unfit:
            remedy = f"see docs/gpu.md, then `appliance gpu undrain {device.id}`"
            yield Finding(f"device {device.id}", "fail", device.unfit, "", remedy)
    if not devices:
        return
    kind, names = kind_of(devices[0].kind), {device.index: device.id for device in devices}
    watch = kind.watch(names)
    for reading in () if watch is None else watch(()):
        yield _device(reading)
    if kind.name == HOST.name and os.uname().machine == "x86_64":
        has_avx2 = "avx2" in host_features()
        remedy = "engines end with SIGILL here: use a machine with AVX2 or a GPU"
        yield _judged("processor", has_avx2, "avx2" if has_avx2 else "no avx2", "avx2", remedy, "fail")
    if kind.locks_pages:
        locked = _hard_limit(resource.RLIMIT_MEMLOCK)
        remedy = "LimitMEMLOCK=infinity in the unit, or --ulimit memlock=-1, makes copies to the devices faster"
        yield _judged(
            "locked memory", locked is None, "unlimited" if locked is None else gb(locked), "unlimited", remedy
        )
    if not runs and watch is not None:
        foreign = "; ".join(foreign_use(devices))
        remedy = "end them: they hold memory that engines and ranks need"
        yield _judged("others' programs", not foreign, foreign or "none on the devices", "none", remedy)


def _device(reading: Reading) -> Finding:
    wrong = [reason for reason in (reading.lost, reading.unfit, *reading.faults) if reason]
    hot, heat = False, ""
    if reading.temperature_c is not None and reading.slowdown_c is not None:
        hot = reading.slowdown_c - reading.temperature_c <= MARGIN_C
        heat = f"{reading.temperature_c} °C of {reading.slowdown_c} °C"
    errors = f"{reading.ecc_uncorrected} uncorrected memory errors" if reading.ecc_uncorrected else ""
    slowed = " and ".join(word.replace("_", " ") for word in reading.throttled if word != "power_cap")
    slowed = f"slowed down by {slowed}" if slowed else ""
    found = "; ".join([*wrong, *filter(None, (errors, slowed, heat))]) or "answers"
    state: State = "fail" if wrong else "warn" if hot or errors or slowed else "ok"
    name = reading.device_id
    remedy = f"`appliance gpu drain {name}`; cool or reset it (docs/gpu.md); `appliance gpu undrain {name}`"
    return Finding(f"device {name}", state, found, "no fault, cool, not slowed down", "" if state == "ok" else remedy)


def _memory() -> Iterator[Finding]:
    memory, shm = read_memory(), shutil.disk_usage(SHM_MOUNT)
    available = f"{gb(memory.available)} of {gb(memory.total)} ({memory.where})"
    remedy = "`ps -eo pid,rss,comm --sort=-rss | head` lists the largest processes: end those that are not the box's"
    yield _judged("memory available", memory.available >= memory.total // 20, available, "a twentieth of it", remedy)
    remedy = "swapped engines answer slowly: run `swapoff -a` when enough memory is free"
    yield _judged("swap", memory.swap_used < 2**30, f"{gb(memory.swap_used)} in use", "less than 1 GB", remedy)
    found = f"{gb(shm.total)}, {gb(shm.free)} free"
    remedy = "`mount -o remount,size=80% /dev/shm`, or --shm-size of the container: weights are shared there"
    yield _judged("shared memory", shm.total >= memory.total // 2, found, "half of the memory", remedy)


def _disk(folder: Path) -> Iterator[Finding]:
    disk = shutil.disk_usage(folder)
    share = disk.free / max(1, disk.total)
    found = f"{gb(disk.free)} of {gb(disk.total)} ({share:.0%})"
    remedy = (
        "`appliance tier list` and `appliance file list` show what uses it: run `appliance model rm`, "
        "`appliance file rm`, shorten [controller.retention], or move the data directory to a larger disk"
    )
    yield _judged("disk free", share >= DISK_SHARE, found, f"at least {DISK_SHARE:.0%}", remedy, "fail")
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(mount.mountpoint)]
    kind = max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""
    is_local = not kind.startswith(REMOTE_FILE_SYSTEMS) if kind else None
    remedy = "move the data directory to a local disk; make copies with `appliance backup make PLACE`"
    yield _judged("file system", is_local, kind, "a local file system", remedy, "fail")


def _hard_limit(name: int) -> int | None:
    """Return the hard limit `name` (RLIMIT_…), to which the box raises its soft limit; None: unlimited."""
    hard = resource.getrlimit(name)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def _machine(config: BoxConfig, runs: bool) -> Iterator[Finding]:
    files = _hard_limit(resource.RLIMIT_NOFILE)
    remedy = f"set LimitNOFILE={OPEN_FILES} in the unit, or as root `ulimit -n {OPEN_FILES}` before `appliance up`"
    found = "unlimited" if files is None else f"{files:,}"
    yield _judged("open files", files is None or files >= OPEN_FILES, found, f"{OPEN_FILES:,}", remedy)
    taken = "" if runs else port_taken(config.box.host, config.box.port)
    yield _judged("port", not taken, "the box has it" if runs else taken or "free", "free", taken, "fail")
    cert, key = config.gateway.tls_cert_path, config.gateway.tls_key_path
    if cert is None or key is None:
        return
    wanted, remedy = "more than 14 days", "replace the files at [gateway] tls_cert_path and tls_key_path"
    try:
        left_s = Certificate(cert, key).expires_s - time.time()
    except ConfigInvalid as error:
        yield Finding("certificate", "fail", str(error), wanted, remedy)
        return
    left = f"{left_s / DAY_S:.0f} days left" if left_s > 0 else "has expired"
    yield _judged("certificate", left_s > WARN_BEFORE_S, left, wanted, remedy, "warn" if left_s > 0 else "fail")


def _box(data_dir: Path, runs: bool) -> Iterator[Finding]:
    if runs:
        troubles = "; ".join(f"{trouble['name']}: {trouble['why']}" for trouble in BoxFile.read(data_dir).troubles)
        remedy = "see `appliance status` and the logs in `logs` of the data directory"
        yield _judged("box", not troubles, troubles or "runs", "nothing degraded", remedy)
    elif ended := BoxFile.read(data_dir).fault:
        remedy = "`appliance up --detach` continues; see logs/main.log and logs/controller.log for the cause"
        yield Finding("box", "warn", f"does not run: {ended}", "runs, or was stopped without errors", remedy)
    else:
        yield Finding("box", "skip", "does not run")


def _keys(database: Path) -> Iterator[Finding]:
    query = "SELECT name FROM keys WHERE expires_s <= ? AND revoked_s IS NULL ORDER BY expires_s"
    wanted, names = "no key expires within a week", ""
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            names = ", ".join(name for (name,) in connection.execute(query, (time.time() + 7 * DAY_S,)))
    except sqlite3.Error:
        yield _judged("keys", None, "there is no box yet, or its database is from an earlier release", wanted, "")
        return
    remedy = "`appliance key limit NAME --expires 90d` extends a key; `appliance key list` shows the dates"
    yield _judged("keys", not names, f"expiring: {names}" if names else wanted, wanted, remedy)


def _backup(newest: Path) -> Iterator[Finding]:
    last = read_last(newest)
    age_s = time.time() - last.made_s if last else math.inf
    found = f"{age_s / 3600:.1f} h old, at {last.where}" if last else "none yet"
    remedy = "run `appliance backup make PLACE` daily by a systemd timer or cron"
    yield _judged("backup", age_s <= BACKUP_LATE_S, found, f"at most {BACKUP_LATE_S / 3600:g} h, elsewhere", remedy)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.boot.doctor", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="JSON file with the resolved configuration")
    parser.add_argument("--runs", action="store_true", help="the box of this configuration is up")
    options = parser.parse_args(argv)
    results = findings(load_resolved(options.config), runs=options.runs)
    print(json.dumps({"exit_code": exit_code(results), "at_s": time.time(), "data": [*map(asdict, results)]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
