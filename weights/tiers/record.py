"""Names of versions in all tiers, and a packed tier's record of one version: its manifest, its pieces, its objects."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import NamedTuple

import zstandard

from weights.format.checksums import checksum
from weights.format.errors import IntegrityError, ObjectDamaged
from weights.format.manifest import KINDS, Manifest
from weights.format.names import decode_name, encode_name

MAX_RECORD_BYTES = 1 << 30


class Name(NamedTuple):
    """A version, an adapter or a snapshot in any tier. `kind` is one of `weights.format.manifest.KINDS`."""

    kind: str
    model: str
    version: str

    def __str__(self) -> str:
        return f"{self.kind} {self.version} of {self.model}"

    @property
    def key(self) -> str:
        """The key of its record. Raises InvalidName."""
        return f"records/{self.kind}s/{encode_name(self.model)}/{encode_name(self.version)}"

    @property
    def folder(self) -> str:
        """The prefix of the keys of its objects."""
        return f"objects/{self.key.removeprefix('records/')}/"

    @classmethod
    def of_key(cls, key: str) -> Name | None:
        """The name whose record has this key; None if it is not a record's key."""
        parts = key.split("/")
        if len(parts) != 4 or parts[0] != "records" or parts[1] not in {f"{kind}s" for kind in KINDS}:
            return None
        model, version = decode_name(parts[2]), decode_name(parts[3])
        return cls(parts[1][:-1], model, version) if model and version else None


@dataclass(frozen=True)
class Record:
    """`objects`: (key below the folder, stored bytes), whose decoded bytes in order are those of `pieces`, (name,
    bytes). A piece is the header of a safetensors file, an auxiliary file or a tensor."""

    manifest: Manifest = field(repr=False)
    pieces: list[tuple[str, int]] = field(repr=False)
    objects: list[tuple[str, int]] = field(repr=False)

    @property
    def name(self) -> Name:
        return Name(self.manifest.kind, self.manifest.model, self.manifest.version)

    @property
    def stored_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.objects)

    def to_bytes(self) -> bytes:
        body = {"manifest": self.manifest.to_bytes().decode(), "pieces": self.pieces, "objects": self.objects}
        packed = zstandard.compress(json.dumps(body, separators=(",", ":")).encode(), 3)
        return checksum(packed).encode() + b"\n" + packed

    @classmethod
    def from_bytes(cls, raw: bytes, *, path: object) -> Record:
        """Raises IntegrityError if the bytes are not a valid record."""
        text, _, packed = raw.partition(b"\n")
        if text != checksum(packed).encode():
            raise ObjectDamaged("the record's own checksum does not match", path=path)
        try:
            body = json.loads(zstandard.ZstdDecompressor().decompress(packed, max_output_size=MAX_RECORD_BYTES))
            manifest = Manifest.from_bytes(body["manifest"].encode(), path=path)
            pieces, objects = (
                [(str(name), int(nbytes)) for name, nbytes in body[key]] for key in ("pieces", "objects")
            )
            return cls(manifest, pieces, objects)
        except (ValueError, KeyError, TypeError, zstandard.ZstdError) as error:
            if isinstance(error, IntegrityError):
                raise
            raise ObjectDamaged(f"malformed: {error}", path=path) from error
