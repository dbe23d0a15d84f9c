"""Which nodes were taken out of the box, in a file beside its certificate authority: `appliance node remove` writes it,
what listens for nodes reads it whenever one comes.

A certificate counts as removed if it is for such a name and was given out before the removal: a machine that joins
under the same name with a new token gets a later one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.replace_file import replace_file

BACKDATED_S = 86400.0
"""A certificate is valid from this long before it was given out, since clocks differ."""


@dataclass(frozen=True, slots=True)
class RemovedNodes:
    """`file`: {name: {"before_s": Unix time of the removal, "out": whether the name has not joined again}}. A file that
    cannot be read is an error (ValueError, OSError), not an empty list."""

    file: Path

    def remove(self, name: str, now_s: float | None = None) -> None:
        now_s = time.time() if now_s is None else now_s
        with self._alone():
            # A clock that was set back since its certificate was given out must not make that a later one.
            before_s = max(now_s, self._given().get(name, 0.0))
            self._write({**self._read(), name: {"before_s": before_s, "out": True}})

    def give(self, name: str, may: Callable[[], None] = lambda: None) -> float:
        """The Unix time of a certificate that is to be given out for this name now: later than its removal, whatever
        the clock says. It is noted, beside the list.

        may: raises what refuses; no removal comes between it and the certificate."""
        with self._alone():
            may()
            entry = self._read().get(name)
            given_s = max(time.time(), 0.0 if entry is None else math.floor(entry["before_s"]) + 1)
            self._write({**self._given(), name: given_s}, self._given_file)
        return given_s

    def joined_anew(self, name: str) -> None:
        """A machine has this name again, with a new certificate; older ones of the name stay removed. Nothing happens
        if it was removed since it was given that one."""
        with self._alone():
            there = self._read()
            if name in there and self._given().get(name, 0.0) > there[name]["before_s"]:
                self._write({**there, name: {**there[name], "out": False}})

    def out(self) -> frozenset[str]:
        """Names that no node has now."""
        return frozenset(name for name, entry in self._read().items() if entry["out"])

    def certified(self) -> frozenset[str]:
        """Names that have a certificate which counts, the box's own among them, whether they are nodes now or not."""
        return frozenset(self._given()) - self.out()

    def changed(self) -> tuple[int, int] | None:
        """What is another after each removal; None before the first."""
        try:
            status = self.file.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def any(self) -> bool:
        return bool(self._read())

    def has(self, certificate: Mapping[str, Any]) -> bool:
        """`certificate`: as `getpeercert` of a connection gives it."""
        names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
        entries = [entry for name, entry in self._read().items() if name in names]
        given_s = ssl.cert_time_to_seconds(certificate["notBefore"]) + BACKDATED_S
        return any(given_s <= entry["before_s"] for entry in entries)

    def _read(self) -> dict[str, Any]:
        return _object_in(self.file)

    @property
    def _given_file(self) -> Path:
        """{name: Unix time of its newest certificate}."""
        return self.file.with_name("given.json")

    def _given(self) -> dict[str, float]:
        return _object_in(self._given_file)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """The command that removes a node and the box that takes one in are two processes: no change is lost."""
        with open(self.file.with_suffix(".lock"), "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, entries: Mapping[str, Any], into: Path | None = None) -> None:
        replace_file(into or self.file, json.dumps(entries).encode(), durable=True)


def _object_in(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
