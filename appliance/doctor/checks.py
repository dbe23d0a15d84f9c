"""The checks: each a question, and a pure function from what was read to a finding.

Thresholds: those of Azure's node health checks and NVIDIA's DCGM for devices, of systemd's and the kernel's
documentation for limits; where none is published, a number of ours with its reason beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from appliance.doctor.facts import Facts
from appliance.gateway.http.certificates import SAID_BEFORE_S
from appliance.memory.memory_policy import STALLED_PERCENT, gb
from runtime.devices.kinds import HOST

State = Literal["ok", "warn", "fail", "skip"]

OPEN_FILES = 65_536  # each engine, rank and client connection takes some
PROCESSES = 32_768  # eight engines and eight ranks have some thousand threads each at most
MAP_COUNT = 262_144  # a checkpoint of many shards is mapped piece by piece
SYNC_S = 0.010  # each change that the box acknowledges waits for one
SHM_SHARE = 0.5  # of the host's memory: versions and snapshots lie there
DISK_SHARE = 0.05
MARGIN_C = 5
BACKUP_LATE_S = 26 * 3600.0  # as the alert BackupOld
FEATURES = {"AVX2": "avx2", "AVX-512": "avx512f", "AVX-512 BF16": "avx512_bf16", "AMX": "amx_tile"}
REMOTE_FILE_SYSTEMS = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "fuse.glusterfs", "ceph", "lustre")


@dataclass(frozen=True, slots=True)
class Finding:
    """found, wanted: as a person reads them. remedy: what to do; "" where nothing is to be done."""

    check: str
    state: State
    found: str
    wanted: str = ""
    remedy: str = ""


def findings(facts: Facts) -> list[Finding]:
    return [finding for check in _CHECKS for finding in check(facts)]


def exit_code(found: list[Finding]) -> int:
    """0: all is well; 1: something fails; 2: something is to be looked at."""
    states = {finding.state for finding in found}
    return 1 if "fail" in states else 2 if "warn" in states else 0


def _judged(check: str, well: bool | None, found: str, wanted: str, remedy: str, state: State = "fail") -> Finding:
    if well is None:
        return Finding(check, "skip", found or "not reported here", wanted)
    return Finding(check, "ok", found, wanted) if well else Finding(check, state, found, wanted, remedy)


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    yield _judged(
        "memory available",
        memory.available >= memory.total // 20,
        f"{gb(memory.available)} of {gb(memory.total)} ({memory.where})",
        "a twentieth of it",
        "`ps -eo pid,rss,comm --sort=-rss | head` names who has it: end what is not the box's, or give it less to do",
        "warn",
    )
    yield _judged(
        "memory pressure",
        memory.stalled < STALLED_PERCENT,
        f"all processes stalled for {memory.stalled:.0f} % of the last ten seconds",
        f"less than {STALLED_PERCENT:.0f} %",
        "`ps -eo pid,rss,comm --sort=-rss | head` names who has the memory: end what is not the box's",
        "warn",
    )
    yield _judged(
        "swap",
        memory.swap_used < 2**30,
        f"{gb(memory.swap_used)} in use",
        "less than 1 GB",
        "engines that are swapped out answer late: `swapoff -a`, with enough memory free",
        "warn",
    )
    kills = facts.oom_kills
    yield _judged(
        "killed for memory",
        None if kills is None else kills == 0,
        "" if kills is None else f"{kills} processes since the machine began",
        "0",
        "`journalctl -k | grep -i oom` names them; raise [box] memory_reserve_bytes if they were the box's",
        "warn",
    )


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    yield _judged(
        "shared memory",
        facts.shm_bytes >= int(facts.memory.total * SHM_SHARE),
        f"{gb(facts.shm_bytes)}, {gb(facts.shm_free_bytes)} free",
        f"half of the memory, {gb(int(facts.memory.total * SHM_SHARE))}",
        "`mount -o remount,size=80% /dev/shm`, or --shm-size of the container: weights are handed over there",
        "warn",
    )


def _disk(facts: Facts) -> Iterator[Finding]:
    share = facts.disk_free_bytes / max(1, facts.disk_bytes)
    yield _judged(
        "disk free",
        share >= DISK_SHARE,
        f"{gb(facts.disk_free_bytes)} of {gb(facts.disk_bytes)} ({share:.0%})",
        f"at least {DISK_SHARE:.0%}",
        "`appliance tier list` and `appliance file list` show what takes it: `appliance model rm`, "
        "`appliance file rm`, a shorter [controller.retention], or the data directory on a larger disk",
    )
    remote = facts.file_system.startswith(REMOTE_FILE_SYSTEMS)
    yield _judged(
        "file system",
        None if not facts.file_system else not remote,
        facts.file_system,
        "one of this machine",
        "the database's log wants shared memory of one host: put the data directory on a local disk, and copy it "
        "away with `appliance backup make PLACE`",
    )
    slow = sorted(facts.sync_s)[-2] if len(facts.sync_s) > 1 else None
    yield _judged(
        "disk sync",
        None if slow is None else slow < SYNC_S,
        "" if slow is None else f"{slow * 1e3:.1f} ms, the slowest but one of {len(facts.sync_s)}",
        f"under {SYNC_S * 1e3:.0f} ms",
        "every change waits for it: a local SSD, or find who else writes to this disk",
        "warn",
    )


def _limits(facts: Facts) -> Iterator[Finding]:
    def at_least(check: str, bound: int | None, wanted: int, remedy: str) -> Finding:
        found = "unlimited" if bound is None else f"{bound:,}"
        return _judged(check, bound is None or bound >= wanted, found, f"{wanted:,}", remedy, "warn")

    yield at_least(
        "open files",
        facts.open_files,
        OPEN_FILES,
        f"LimitNOFILE={OPEN_FILES} in the unit, or as root `ulimit -n {OPEN_FILES}` before `appliance up`",
    )
    yield at_least(
        "processes",
        facts.processes,
        PROCESSES,
        "TasksMax=infinity in the unit, --pids-limit=-1 of the container, `sysctl kernel.pid_max=4194304`",
    )
    if facts.map_count is not None:
        yield at_least("memory maps", facts.map_count, MAP_COUNT, f"`sysctl vm.max_map_count={MAP_COUNT}`")
    if facts.locks_pages:
        yield _judged(
            "locked memory",
            facts.locked_bytes is None,
            "unlimited" if facts.locked_bytes is None else gb(facts.locked_bytes),
            "unlimited",
            "LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1: copies to the devices are slower without",
            "warn",
        )


def _kernel(facts: Facts) -> Iterator[Finding]:
    yield _judged(
        "environment",
        None if facts.steered is None else not facts.steered,
        "" if facts.steered is None else ", ".join(facts.steered) or "nothing that changes how it computes",
        "none of these set",
        "take them out of the environment that the box is started with, once they have served their purpose",
        "warn",
    )
    yield _judged(
        "huge pages",
        facts.huge_pages,
        {None: "", True: "when a program asks, or always", False: "never"}[facts.huge_pages],
        "madvise or always",
        "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`: large copies touch fewer pages",
        "warn",
    )
    yield _judged(
        "overcommit",
        None if facts.overcommit is None else facts.overcommit != 2,
        f"vm.overcommit_memory is {facts.overcommit}",
        "0 or 1",
        "`sysctl vm.overcommit_memory=0`: engines are forked, and the kernel would count their memory twice",
    )
    yield _judged(
        "processor governor",
        None if not facts.governors else facts.governors == {"performance"},
        ", ".join(sorted(facts.governors)),
        "performance",
        "`cpupower frequency-set -g performance`",
        "warn",
    )
    if facts.numa_nodes > 1:
        yield _judged(
            "NUMA balancing",
            None if facts.numa_balancing is None else not facts.numa_balancing,
            "on" if facts.numa_balancing else "off",
            "off",
            "`sysctl kernel.numa_balancing=0`: engines and ranks stay near their device",
            "warn",
        )
    yield _judged(
        "clock",
        facts.clock_synchronised,
        "synchronised" if facts.clock_synchronised else "nothing synchronises it",
        "synchronised",
        "`apt-get install chrony`, or another that synchronises it: certificates, quotas and other nodes go by it",
        "warn",
    )


def _processor(facts: Facts) -> Iterator[Finding]:
    """Of other makers than x86's the kernel names other features, on which nothing here rests."""
    if not any(name in facts.features for name in ("sse2", "avx2")):
        yield Finding("processor", "skip", "not an x86 processor, or the kernel does not name its features")
        return
    has = ", ".join(f"{name} {'yes' if flag in facts.features else 'no'}" for name, flag in FEATURES.items())
    hosts = not facts.devices or any(device.kind == HOST.name for device in facts.devices)
    means = _meaning(facts.features) if hosts else ""
    yield _judged(
        "processor",
        "avx2" in facts.features or not hosts,
        f"{has}{means and f': {means}'}",
        "avx2",
        "no engine computes on this processor: each ends by SIGILL. Take a machine with AVX2, or with a GPU",
    )
    if "amx_tile" in facts.features:
        yield _judged(
            "AMX",
            facts.grants_tiles,
            "granted on request" if facts.grants_tiles else "this kernel grants it to no process",
            "granted",
            "engines end by SIGILL: a kernel of Linux 5.16 or later, and no `clearcpuid` on its command line",
        )


