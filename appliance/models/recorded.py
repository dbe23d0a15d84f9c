"""The manifest that a box left beside a checkpoint: an import of such a copy checks that it is still what it was.

Checkpoints of others have none, and nobody can tell whether their bytes changed.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from weights.format.errors import ChecksumMismatch, IntegrityError, ManifestInvalid
from weights.format.foreign_json import check_values
from weights.format.header import MAX_HEADER_VALUES
from weights.format.manifest import MAX_MANIFEST_BYTES, Manifest
from weights.format.names import MANIFEST_FILE

_OURS = b'{"manifest_checksum":'  # how Manifest.to_bytes begins; others use the name manifest.json too
_MOST_VALUES = MAX_HEADER_VALUES  # it has as many for a tensor as a header
_WAY_OUT = "; take the copy again, or delete manifest.json if it was changed on purpose"


def recorded(directory: Path) -> Manifest | None:
    """What a box recorded of the checkpoint in `directory`; None if no box did. Raises ManifestInvalid."""
    path = directory / MANIFEST_FILE
    if path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(len(_OURS)) != _OURS:
            return None
        raw = _OURS + file.read(MAX_MANIFEST_BYTES)
    try:
        check_values(raw, _MOST_VALUES)
    except ValueError as error:
        raise ManifestInvalid(str(error), path=directory, file=MANIFEST_FILE) from None
    return Manifest.from_bytes(raw, path=directory)


def check_same(before: Manifest, now: Manifest, directory: Path, changed: Collection[str]) -> None:
    """Raises IntegrityError, naming file and tensor in `directory`, if the import (`now`, sealed) differs from what was
    recorded (`before`), but for the settings that the import itself `changed`."""
    for name in sorted(before.tensors.keys() | now.tensors.keys()):
        was, found = before.tensors.get(name), now.tensors.get(name)
        if was is None or found is None:
            file = (was or now.tensors[name]).file
            raise _differs(ManifestInvalid, "only one of the files and manifest.json has it", directory, file, name)
        if (was.dtype, was.shape) != (found.dtype, found.shape) or was.checksum not in (None, found.checksum):
            raise _differs(ChecksumMismatch, "not what manifest.json recorded", directory, found.file, name)
    for name, was_file in before.aux_files.items():
        if name in changed:
            continue
        found_file = now.aux_files.get(name)
        if found_file is None or found_file.checksum != was_file.checksum:
            raise _differs(ChecksumMismatch, "not what manifest.json recorded", directory, name, None)


def _differs(kind: type[IntegrityError], reason: str, directory: Path, file: str, tensor: str | None) -> IntegrityError:
    return kind(reason + _WAY_OUT, path=directory, file=file, tensor=tensor)
