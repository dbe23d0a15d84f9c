"""Reads how much memory is available to the box, in the machine or in an enclosing control group with less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 2**60
_CGROUPS = Path("sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory in bytes of the machine, or of the enclosing control group with the least free memory (`where`).
    `stalled`: PSI's "full avg10" in percent, 0 if the kernel does not report it."""

    total: int
    available: int
    stalled: float = 0.0
    where: str = "this machine"
    swap_used: int = 0


def read_memory(root: Path = Path("/")) -> MemoryReading:
    """Read the memory available to the box. `root`: prefix of /proc and /sys."""
    fields = dict(_fields(root / "proc/meminfo"))
    total, available = fields["MemTotal:"] * 1024, fields["MemAvailable:"] * 1024
    swap_used = (fields.get("SwapTotal:", 0) - fields.get("SwapFree:", 0)) * 1024
    where = "this machine"
    for name, limit, free in _groups(root):
        if limit < total and free < available:
            total, available, where = limit, max(0, free), f"control group {name}"
    return MemoryReading(total, available, _stalled(root), where, swap_used)


def _fields(path: Path) -> Iterator[tuple[str, int]]:
    for line in path.read_text().splitlines():
        name, value, *_ = line.split()
        if value.isdigit():
            yield name, int(value)


def _stalled(root: Path) -> float:
    """Percent of the last ten seconds in which all processes stalled on memory at once (PSI)."""
    try:
        lines = (root / "proc/pressure/memory").read_text().splitlines()
    except OSError:
        return 0.0  # the kernel lacks PSI or does not report it
    full = next((line for line in lines if line.startswith("full ")), "")
    return next((float(part[6:]) for part in full.split() if part.startswith("avg10=")), 0.0)


def _groups(root: Path) -> Iterator[tuple[str, int, int]]:
    """(name, limit, free) of every control group above this process that has a limit. Page-cache pages count as free,
    since the kernel reclaims them before it kills. Tmpfs pages do not count as free."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file", "active_file")
            yield from _chain(root / _CGROUPS, path, names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
            yield from _chain(root / _CGROUPS / "memory", path, names)


def _chain(mount: Path, path: str, names: tuple[str, str, str, str]) -> Iterator[tuple[str, int, int]]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        try:
            limit_text = (folder / names[0]).read_text().strip()
            used = int((folder / names[1]).read_text())
            cached = dict(_fields(folder / "memory.stat"))
        except (OSError, ValueError):
            continue  # not visible, or the root group, which has no limit
        if limit_text == "max" or int(limit_text) >= _UNLIMITED:
            continue
        reclaimable = sum(cached.get(name, 0) for name in names[2:])
        yield "/" + "/".join(parts[:depth]), int(limit_text), int(limit_text) - used + reclaimable
