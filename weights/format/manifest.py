"""Defines a version's manifest: files, checksums, lineage. Stored as manifest.json beside the files.

The manifest contains a checksum of its own canonical text, which detects a flipped bit in it like one in a file.
Checksums of safetensors files may be missing (null) until the version is sealed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from weights.format.errors import IntegrityError, InvalidName
from weights.format.files import open_regular
from weights.format.layout import Layout
from weights.format.names import MANIFEST_FILE, Name, check_file_name

FORMAT = 2
MAX_MANIFEST_BYTES = 16 << 20


def checksum(data: bytes | memoryview | blake3) -> str:
    """The BLAKE3 checksum of bytes, or of those that a hasher has read, as "blake3:<64 hex digits>".

    It runs at about 4.5 GB/s per core with AVX-512, without the GIL, and unlike a CRC does not collide by construction.
    """
    return f"blake3:{(data if isinstance(data, blake3) else blake3(data)).hexdigest()}"


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes and the checksum of its bytes, None if unsealed. `header`: the checksum of a safetensors
    file's header, None for any other file."""

    nbytes: int
    checksum: str | None
    header: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Identity, lineage (`meta`, free JSON) and contents of one version. `created_s` is Unix time, `tensors` the number
    of tensors."""

    kind: str
    model: str
    version: str
    created_s: float
    meta: Mapping[str, Any]
    tensors: int
    files: Mapping[str, FileRecord] = field(repr=False)

    @property
    def name(self) -> Name:
        return Name(self.kind, self.model, self.version)

    @property
    def sealed(self) -> bool:
        """Whether every file has its checksum."""
        return all(record.checksum is not None for record in self.files.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest itself."""
        return sum(record.nbytes for record in self.files.values())

    @classmethod
    def describe(
        cls, layout: Layout, name: Name, *, meta: Mapping[str, Any], aux_files: Mapping[str, bytes]
    ) -> Manifest:
        """The manifest of `layout` and these auxiliary files, created now and not sealed."""
        files = {file.name: FileRecord(file.nbytes, None, checksum(file.header)) for file in layout.files}
        files |= {file: FileRecord(len(data), checksum(data)) for file, data in aux_files.items()}
        return cls(*name, time.time(), meta, len(layout), files)

    def with_checksums(self, checksums: Mapping[str, str]) -> Manifest:
        """The same manifest with these checksums of files."""
        files = {name: replace(file, checksum=checksums.get(name, file.checksum)) for name, file in self.files.items()}
        return replace(self, files=files)

    def to_bytes(self) -> bytes:
        """Canonical JSON. Raises IntegrityError if `meta` is not JSON."""
        try:
            text = _canonical({"format": FORMAT, **asdict(self)})
        except (TypeError, ValueError, RecursionError) as error:
            raise IntegrityError(f"meta must be JSON: {error}", path=self.model, file=MANIFEST_FILE) from error
        return b'{"manifest_checksum":"%s",\n"body":%s}\n' % (checksum(text).encode(), text)

    @classmethod
    def from_bytes(cls, raw: bytes, *, path: object) -> Manifest:
        """Parses the manifest and checks everything that needs no files. Raises IntegrityError."""

        def fault(reason: str) -> IntegrityError:
            return IntegrityError(reason, path=path, file=MANIFEST_FILE)

        try:
            outer = json.loads(raw)
            body = outer["body"]
            if checksum(_canonical(body)) != outer["manifest_checksum"]:
                raise fault("its own checksum does not match: the manifest was damaged or edited")
            if (number := body.pop("format")) != FORMAT:
                raise fault(f"format {number!r} is not known; this version reads {FORMAT}")
            files = {check_file_name(name): FileRecord(**record) for name, record in body.pop("files").items()}
            manifest = cls(**body, files=files)
            if not manifest.name.key or not isinstance(manifest.meta, dict):
                raise ValueError("meta must be an object")
            return manifest
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidName) as error:
            raise fault(f"malformed: {type(error).__name__} {str(error)[:120]}") from error

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of a version directory. Raises IntegrityError."""
        with open_regular(directory, MANIFEST_FILE) as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
        if len(raw) > MAX_MANIFEST_BYTES:
            raise IntegrityError(f"larger than {MAX_MANIFEST_BYTES} bytes", path=directory, file=MANIFEST_FILE)
        return cls.from_bytes(raw, path=directory)

    def check_layout(self, layout: Layout, *, path: object) -> None:
        """Raises IntegrityError unless `layout`, read from the files, equals the recorded one."""
        actual = {file.name: (file.nbytes, checksum(file.header)) for file in layout.files}
        recorded = {name: (file.nbytes, file.header) for name, file in self.files.items() if file.header}
        for name in {**actual, **recorded}:
            if actual.get(name) != recorded.get(name):
                reason = "size or header differ from the manifest, or the file is missing"
                raise IntegrityError(reason, path=path, file=name)


def _canonical(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()