def _meaning(features: Collection[str]) -> str:
    if "amx_tile" in features:
        return "engines compute in bfloat16 on tiles; of two nearly equal tokens another batch may take the other one"
    if "avx512_bf16" in features:
        return "engines compute in bfloat16"
    quantised = "" if "avx512f" in features else ", and none serves a quantised checkpoint"
    return f"bfloat16 is emulated, at a fraction of the speed of float32{quantised}"


def _devices(facts: Facts) -> Iterator[Finding]:
    kinds = sorted({device.kind for device in facts.devices})
    count = f"{len(facts.devices)} of kind {', '.join(kinds)}" if facts.devices else "none"
    yield _judged("devices", not facts.refused, facts.refused or count, "devices that can be used", facts.refused)
    for device in facts.devices:
        if device.unfit:
            remedy = f"docs/gpu.md has what to do; then `appliance gpu undrain {device.id}`"
            yield Finding(f"device {device.id}", "fail", device.unfit, "", remedy)
    for reading in facts.readings or ():
        wrong = [reason for reason in (reading.lost, reading.unfit, *reading.faults) if reason]
        hot = None
        if reading.temperature_c is not None and reading.slowdown_c is not None:
            hot = reading.slowdown_c - reading.temperature_c <= MARGIN_C
        heat = "" if hot is None else f"{reading.temperature_c} °C of {reading.slowdown_c} °C"
        errors = f"{reading.ecc_uncorrected} uncorrected memory errors" if reading.ecc_uncorrected else ""
        slowed = " and ".join(word.replace("_", " ") for word in reading.throttled if word != "power_cap")
        slowed = f"slowed down by {slowed}" if slowed else ""
        found = "; ".join([*wrong, *filter(None, (errors, slowed, heat))]) or "answers"
        state: State = "fail" if wrong else "warn" if hot or errors or slowed else "ok"
        name = reading.device_id
        remedy = (
            f"`appliance gpu drain {name}`; cool or reset it (docs/gpu.md); `appliance gpu undrain {name}`"
            if state != "ok"
            else ""
        )
        yield Finding(f"device {name}", state, found, "no fault, cool, not slowed down", remedy)
    for one in facts.remarks:
        yield _judged(one.check, one.well, one.found, one.wanted, one.remedy, "fail" if one.fails else "warn")
    if facts.numa_nodes > 1 and facts.locks_pages:
        lost = [device.id for device in facts.devices if device.numa_node is None]
        yield _judged(
            "place of devices",
            not lost,
            f"the processors near {', '.join(lost)} are not known" if lost else "known",
            "known",
            "the machine's firmware says it (NPS on AMD, SNC on Intel): without it copies cross sockets",
            "warn",
        )
    if not facts.runs and facts.devices:
        yield _judged(
            "others' programs",
            None if facts.readings is None else not facts.foreign,
            "; ".join(facts.foreign) or ("" if facts.readings is None else "none on the devices"),
            "none",
            "end them: what they hold, engines and ranks will not find",
            "warn",
        )


