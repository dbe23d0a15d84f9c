"""Writes Prometheus' text format 0.0.4 and merges the series of one gateway's workers into one answer.

Every worker keeps a snapshot of its series beside the bus socket; the scraped worker adds those of the others to its
own, each with its label `worker`. So to Prometheus a restarted worker resets only its own series. Series are text from
the worker that counts them: as objects they took the loop of the scraped one ten times as long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import orjson

from runtime.replace_file import SUFFIX, replace_file

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
WRITE_EVERY_S = 1.0
# A worker that has not written for this long is dead; its successor writes to the same file.
STALE_S = 10.0


class Family(NamedTuple):
    """All series of one name. kind: counter, gauge or histogram. lines: their samples as text, each of them a line or
    several."""

    name: str
    kind: str
    text: str
    lines: list[str]


def line(name: str, labels: str, value: float) -> str:
    """labels: as `labels` writes them; may be empty."""
    return f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"


def labels(pairs: Mapping[str, str]) -> str:
    """'a="x",b="y"', escaped, without braces."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs.items())


def render(families: Iterable[Family]) -> bytes:
    """The text; families of the same name become one, as the format demands."""
    merged: dict[str, Family] = {}
    for family in families:
        merged.setdefault(family.name, family._replace(lines=[])).lines.extend(family.lines)
    out: list[str] = []
    for family in merged.values():
        out += (f"# HELP {family.name} {family.text}", f"# TYPE {family.name} {family.kind}", *family.lines)
    return ("\n".join(out) + "\n").encode()


class WorkerSnapshots:
    """`name`: of this worker. Files are `BUS_SOCKET.metrics.NAME`; they need no durability."""

    def __init__(self, bus_socket: str, name: str):
        self.name = name
        self._prefix = Path(f"{bus_socket}.metrics.")
        self._written_s = 0.0

    def due(self, now_s: float) -> bool:
        return now_s - self._written_s >= WRITE_EVERY_S

    def write(self, families: Iterable[Family], now_s: float) -> None:
        """Replace this worker's snapshot. A full disk loses a snapshot, nothing else."""
        self._written_s = now_s
        path = Path(f"{self._prefix}{self.name}")
        rows = [(family.name, family.kind, family.text, "\n".join(family.lines)) for family in families]
        data = orjson.dumps({"at_s": time.time(), "families": rows})
        with contextlib.suppress(OSError):
            replace_file(path, data)

    def joined(self, own: Iterable[Family]) -> list[Family]:
        """Own series and the last snapshots of the other workers (at most WRITE_EVERY_S and a sweep old)."""
        found = list(own)
        oldest_s = time.time() - STALE_S
        for path in sorted(self._prefix.parent.glob(self._prefix.name + "*")):
            name = path.name.removeprefix(self._prefix.name)
            if name == self.name or name.endswith(SUFFIX):
                continue
            with contextlib.suppress(OSError, orjson.JSONDecodeError):
                data = orjson.loads(path.read_bytes())
                if data["at_s"] >= oldest_s:
                    found += [
                        Family(called, kind, text, [lines] if lines else [])
                        for called, kind, text, lines in data["families"]
                    ]
        return found


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
