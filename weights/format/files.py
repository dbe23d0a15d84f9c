"""Opens and writes single files inside a version directory without following symlinks or opening devices."""

from __future__ import annotations

import io
import os
import stat
import uuid
from pathlib import Path

from weights.format.errors import IntegrityError, InvalidName
from weights.format.names import check_file_name


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


def replace_file(directory: Path, name: str, data: bytes) -> None:
    """Writes a small file durably; a reader sees the old one or the new one."""
    temporary = directory / f".{name}.{uuid.uuid4().hex}"
    try:
        write_file(temporary, data)
        sync(temporary)
        os.rename(temporary, directory / name)
        sync(directory)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Waits until the bytes of a file, or the entries of a directory, are on the medium."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