def _endpoint(facts: Facts) -> Iterator[Finding]:
    yield _judged(
        "port",
        not facts.port_taken,
        "the box has it" if facts.runs else facts.port_taken or "free",
        "free, or the box's",
        facts.port_taken,
    )
    pair = "put a chain and its key into the files that [gateway] tls_cert_path and tls_key_path name"
    if facts.certificate_fault:
        yield Finding("certificate", "fail", facts.certificate_fault, "a PEM chain and its key", pair)
    elif facts.certificate_expires_s is not None:
        left_s = facts.certificate_expires_s - facts.now_s
        yield _judged(
            "certificate",
            left_s > SAID_BEFORE_S,
            f"{left_s / 86_400:.0f} days left" if left_s > 0 else "has expired",
            "more than 14 days",
            f"{pair}: they are loaded without a restart",
            "fail" if left_s <= 0 else "warn",
        )


def _quarantine(facts: Facts) -> Iterator[Finding]:
    for found in facts.quarantined:
        size = gb(found.nbytes) if found.nbytes >= 1e6 else f"{found.nbytes:,} bytes"
        yield Finding(
            "quarantine",
            "warn",
            f"{found.folder}, which the database did not name at a start (files: {found.files}, {size})",
            "nothing",
            "put the database back that names them, and they return at the next start; or send one again, `appliance "
            f"file upload {found.folder}/files/FILE`; what nobody needs goes by `rm -r {found.folder}`",
        )


