"""Names of models, versions and files, and single files of a version directory, without following symlinks.

A name is percent-encoded (RFC 3986) so that `ft:starter:acme/x:1` is one path segment and decodes back.
"""

from __future__ import annotations

import io
import os
import re
import stat
import uuid
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from weights.format.errors import IntegrityError, InvalidName

KINDS = ("version", "adapter", "snapshot")
MANIFEST_FILE = "manifest.json"
PINNED_FILE = ".pinned"
TENSOR_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
VOCABULARIES = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("tekken.json",),
    ("vocab.txt",),
)
"""Any one of these sets of files makes a tokenizer."""
TOKENIZER_FILES = (*(name for names in VOCABULARIES for name in names), "added_tokens.json", "chat_template.jinja")
"""What decides, beside tokenizer_config.json, which tokens a conversation becomes."""
MAX_SEGMENT_BYTES = 255  # NAME_MAX of Linux file systems
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")

POLICY_PREFIX = ".policy/"
"""What begins with it is a model in training, from which its job's samples are drawn. No model has such a name, so no
client's request reaches it."""


def has_tokenizer(directory: Path) -> bool:
    return any(all((directory / name).is_file() for name in names) for names in VOCABULARIES)


def policy_name(job_id: str) -> str:
    """The name of this job's model in training."""
    return POLICY_PREFIX + job_id


def policy_of(name: str) -> str | None:
    """The inverse of `policy_name`; None for the name of a model."""
    return name.removeprefix(POLICY_PREFIX) if name.startswith(POLICY_PREFIX) else None


def encode_name(name: str) -> str:
    """One directory name for a model or version name. Raises InvalidName."""
    if not isinstance(name, str) or not name or _FORBIDDEN.search(name):
        raise InvalidName(f"a model or version name must be plain text without control characters, got {name!r}")
    encoded = quote(name, safe=":@+,=")
    # quote() leaves dots alone, and a leading dot would make ".", ".." or a hidden entry.
    if encoded.startswith("."):
        encoded = "%2E" + encoded[1:]
    if len(encoded) > MAX_SEGMENT_BYTES:
        raise InvalidName(f"the name {name[:40]!r}... takes {len(encoded)} bytes, at most {MAX_SEGMENT_BYTES} fit")
    return encoded


def decode_name(encoded: str) -> str | None:
    """The name that `encode_name` encodes as `encoded`; None if there is none."""
    name = unquote(encoded, errors="strict") if encoded.isascii() else ""
    try:
        return name if name and encode_name(name) == encoded else None
    except InvalidName:
        return None


def check_file_name(name: str) -> str:
    """Return `name` if a version directory may contain it; else raise InvalidName."""
    if not isinstance(name, str) or not name or name.startswith(".") or _FORBIDDEN.search(name):
        raise InvalidName(f"a file in a version must be a plain, visible name, got {name!r}")
    if "/" in name or "\\" in name or len(name.encode()) > MAX_SEGMENT_BYTES:
        raise InvalidName(f"a file name has no slashes and at most {MAX_SEGMENT_BYTES} bytes, got {name[:300]!r}")
    return name


def version_name(step: int) -> str:
    """Name of the version (snapshot or weights) that a run makes after `step` steps."""
    return f"step-{step}"


def step_of(version: str) -> int:
    """The inverse of `version_name`; -1 for a version of another name."""
    number = version.removeprefix("step-")
    return int(number) if number != version and number.isdecimal() else -1


class Name(NamedTuple):
    """A version, adapter or snapshot, in every tier. `kind` is one of KINDS."""

    kind: str
    model: str
    version: str

    def __str__(self) -> str:
        return f"{self.kind} {self.version} of {self.model}"

    @property
    def key(self) -> str:
        """The version's path below the root of a store, and at a remote place. Raises InvalidName."""
        if self.kind not in KINDS:
            raise InvalidName(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        return f"{self.kind}s/{encode_name(self.model)}/{encode_name(self.version)}"


def open_regular(directory: Path, name: str, mode: str = "rb") -> io.FileIO:
    """The regular file `name` directly inside `directory`, unbuffered, to read or ("r+b") to write too.

    Raises IntegrityError for symlinks, devices and unsafe names, and if the file is missing.
    """
    try:
        check_file_name(name)
        # O_NONBLOCK so that a malicious FIFO cannot block the reader.
        flags = os.O_RDWR if "+" in mode else os.O_RDONLY
        fd = os.open(directory / name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except InvalidName as error:
        raise IntegrityError(str(error), path=directory) from error
    except FileNotFoundError as error:
        raise IntegrityError("the file is missing", path=directory, file=name) from error
    except OSError as error:
        raise IntegrityError(f"cannot be opened: {error.strerror}", path=directory, file=name) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise IntegrityError("not a regular file", path=directory, file=name)
    return io.FileIO(fd, mode)


def write_file(path: Path, data: bytes) -> None:
    """Writes a small file, 0600, replacing an existing one."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)


def replace_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Writes a small file, 0600; a reader sees the old one or the new one, also if two processes write it. durable: it
    is on the medium on return. Raises OSError: the old file stays."""
    temporary = path.with_name(f".{path.name.removeprefix('.')}.{uuid.uuid4().hex}")  # found by a hidden one's prefix
    try:
        write_file(temporary, data)
        if durable:
            sync(temporary)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Waits until the bytes of a file, or the entries of a directory, are on the medium."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
