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

from weights.format.checksums import checksum, is_checksum
from weights.format.errors import InvalidName, ManifestInvalid
from weights.format.files import open_regular
from weights.format.header import spec_fault
from weights.format.layout import Layout, Placed
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
            tensors={placed.spec.name: _record(placed, checksums) for placed in layout},
            files={file.name: FileRecord(file.nbytes, checksum(file.header)) for file in layout.files},
            aux_files=dict(aux_files),
        )

    def with_checksums(self, checksums: Mapping[str, str]) -> Manifest:
        """The same manifest with every tensor's checksum set."""
        return replace(
            self,
            tensors={name: replace(record, checksum=checksums[name]) for name, record in self.tensors.items()},
        )

    def to_bytes(self, tensors: bytes | None = None) -> bytes:
        """Canonical JSON. `tensors` is the JSON of its tensors, if the caller has it. Raises ManifestInvalid if `meta`
        is not JSON."""
        rest = {
            "format": FORMAT,
            "kind": self.kind,
            "model": self.model,
            "version": self.version,
            "created_s": self.created_s,
            "meta": dict(self.meta),
            "files": _files_body(self.files),
            "aux_files": _files_body(self.aux_files),
        }
        try:
            parts = {key: _canonical(value) for key, value in rest.items()}
        except (TypeError, ValueError, RecursionError) as error:
            raise ManifestInvalid(f"meta must be JSON: {error}", path=self.model, file=MANIFEST_FILE) from error
        parts["tensors"] = tensors or self.tensors_text()
        text = b"{%s}" % b",".join(b'"%s":%s' % (key.encode(), parts[key]) for key in sorted(parts))
        return b'{"manifest_checksum":"%s",\n"body":%s}\n' % (checksum(text).encode(), text)

    def tensors_text(self) -> bytes:
        """Canonical JSON of the tensors."""
        return _canonical({name: vars(record) for name, record in self.tensors.items()})

    @classmethod
    def from_bytes(cls, raw: bytes, *, path: object) -> Manifest:
        """Parses the manifest and checks everything that needs no files. Raises ManifestInvalid."""

        def fault(reason: str, tensor: str | None = None) -> ManifestInvalid:
            return ManifestInvalid(reason, path=path, file=MANIFEST_FILE, tensor=tensor)

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
            tensors = {}
            for name, r in body["tensors"].items():
                reason = spec_fault(name, r["dtype"], r["shape"])
                if reason is None and not (r["checksum"] is None or is_checksum(r["checksum"])):
                    reason = "the checksum is malformed"
                if reason is None and not (type(r["start"]) is type(r["end"]) is int):
                    reason = "start and end must be integers"
                if reason is not None:
                    raise fault(reason, name)
                tensors[name] = TensorRecord(
                    check_file_name(r["file"]), r["dtype"], tuple(r["shape"]), r["start"], r["end"], r["checksum"]
                )
            return cls(
                kind=body["kind"],
                model=body["model"],
                version=body["version"],
                created_s=float(body["created_s"]),
                meta=body["meta"],
                tensors=tensors,
                files=_file_records(body["files"], fault),
                aux_files=_file_records(body["aux_files"], fault),
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
        for file in layout.files:
            record = self.files.get(file.name)
            if record is None or record.nbytes != file.nbytes or record.checksum != checksum(file.header):
                raise ManifestInvalid("size or header differ from the manifest", path=path, file=file.name)
        if len(layout.files) != len(self.files):
            missing = sorted(set(self.files) - {file.name for file in layout.files})
            raise ManifestInvalid("the file is missing", path=path, file=missing[0])
        for placed in layout:
            tensor = self.tensors.get(placed.spec.name)
            found = (placed.file, placed.spec.dtype, placed.spec.shape, placed.start, placed.end)
            if tensor is None or found != (tensor.file, tensor.dtype, tensor.shape, tensor.start, tensor.end):
                reason = "place, dtype or shape differ from the manifest"
                raise ManifestInvalid(reason, path=path, file=placed.file, tensor=placed.spec.name)
        if len(layout) != len(self.tensors):
            missing = sorted(set(self.tensors) - set(layout.names))
            raise ManifestInvalid("the tensor is missing from the files", path=path, tensor=missing[0])


@dataclass(frozen=True)
class Prepared:
    """The part of an unsealed manifest that does not depend on the bytes: nearly all of it and of its cost."""

    manifest: Manifest
    tensors: bytes

    @classmethod
    def of(cls, layout: Layout, *, kind: str, model: str, version: str) -> Prepared:
        manifest = Manifest.describe(
            layout, kind=kind, model=model, version=version, created_s=0.0, meta={}, aux_files={}
        )
        return cls(manifest, manifest.tensors_text())

    def complete(
        self,
        *,
        created_s: float,
        meta: Mapping[str, Any],
        aux_files: Mapping[str, FileRecord],
        checksums: Mapping[str, str] | None,
    ) -> tuple[Manifest, bytes]:
        """The manifest and its bytes. Raises ManifestInvalid if `meta` is not JSON."""
        manifest = replace(self.manifest, created_s=created_s, meta=meta, aux_files=dict(aux_files))
        if checksums is None:
            return manifest, manifest.to_bytes(self.tensors)
        sealed = manifest.with_checksums(checksums)
        return sealed, sealed.to_bytes()


def _record(placed: Placed, checksums: Mapping[str, str] | None) -> TensorRecord:
    known = None if checksums is None else checksums[placed.spec.name]
    return TensorRecord(placed.file, placed.spec.dtype, placed.spec.shape, placed.start, placed.end, known)


def _canonical(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()


def _files_body(part: Mapping[str, FileRecord]) -> dict[str, Any]:
    return {name: {"bytes": record.nbytes, "checksum": record.checksum} for name, record in part.items()}


def _file_records(part: Mapping[str, Any], fault: Any) -> dict[str, FileRecord]:
    records = {}
    for name, record in part.items():
        if type(record["bytes"]) is not int or not is_checksum(record["checksum"]):
            raise fault(f"the record of file {name!r} is malformed")
        records[check_file_name(name)] = FileRecord(record["bytes"], record["checksum"])
    return records
