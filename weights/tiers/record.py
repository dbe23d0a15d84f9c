"""Defines a packed tier's record of one version: its manifest, and which bytes of which objects form each piece.

A piece is a tensor, the header of a safetensors file, or an auxiliary file. A record carries a checksum over itself,
like a manifest. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from weights.format.checksums import checksum
from weights.format.errors import IntegrityError, ObjectDamaged
from weights.format.manifest import KINDS, Manifest
from weights.format.names import decode_name, encode_name
from weights.tiers import codec

FORMAT = 1
HEADER, AUX, TENSOR = "header:", "aux:", "tensor:"
_OBJECT = re.compile(r"[0-9a-f]{64}")


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

    @classmethod
    def of_key(cls, key: str) -> Name | None:
        """The name whose record has this key; None if it is not a record's key."""
        parts = key.split("/")
        if len(parts) != 4 or parts[0] != "records" or parts[1] not in {f"{kind}s" for kind in KINDS}:
            return None
        model, version = decode_name(parts[2]), decode_name(parts[3])
        return cls(parts[1][:-1], model, version) if model and version else None


class Part(NamedTuple):
    """`nbytes` from `offset` of the decoded object `object`."""

    object: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Record:
    """`pieces`: the parts of each piece in order, by its name. `objects`: stored bytes by object."""

    manifest: Manifest = field(repr=False)
    pieces: Mapping[str, tuple[Part, ...]] = field(repr=False)
    objects: Mapping[str, int] = field(repr=False)

    @property
    def name(self) -> Name:
        return Name(self.manifest.kind, self.manifest.model, self.manifest.version)

    def to_bytes(self) -> bytes:
        body = {
            "format": FORMAT,
            "manifest": self.manifest.to_bytes().decode(),
            "pieces": {name: [list(part) for part in parts] for name, parts in self.pieces.items()},
            "objects": dict(self.objects),
        }
        packed = codec.encode(json.dumps(body, separators=(",", ":"), sort_keys=True).encode(), codec="zstd", level=3)
        return checksum(packed).encode() + b"\n" + packed

    @classmethod
    def from_bytes(cls, raw: bytes, *, path: object) -> Record:
        """Raises IntegrityError if the bytes are not a valid record."""
        text, _, packed = raw.partition(b"\n")
        if text != checksum(packed).encode():
            raise ObjectDamaged("the record's own checksum does not match", path=path)
        try:
            body = json.loads(bytes(codec.decode(packed, name=path)))
            if body["format"] != FORMAT:
                raise ObjectDamaged(f"format {body['format']!r} is not known; this release reads {FORMAT}", path=path)
            pieces = {name: tuple(Part(*part) for part in parts) for name, parts in body["pieces"].items()}
            objects = body["objects"]
            if not all(_OBJECT.fullmatch(key) and type(nbytes) is int for key, nbytes in objects.items()):
                raise ValueError("an object's name or size is malformed")
            for part in (part for parts in pieces.values() for part in parts):
                if part.object not in objects or min(part.offset, part.nbytes) < 0:
                    raise ValueError(f"{part} is malformed")
            return cls(Manifest.from_bytes(body["manifest"].encode(), path=path), pieces, objects)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, IntegrityError):
                raise
            raise ObjectDamaged(f"malformed: {type(error).__name__} {str(error)[:120]}", path=path) from error


def object_key(name: str) -> str:
    return f"objects/{name[:2]}/{name}"