def _box(facts: Facts) -> Iterator[Finding]:
    if facts.runs:
        yield _judged(
            "box",
            not facts.troubles,
            "; ".join(facts.troubles) or "runs",
            "nothing degraded",
            "`appliance status` says since when; the logs in `logs` of the data directory have the traceback",
            "warn",
        )
    elif facts.ended:
        remedy = "`appliance up --detach` goes on where it was; logs/main.log and logs/controller.log say what happened"
        yield Finding("box", "warn", f"does not run: {facts.ended}", "runs, or ended in order", remedy)
    else:
        yield Finding("box", "skip", "does not run")
    yield _judged(
        "keys",
        None if facts.ending_keys is None else not facts.ending_keys,
        f"{', '.join(facts.ending_keys or ())} expire within a week"
        if facts.ending_keys
        else "none expires within a week",
        "none expires within a week",
        "`appliance key limit NAME --expires 90d` lets one last longer; `appliance key list` has the dates",
        "warn",
    )
    if facts.backup is None:
        remedy = "`appliance backup make PLACE`, every night by a timer"
        yield Finding("backup", "warn", "none yet", "one elsewhere", remedy)
        return
    age_s = facts.now_s - facts.backup.made_s
    yield _judged(
        "backup",
        0 <= age_s <= BACKUP_LATE_S,
        f"{age_s / 3600:.1f} h old, at {facts.backup.where}",
        f"at most {BACKUP_LATE_S / 3600:g} h",
        "`appliance backup make PLACE`; the timer that runs it has the reason",
        "warn",
    )


_CHECKS = (_devices, _processor, _memory, _shared_memory, _disk, _limits, _kernel, _endpoint, _quarantine, _box)
