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

from runtime.replace_file import replace_file

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
    """Snapshots of the workers: files `BUS_SOCKET.NAME.metrics`, which need no durability. name: of this worker."""

    def __init__(self, bus_socket: str, name: str):
        self._own = Path(f"{bus_socket}.{name}.metrics")
        self._pattern = f"{Path(bus_socket).name}.*.metrics"
        self._written_s = -WRITE_EVERY_S

    def due(self, now_s: float) -> bool:
        return now_s - self._written_s >= WRITE_EVERY_S

    def write(self, text: str, now_s: float) -> None:
        """Replace this worker's snapshot. A full disk loses a snapshot, nothing else."""
        self._written_s = now_s
        with contextlib.suppress(OSError):
            replace_file(self._own, text.encode())

    def others(self) -> list[str]:
        """The last snapshots of the other workers."""
        texts = []
        for path in sorted(self._own.parent.glob(self._pattern)):
            with contextlib.suppress(OSError):
                if path != self._own and time.time() - path.stat().st_mtime < STALE_S:
                    texts.append(path.read_text())
        return texts
