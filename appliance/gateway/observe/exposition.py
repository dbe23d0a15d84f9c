"""Joins the Prometheus series of one gateway's workers into one answer.

Every worker keeps a snapshot of its series alongside the bus socket; the scraped worker adds those of the others to its
own. Each series has the label `worker`, so that to Prometheus a restarted worker resets only its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from runtime.replace_file import SUFFIX, replace_file

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4.encode()
WRITE_EVERY_S: Final = 5.0
STALE_S: Final = 30.0
"""Age of a snapshot whose worker is gone; its successor writes to the same file."""


def joined(texts: Iterable[str]) -> bytes:
    """One text of several: the samples of one name are together, as the format requires."""
    families: dict[str, list[str]] = {}
    for text in texts:
        for family in f"\n{text.rstrip()}".split("\n# HELP ")[1:]:
            about, kind, *samples = family.split("\n")
            families.setdefault(f"# HELP {about}\n{kind}", []).extend(samples)
    return "".join("\n".join((head, *samples)) + "\n" for head, samples in families.items()).encode()


class WorkerSnapshots:
    """Snapshots of the workers: files `BUS_SOCKET.metrics.NAME`, which need no durability. name: of this worker."""

    def __init__(self, bus_socket: str, name: str):
        self.name = name
        self._prefix = Path(f"{bus_socket}.metrics.")
        self._written_s = -WRITE_EVERY_S

    def due(self, now_s: float) -> bool:
        return now_s - self._written_s >= WRITE_EVERY_S

    def write(self, text: str, now_s: float) -> None:
        """Replace this worker's snapshot. A full disk loses a snapshot, nothing else."""
        self._written_s = now_s
        with contextlib.suppress(OSError):
            replace_file(Path(f"{self._prefix}{self.name}"), text.encode())

    def others(self) -> list[str]:
        """The last snapshots of the other workers."""
        found = []
        for path in sorted(self._prefix.parent.glob(self._prefix.name + "*")):
            if path.name == self._prefix.name + self.name or path.name.endswith(SUFFIX):
                continue
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime < STALE_S:
                    found.append(path.read_text())
        return found
