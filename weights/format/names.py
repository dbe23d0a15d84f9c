"""Defines names of models, versions and files; reads and writes single files without following symlinks.

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
"""Sets of files, each sufficient for a tokenizer."""
TOKENIZER_FILES = (*(name for names in VOCABULARIES for name in names), "added_tokens.json", "chat_template.jinja")
"""Files that, with tokenizer_config.json, determine the tokens of a conversation."""
MAX_SEGMENT_BYTES = 255  # NAME_MAX of Linux file systems
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")

POLICY_PREFIX = ".policy/"
"""Prefix of models in training, from which their job draws samples. Names of other models cannot begin with it, so no
client's request reaches a model in training."""


def has_tokenizer(directory: Path) -> bool:
    return any(all((directory / name).is_file() for name in names) for names in VOCABULARIES)


def policy_name(job_id: str) -> str:
    """Return the name of the model that a job trains."""
    return POLICY_PREFIX + job_id


def policy_of(name: str) -> str | None:
    """Invert `policy_name`; None for other models' names."""
    return name.removeprefix(POLICY_PREFIX) if name.startswith(POLICY_PREFIX) else None


def encode_name(name: str) -> str:
    """Return the directory name for a model or version name. Raises InvalidName."""
    if not isinstance(name, str) or not name or _FORBIDDEN.search(name):
        raise InvalidName(f"a model or version name must be plain text without control characters, got {name!r}")
    encoded = quote(name, safe=":@+,=")
    # quote() does not encode dots; a leading dot would give ".", ".." or a hidden entry.
    if encoded.startswith("."):
        encoded = "%2E" + encoded[1:]
    if len(encoded) > MAX_SEGMENT_BYTES:
        raise InvalidName(f"the name {name[:40]!r}... takes {len(encoded)} bytes, expected at most {MAX_SEGMENT_BYTES}")
    return encoded


def decode_name(encoded: str) -> str | None:
    """Invert `encode_name`; None if no name has this encoding."""
    name = unquote(encoded, errors="strict") if encoded.isascii() else ""
    try:
        return name if name and encode_name(name) == encoded else None
    except InvalidName:
        return None


def check_file_name(name: str) -> str:
    """Return `name` if it is allowed as a file name in a version; else raise InvalidName."""
    if not isinstance(name, str) or not name or name.startswith(".") or _FORBIDDEN.search(name):
        raise InvalidName(f"a file in a version must be a plain, visible name, got {name!r}")
    if "/" in name or "\\" in name or len(name.encode()) > MAX_SEGMENT_BYTES:
        raise InvalidName(f"a file name has no slashes and at most {MAX_SEGMENT_BYTES} bytes, got {name[:300]!r}")
    return name


def version_name(step: int) -> str:
    """Return the name of the version (snapshot or weights) that a run stores after `step` steps."""
    return f"step-{step}"


def step_of(version: str) -> int:
    """Invert `version_name`; -1 for other names."""
    number = version.removeprefix("step-")
    return int(number) if number != version and number.isdecimal() else -1


class Name(NamedTuple):
    """Names a version, adapter or snapshot in all tiers. `kind` is one of KINDS."""

    kind: str
    model: str
    version: str

    def __str__(self) -> str:
        return f"{self.kind} {self.version} of {self.model}"

    @property
    def key(self) -> str:
        """The version's path below the root of a store or remote tier. Raises InvalidName."""
        if self.kind not in KINDS:
            raise InvalidName(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        return f"{self.kind}s/{encode_name(self.model)}/{encode_name(self.version)}"


def open_regular(directory: Path, name: str, mode: str = "rb") -> io.FileIO:
    """Opens the regular file `name` directly inside `directory`, unbuffered, for reading or ("r+b") also for writing.

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
    """Write a small file of mode 0600; overwrites an existing file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)


def replace_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a small file of mode 0600 atomically: readers see the old or the new file, even if two processes write.
    durable: return once the file is on disk. If writing raises OSError, the old file is unchanged."""
    temporary = path.with_name(f".{path.name.removeprefix('.')}.{uuid.uuid4().hex}")  # sweeps know this form
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
    """Wait until the bytes of a file, or the entries of a directory, are on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
