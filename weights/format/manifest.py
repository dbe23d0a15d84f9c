"""Defines a version's manifest: tensors, files, checksums, lineage. Stored as manifest.json beside the files.

The manifest contains a checksum of its own canonical text, which detects a flipped bit in it like one in a tensor.
Checksums of tensors may be missing (null) until the version is sealed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weights.format.checksums import checksum
from weights.format.errors import InvalidName, ManifestInvalid
from weights.format.files import open_regular
from weights.format.layout import Layout, TensorSpec
from weights.format.names import MANIFEST_FILE, check_file_name, encode_name

FORMAT = 1
KINDS = ("version", "adapter", "snapshot")
MAX_MANIFEST_BYTES = 256 << 20


@dataclass(frozen=True)
class TensorRecord:
    """A tensor's place (absolute byte range in `file`) and the checksum of its bytes, None if unsealed."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    checksum: str | None


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes; `checksum` covers the header of a safetensors file, all of any other file."""

    nbytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """Identity, lineage (`meta`, free JSON) and contents of one version. `created_s` is Unix time."""

    kind: str
    model: str
    version: str
    created_s: float
    meta: Mapping[str, Any]
    tensors: Mapping[str, TensorRecord] = field(repr=False)
    files: Mapping[str, FileRecord] = field(repr=False)
    aux_files: Mapping[str, FileRecord] = field(repr=False)

    @property
    def identity(self) -> tuple[str, str, str, float]:
        """Identity of this version: the same name with another creation time is another version."""
        return self.kind, self.model, self.version, self.created_s

    @property
    def sealed(self) -> bool:
        """Whether every tensor has its checksum."""
        return all(record.checksum is not None for record in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest itself."""
        return sum(record.nbytes for part in (self.files, self.aux_files) for record in part.values())

    @classmethod
    def describe(
        cls,
        layout: Layout,
        *,
        kind: str,
        model: str,
        version: str,
        created_s: float,
        meta: Mapping[str, Any],
        aux_files: Mapping[str, FileRecord],
        checksums: Mapping[str, str] | None = None,
    ) -> Manifest:
        """The manifest of `layout`, sealed if `checksums` (tensor name -> checksum) is given."""
        return cls(
            kind=kind,
            model=model,
            version=version,
            created_s=created_s,
            meta=meta,
            tensors={
                (spec := placed.spec).name: TensorRecord(
                    placed.file, spec.dtype, spec.shape, placed.start, placed.end, (checksums or {}).get(spec.name)
                )
                for placed in layout
            },
            files={file.name: FileRecord(file.nbytes, checksum(file.header)) for file in layout.files},
            aux_files=dict(aux_files),
        )

    def with_checksums(self, checksums: Mapping[str, str]) -> Manifest:
        """The same manifest with every tensor's checksum set."""
        return replace(
            self,
            tensors={name: replace(record, checksum=checksums[name]) for name, record in self.tensors.items()},
        )

    def to_bytes(self) -> bytes:
        """Canonical JSON. Raises ManifestInvalid if `meta` is not JSON."""
        body = {
            "format": FORMAT,
            "kind": self.kind,
            "model": self.model,
            "version": self.version,
            "created_s": self.created_s,
            "meta": dict(self.meta),
            "files": _files_body(self.files),
            "aux_files": _files_body(self.aux_files),
            "tensors": {name: vars(record) for name, record in self.tensors.items()},
        }
        try:
            text = _canonical(body)
        except (TypeError, ValueError, RecursionError) as error:
            raise ManifestInvalid(f"meta must be JSON: {error}", path=self.model, file=MANIFEST_FILE) from error
        return b'{"manifest_checksum":"%s",\n"body":%s}\n' % (checksum(text).encode(), text)

    @classmethod
    def from_bytes(cls, raw: bytes, *, path: object) -> Manifest:
        """Parses the manifest and checks everything that needs no files. Raises ManifestInvalid."""

        def fault(reason: str) -> ManifestInvalid:
            return ManifestInvalid(reason, path=path, file=MANIFEST_FILE)

        try:
            outer = json.loads(raw)
            body = outer["body"]
            if checksum(_canonical(body)) != outer["manifest_checksum"]:
                raise fault("its own checksum does not match: the manifest was damaged or edited")
            if body["format"] != FORMAT:
                raise fault(f"format {body['format']!r} is not known; this version reads {FORMAT}")
            if body["kind"] not in KINDS or not isinstance(body["meta"], dict):
                raise fault(f"kind must be one of {KINDS} and meta an object")
            encode_name(body["model"])
            encode_name(body["version"])
            files, tensors = _file_records(body["files"]), {}
            for name, fields in body["tensors"].items():
                record = TensorRecord(**{**fields, "shape": tuple(fields["shape"])})
                TensorSpec(name, record.dtype, record.shape)  # raises if it is none
                if record.file not in files or not 0 <= int(record.start) <= int(record.end):
                    raise fault(f"the place of tensor {name!r} is malformed")
                tensors[name] = record
            return cls(
                kind=body["kind"],
                model=body["model"],
                version=body["version"],
                created_s=float(body["created_s"]),
                meta=body["meta"],
                tensors=tensors,
                files=files,
                aux_files=_file_records(body["aux_files"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidName) as error:
            raise fault(f"malformed: {type(error).__name__} {str(error)[:120]}") from error

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of a version directory. Raises ManifestInvalid or UnsafeFile."""
        with open_regular(directory, MANIFEST_FILE) as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
        if len(raw) > MAX_MANIFEST_BYTES:
            raise ManifestInvalid(f"larger than {MAX_MANIFEST_BYTES} bytes", path=directory, file=MANIFEST_FILE)
        return cls.from_bytes(raw, path=directory)

    def check_layout(self, layout: Layout, *, path: object) -> None:
        """Raises ManifestInvalid unless `layout`, read from the files, equals the recorded one."""
        files = {file.name: FileRecord(file.nbytes, checksum(file.header)) for file in layout.files}
        places = {
            placed.spec.name: (placed.file, placed.spec.dtype, placed.spec.shape, placed.start, placed.end)
            for placed in layout
        }
        recorded = {name: (r.file, r.dtype, r.shape, r.start, r.end) for name, r in self.tensors.items()}
        if differing := _differing(files, self.files):
            reason = "size or header differ from the manifest, or the file is missing"
            raise ManifestInvalid(reason, path=path, file=differing)
        if differing := _differing(places, recorded):
            reason = "place, dtype or shape differ from the manifest, or the tensor is missing from the files"
            raise ManifestInvalid(reason, path=path, tensor=differing)


def _differing(found: Mapping[str, Any], recorded: Mapping[str, Any]) -> str | None:
    """The first name under which the two differ."""
    return next((name for name in {**found, **recorded} if found.get(name) != recorded.get(name)), None)


def _canonical(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()


def _files_body(part: Mapping[str, FileRecord]) -> dict[str, Any]:
    return {name: {"bytes": record.nbytes, "checksum": record.checksum} for name, record in part.items()}


def _file_records(part: Mapping[str, Any]) -> dict[str, FileRecord]:
    return {
        check_file_name(name): FileRecord(int(record["bytes"]), record["checksum"]) for name, record in part.items()
    }
