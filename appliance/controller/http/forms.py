"""Forms with a file, whose bytes are written once: to a file with a name, which the route then moves."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator
from io import FileIO
from pathlib import Path

from starlette.datastructures import Headers
from starlette.formparsers import MultiPartParser

from appliance.controller.access.limits import disk_may_be_full
from appliance.store.rows import new_id

INCOMING_PREFIX = ".incoming-"
_STEP_BYTES = 8 << 20


class IncomingFile(FileIO):
    """A new file in a folder, of mode 0600. sha256: of what was written. Raises ApiError 507 if the disk is full."""

    def __init__(self, folder: Path):
        self.path, self.sha256, self._flushed_to = folder / new_id(INCOMING_PREFIX), hashlib.sha256(), 0
        with disk_may_be_full():
            super().__init__(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+")

    def write(self, piece: bytes) -> int:  # type: ignore[override]
        self.sha256.update(piece)
        rest = memoryview(piece)
        with disk_may_be_full():
            while rest:
                rest = rest[super().write(rest) :]
        if (end := self.tell()) - self._flushed_to >= _STEP_BYTES:
            # Linux starts to write these pages to the disk, without waiting: `move` has less to sync.
            os.posix_fadvise(self.fileno(), self._flushed_to, end - self._flushed_to, os.POSIX_FADV_DONTNEED)
            self._flushed_to = end
        return len(piece)

    def move(self, target: Path) -> None:
        """Sync the file and rename it."""
        with disk_may_be_full():
            os.fsync(self.fileno())
            os.rename(self.path, target)

    def close(self) -> None:
        """Close the file, and delete it unless it was moved."""
        super().close()
        self.path.unlink(missing_ok=True)


class FileForm(MultiPartParser):
    """Starlette's parser, with an IncomingFile in place of its spool, which would have to be copied."""

    def __init__(self, folder: Path, headers: Headers, stream: AsyncGenerator[bytes, None]):
        super().__init__(headers, stream, max_files=1, max_fields=16, max_part_size=1024)
        self._folder = folder

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        if (upload := self._current_part.file) is not None:
            upload.file.close()
            upload.file = IncomingFile(self._folder)
            self._files_to_close_on_error.append(upload.file)
