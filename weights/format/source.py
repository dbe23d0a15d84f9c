"""Reads the files that a version takes of a checkpoint directory, on any file system."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from weights.format.errors import IntegrityError
from weights.format.files import open_regular
from weights.format.manifest import Manifest, checksum
from weights.format.names import MANIFEST_FILE

# Configuration, tokenizers, chat templates. The store never accepts code (*.py) and pickles (*.bin, *.pt).
AUX_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm")
MAX_AUX_BYTES = 256 << 20
CHUNK_BYTES = 32 << 20
Chunks = Callable[[str], Iterable[bytes]]
"""Returns the bytes of the file of this name in a version."""


def aux_files_of(directory: Path) -> dict[str, bytes]:
    """The top-level files of `directory` with one of `AUX_SUFFIXES`; other files and sub-directories are ignored.
    Raises IntegrityError for a symlink among them."""
    contents = {}
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        name = entry.name
        if name == MANIFEST_FILE or name.startswith(".") or not name.endswith(AUX_SUFFIXES):
            continue
        if entry.is_dir(follow_symlinks=False):
            continue
        with open_regular(directory, name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_AUX_BYTES:
                raise IntegrityError(f"{size} bytes, at most {MAX_AUX_BYTES} are taken", path=directory, file=name)
            contents[name] = file.readall()
    return contents


def chunks_of(directory: Path, manifest: Manifest, name: str) -> Iterator[bytes]:
    """A file of the version in chunks of CHUNK_BYTES. Raises IntegrityError if it has another size than recorded."""
    nbytes = manifest.files[name].nbytes
    with io.BufferedReader(open_regular(directory, name)) as file:  # buffered: its `read` is short at the end alone
        if (size := os.fstat(file.fileno()).st_size) != nbytes:
            raise IntegrityError(f"{size} bytes, expected {nbytes}", path=directory, file=name)
        while nbytes > 0:  # reads instead of mapping, so that a shrinking file is an error and not a SIGBUS
            chunk = file.read(min(CHUNK_BYTES, nbytes))
            if not chunk:
                raise IntegrityError("the file ended early", path=directory, file=name)
            nbytes -= len(chunk)
            yield chunk


def hashed(
    chunks: Iterable[bytes], expected: str | None, checksums: dict[str, str], *, path: object, file: str
) -> Iterator[bytes]:
    """Yields the chunks of a file, and then puts their checksum into `checksums` under the file's name. Raises
    IntegrityError after the last chunk unless it is as `expected` (None: not known)."""
    running = blake3()
    for chunk in chunks:
        running.update(chunk)
        yield chunk
    checksums[file] = checksum(running)
    if expected not in (None, checksums[file]):
        raise IntegrityError(f"expected {expected}, the bytes give {checksums[file]}", path=path, file=file)


def read_whole(manifest: Manifest, chunks: Chunks, *, source: object) -> Manifest:
    """`manifest` with every checksum, after reading the `chunks` of each file and comparing them. Raises
    IntegrityError, which names `source`."""
    checksums: dict[str, str] = {}
    for name, record in manifest.files.items():
        for _ in hashed(chunks(name), record.checksum, checksums, path=source, file=name):
            pass
    return manifest.with_checksums(checksums)
