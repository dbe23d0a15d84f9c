"""Names of versions, adapters and snapshots in every tier."""

from __future__ import annotations

from typing import NamedTuple

from weights.format.names import encode_name


class Name(NamedTuple):
    """`kind` is one of `weights.format.manifest.KINDS`."""

    kind: str
    model: str
    version: str

    def __str__(self) -> str:
        return f"{self.kind} {self.version} of {self.model}"

    @property
    def key(self) -> str:
        """Its relative path at a remote place. Raises InvalidName."""
        return f"{self.kind}s/{encode_name(self.model)}/{encode_name(self.version)}"
