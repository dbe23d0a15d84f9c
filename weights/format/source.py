"""Reads a checkpoint directory on any file system as the source of a version: what it copies, what it refuses."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weights.format.checksums import checksum, checksum_of, compare
from weights.format.errors import ChecksumMismatch, HeaderInvalid, ManifestInvalid, UnsafeFile
from weights.format.files import open_regular
from weights.format.layout import Layout, Placed
from weights.format.manifest import Manifest
from weights.format.names import INDEX_SUFFIX, MANIFEST_FILE

# Configuration, tokenizers, chat templates. The store never accepts code (*.py) and pickles (*.bin, *.pt).
AUX_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm")
MAX_AUX_BYTES = 256 << 20
COPY_CHUNK_BYTES = 64 << 20
READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Source:
    """A validated checkpoint directory. `checksums` come from its manifest, if it has one."""

    directory: Path
    layout: Layout
    aux_files: Mapping[str, bytes]
    meta: Mapping[str, Any]
    checksums: Mapping[str, str | None]


def read_source(directory: Path) -> Source:
    """Reads headers, manifest and auxiliary files of `directory`. Raises IntegrityError, InvalidLayout.

    It includes the safetensors files of the layout and top-level files with one of `AUX_SUFFIXES`, and ignores other
    files and sub-directories. A symlink among the included files raises UnsafeFile.
    """
    layout = Layout.read(directory)
    manifest = Manifest.read(directory) if (directory / MANIFEST_FILE).exists() else None
    aux_files = {}
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        name = entry.name
        if name == MANIFEST_FILE or name.startswith(".") or name.endswith(INDEX_SUFFIX):
            continue
        if not name.endswith(AUX_SUFFIXES) or entry.is_dir(follow_symlinks=False):
            continue
        with open_regular(directory, name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_AUX_BYTES:
                raise UnsafeFile(f"{size} bytes, at most {MAX_AUX_BYTES} are taken", path=directory, file=name)
            aux_files[name] = file.readall()
    if manifest is not None:
        manifest.check_layout(layout, path=directory)
        check_aux(manifest, aux_files, path=directory)
    return Source(
        directory,
        layout,
        aux_files,
        meta={} if manifest is None else manifest.meta,
        checksums={} if manifest is None else {name: r.checksum for name, r in manifest.tensors.items()},
    )


def check_aux(manifest: Manifest, aux_files: Mapping[str, bytes], *, path: object) -> None:
    """Raises ManifestInvalid or ChecksumMismatch if a recorded auxiliary file is missing or differs."""
    for name, record in manifest.aux_files.items():
        if name.endswith(INDEX_SUFFIX):
            continue  # derived from the headers, which are checked themselves
        if name not in aux_files:
            raise ManifestInvalid("the file is missing", path=path, file=name)
        if checksum(aux_files[name]) != record.checksum:
            raise ChecksumMismatch("the bytes differ from the manifest", path=path, file=name)


def whole(directory: Path, pause: Callable[[int], object] = lambda nbytes: None) -> Manifest:
    """The manifest of a version directory with the checksum of every tensor, after reading every byte and comparing it
    with those recorded. `pause` is called with 0 before each tensor. Raises IntegrityError."""
    manifest, layout = Manifest.read(directory), Layout.read(directory)
    manifest.check_layout(layout, path=directory)
    aux_files = {}
    for name in manifest.aux_files:
        with open_regular(directory, name) as file:
            aux_files[name] = file.readall()
    check_aux(manifest, aux_files, path=directory)
    digests = {}
    for placed in layout:
        pause(0)
        digests[placed.spec.name] = tensor_checksum(directory, placed)
    compare(digests, {name: record.checksum for name, record in manifest.tensors.items()}, layout, path=directory)
    return manifest.with_checksums(digests)


def tensor_checksum(directory: Path, placed: Placed) -> str:
    """The checksum of one tensor of a checkpoint directory. Raises HeaderInvalid if the file shrinks meanwhile."""

    def chunks(file: io.FileIO) -> Iterator[bytes]:
        # Read instead of mapping, so that a shrinking file is an error and not a SIGBUS.
        for start in range(placed.start, placed.end, READ_BYTES):
            chunk = os.pread(file.fileno(), min(READ_BYTES, placed.end - start), start)
            if len(chunk) != min(READ_BYTES, placed.end - start):
                raise HeaderInvalid("the file ended early", path=directory, file=placed.file, tensor=placed.spec.name)
            yield chunk

    with open_regular(directory, placed.file) as file:
        return checksum_of(chunks(file))


def copy_file(
    source: Path, target: Path, name: str, nbytes: int, moved: Callable[[int], object] = lambda nbytes: None
) -> int:
    """Copies the first `nbytes` of the file `name` into the directory `target`, over one of that name. Returns its
    descriptor. Raises HeaderInvalid if the file shrinks meanwhile."""
    out = os.open(target / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open_regular(source, name) as file:
            position = 0
            while position < nbytes:
                # sendfile keeps the bytes in the kernel: no page of either file is mapped.
                sent = os.sendfile(out, file.fileno(), position, min(COPY_CHUNK_BYTES, nbytes - position))
                if sent == 0:
                    raise HeaderInvalid(
                        f"the file ended at byte {position} while it was copied", path=source, file=name
                    )
                position += sent
                moved(sent)
    except BaseException:
        os.close(out)
        raise
    return out
