"""Writes a small file whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

SUFFIX = ".new"
"""The end of the name under which a file is written; it is left behind if its process is killed meanwhile."""


def replace_file(path: Path, content: bytes, *, durable: bool = False) -> None:
    """For this user alone. A reader sees the old file or the new one, also if two processes write it. durable: it is on
    the medium on return. Raises OSError: the old file stays."""
    new = path.with_name(f"{path.name}.{os.getpid()}{SUFFIX}")
    new.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
