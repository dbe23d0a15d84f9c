"""Reads an uploaded form whose file goes straight to disk: constant memory at any size, and a file is complete or
absent.

The bytes go to `files/.incoming-<id>`, are synced, and only then renamed to `files/<id>`; the next start deletes what a
crash leaves (`storage.sweep`).
"""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path

from anyio import to_thread
from fastapi import Request
from starlette.formparsers import MultiPartException, MultiPartParser

from appliance.controller.access.quotas import disk_may_be_full
from appliance.controller.interfaces.errors import BadRequest, BodyTooLarge, shown

INCOMING_PREFIX = ".incoming-"
MAX_FILENAME_BYTES = 255
_MAX_FIELDS = 16
_FIELD_BYTES = 1024
_WRITE_BYTES = 2**20


@dataclass
class Upload:
    """fields: the form's text fields by name. filename: as sent, checked. size in bytes, sha256 in hex."""

    filename: str
    size: int
    sha256: str
    fields: dict[str, str]


class _Hashed(io.BufferedWriter):
    """A new file, and the SHA-256 of what is written to it."""

    def __init__(self, path: Path, limit_bytes: int):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        super().__init__(io.FileIO(handle, "wb"), _WRITE_BYTES)
        self.sha256, self.size, self._limit_bytes = hashlib.sha256(), 0, limit_bytes

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.sha256.update(data)
        self.size += len(data)
        if self.size > self._limit_bytes:
            raise BodyTooLarge(self._limit_bytes, param="file")
        return super().write(data)

    def finish(self) -> None:
        self.flush()
        os.fsync(self.fileno())


class _Parser(MultiPartParser):
    """Starlette's, which writes the form's one file to `target` on threads."""

    target: _Hashed

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        if (file := self._current_part.file) is not None:
            file.file.close()
            file.file = self.target  # type: ignore[assignment]


async def receive(request: Request, target: Path, limit_bytes: int, part: str = "file") -> Upload:
    """Read a form whose one file is in the part named `part` into `target`, complete and synced on return.

    The caller renames it. On any error, a disconnect included, the file is deleted. Raises BadRequest, BodyTooLarge,
    Unavailable (disk full).
    """
    given = request.headers.get("content-type", "")
    if not given.startswith("multipart/form-data"):
        why = f"Files are uploaded as multipart/form-data; the content-type {shown(given)} was given."
        raise BadRequest(why, code="invalid_content_type")
    parser = _Parser(request.headers, request.stream(), max_files=1, max_fields=_MAX_FIELDS, max_part_size=_FIELD_BYTES)
    try:
        with disk_may_be_full(), _Hashed(target, limit_bytes) as parser.target:
            form = await parser.parse()
            await to_thread.run_sync(parser.target.finish)
        fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        files = {name: value for name, value in form.multi_items() if not isinstance(value, str)}
        if part not in files:
            raise BadRequest(f"Missing required parameter: '{part}'.", part, "missing_required_parameter")
        filename = checked_filename(files[part].filename or "", part)
        return Upload(filename, parser.target.size, parser.target.sha256.hexdigest(), fields)
    except BaseException as error:
        target.unlink(missing_ok=True)
        if isinstance(error, MultiPartException):
            raise BadRequest(f"The multipart body is malformed: {error.message}", code="invalid_multipart") from error
        raise


def checked_filename(name: str, param: str = "file") -> str:
    """The name is shown and sent back, never used as a path; names that look like a path are still rejected."""
    too_long = len(name.encode("utf-8", "replace")) > MAX_FILENAME_BYTES
    if name in ("", ".", "..") or too_long or "/" in name or "\\" in name or not name.isprintable():
        rule = f"a bare name of 1 to {MAX_FILENAME_BYTES} printable bytes"
        raise BadRequest(f"The filename is {shown(name, 60)}; expected {rule}.", param, "invalid_filename")
    return name
