"""Which nodes were taken out of the box, in a file beside its certificate authority: `appliance node remove` writes it,
what listens for nodes reads it whenever one comes.

A certificate counts as removed if it is for such a name and was given out before the removal: a machine that joins
under the same name with a new token gets a later one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKDATED_S = 86400.0
"""A certificate is valid from so long before it was given out, since clocks differ."""


@dataclass(frozen=True, slots=True)
class RemovedNodes:
    """`file`: {name: {"before_s": Unix time of the removal, "out": whether the name has not joined anew}}. A file that
    cannot be read is an error (ValueError, OSError), not an empty list."""

    file: Path

    def remove(self, name: str, now_s: float | None = None) -> None:
        with self._alone():
            self._write({**self._read(), name: {"before_s": time.time() if now_s is None else now_s, "out": True}})

    def joined_anew(self, name: str) -> None:
        """A machine has this name again, with a new certificate; older ones of the name stay removed."""
        with self._alone():
            there = self._read()
            if name in there:
                self._write({**there, name: {**there[name], "out": False}})

    def out(self) -> frozenset[str]:
        """Names that are no node's now."""
        return frozenset(name for name, entry in self._read().items() if entry["out"])

    def any(self) -> bool:
        return bool(self._read())

    def has(self, certificate: Mapping[str, Any]) -> bool:
        """`certificate`: as `getpeercert` of a connection gives it."""
        names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
        entries = [entry for name, entry in self._read().items() if name in names]
        given_s = ssl.cert_time_to_seconds(certificate["notBefore"]) + BACKDATED_S
        return any(given_s <= entry["before_s"] for entry in entries)

    def _read(self) -> dict[str, Any]:
        try:
            return json.loads(self.file.read_text())
        except FileNotFoundError:
            return {}

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """The command that removes a node and the box that takes one in are two processes: no change is lost."""
        with open(self.file.with_suffix(".lock"), "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, entries: Mapping[str, Any]) -> None:
        new = self.file.with_suffix(".new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(entries, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.file)
