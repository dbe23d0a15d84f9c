"""Reads the energy that the host's processors have drawn, from the counters that Linux calls RAPL.

Since Linux 5.10 root alone may read them, unless an administrator gives the box's group leave
(docs/operations.md, Energy).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ZONES = Path("/sys/class/powercap")


@dataclass(slots=True)
class _Zone:
    folder: Path
    wraps_at_uj: int
    last_uj: int
    sum_uj: int = 0


class HostEnergy:
    """Counts the energy of all processor packages, and of their memory where the kernel counts it apart."""

    def __init__(self, zones: list[_Zone]):
        self._zones = zones

    @classmethod
    def find(cls, folder: Path | None = None) -> HostEnergy | None:
        """None: this machine has no such counters, or this process may not read them."""
        found = []
        for zone in sorted((folder or ZONES).glob("intel-rapl:*")):  # the name on AMD's processors too
            try:
                name = (zone / "name").read_text().strip()
                if not name.startswith("package") and name != "dram":  # parts of a package, or a platform around it
                    continue
                found.append(_Zone(zone, _number(zone / "max_energy_range_uj"), _number(zone / "energy_uj")))
            except (OSError, ValueError):
                continue
        has_package = any(zone.folder.name.count(":") == 1 for zone in found)
        return cls(found) if has_package else None

    def joules(self) -> float | None:
        """Joules drawn since this object was made; None if a counter cannot be read any more. Each counter begins again
        at its `max_energy_range_uj`, at full load after some minutes, so call this more often than that."""
        try:
            for zone in self._zones:
                now_uj = _number(zone.folder / "energy_uj")
                drawn_uj = now_uj - zone.last_uj
                zone.sum_uj += drawn_uj if drawn_uj >= 0 else drawn_uj + zone.wraps_at_uj
                zone.last_uj = now_uj
        except (OSError, ValueError):
            return None
        return sum(zone.sum_uj for zone in self._zones) / 1e6


def _number(path: Path) -> int:
    return int(path.read_text())
