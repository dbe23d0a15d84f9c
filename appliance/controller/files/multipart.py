"""Streams multipart uploads to disk: constant memory at any size, and a file is complete or absent.

The bytes go to `files/.incoming-<id>`, are synced, and only then renamed to `files/<id>`; the next start deletes what a
crash leaves. Parsing: python-multipart's push parser (https://multipart.fastapiexpert.com/).
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from anyio import to_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from appliance.controller.access.disk import insufficient_storage
from appliance.controller.interfaces.errors import BadRequest, BodyTooLarge, InvalidValue, shown

INCOMING_PREFIX = ".incoming-"
MAX_FILENAME_BYTES = 255
_FIELD_BYTES = 1024
_MAX_PARTS = 17  # the file and 16 fields
_MAX_HEADER_BYTES = 16 * 1024
# Everything except the file: the parser processes it byte by byte.
_MAX_FORM_BYTES = 64 * 1024
_WRITE_BYTES = 2**20
# Bytes that look like a boundary and are none (RFC 2046 allows no part to contain any) take the parser 2 µs each, and
# split the file into pieces. A file has some by chance only if its boundary is shorter than any client's.
_MOST_FALSE_BOUNDARIES = 1000


@dataclass
class Upload:
    """fields: the form's text fields by name. filename: as sent, checked. size in bytes, sha256 in hex."""

    filename: str
    size: int
    sha256: str
    fields: dict[str, str] = field(default_factory=dict)


async def receive(
    chunks: AsyncIterator[bytes],
    content_type: str,
    target: Path,
    limit_bytes: int,
    took: Callable[[int], None],
    part: str = "file",
) -> Upload:
    """Read a form whose one file is in the part named `part` into `target`, complete and synced on return.

    The caller renames it. `took` receives the number of bytes before they are written, and may refuse them. On any
    error, a disconnect included, the file is deleted. Raises BadRequest, BodyTooLarge, Unavailable (disk full), and
    whatever `took` raises.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise BadRequest(
            f"Files are uploaded as multipart/form-data; the content-type {shown(content_type)} was given.",
            code="invalid_content_type",
        )
    form = _Form(limit_bytes, part, b"\r\n--" + boundary)
    try:
        parser = MultipartParser(boundary, form.callbacks())
    except FormParserError as error:  # a boundary that is too long
        raise _malformed(error) from error
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb", buffering=0) as out:
            async for piece in _pieces(chunks):
                form.count(piece)
                await to_thread.run_sync(parser.write, piece)
                took(form.pending_bytes)
                await to_thread.run_sync(out.write, form.take())
            parser.finalize()
            took(form.pending_bytes)
            await to_thread.run_sync(_finish, out, form.take())
        return form.result()
    except FormParserError as error:
        target.unlink(missing_ok=True)
        raise _malformed(error) from error
    except OSError as error:
        target.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise insufficient_storage("The disk of the box is full") from error
        raise
    except BaseException:
        target.unlink(missing_ok=True)
        raise


async def _pieces(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes, at least _WRITE_BYTES at a time but for the last."""
    piece = bytearray()
    async for chunk in chunks:
        piece += chunk
        if len(piece) >= _WRITE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


def _malformed(error: FormParserError) -> BadRequest:
    return BadRequest(f"The multipart body is malformed: {error}.", code="invalid_multipart")


def _finish(out, rest: bytes) -> None:  # type: ignore[no-untyped-def]
    out.write(rest)
    os.fsync(out.fileno())


class _Form:
    """Callbacks of the parser, on the thread that parses; `take` hands bytes to the writer."""

    def __init__(self, limit_bytes: int, part: str, delimiter: bytes):
        self._limit_bytes, self._part, self._delimiter = limit_bytes, part, delimiter
        self._delimiters = 0
        self._fields: dict[str, str] = {}
        self._headers: dict[bytes, bytes] = {}
        self._header_field = self._header_value = b""
        self._header_bytes = 0
        self._name = ""
        self._parts = 0
        self._is_file = self._ended = False
        self._value = bytearray()
        self._pending: list[bytes] = []
        self.pending_bytes = 0
        self._filename: str | None = None
        self._size = self._seen = 0
        self._hash = hashlib.sha256()

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }

    def count(self, chunk: bytes) -> None:
        """Call it before a piece of the body is parsed. Raises BadRequest if too much so far was not the file."""
        self._delimiters += chunk.count(self._delimiter)
        if self._delimiters > _MAX_PARTS + _MOST_FALSE_BOUNDARIES:
            raise BadRequest("The boundary of the multipart body stands within its parts.", code="invalid_multipart")
        if self._seen - self._size > _MAX_FORM_BYTES:
            raise BadRequest(
                f"The form has more than {_MAX_FORM_BYTES} bytes besides its file.", code="invalid_multipart"
            )
        self._seen += len(chunk)

    def take(self) -> bytes:
        taken, self._pending, self.pending_bytes = b"".join(self._pending), [], 0
        return taken

    def result(self) -> Upload:
        if not self._ended:
            raise BadRequest("The multipart body ends before its closing boundary.", code="invalid_multipart")
        if self._filename is None:
            raise BadRequest(
                f"Missing required parameter: '{self._part}'.", param=self._part, code="missing_required_parameter"
            )
        return Upload(self._filename, self._size, self._hash.hexdigest(), self._fields)

    def _part_begin(self) -> None:
        # Parts of any name count as they begin: an upload has room for forty million.
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise BadRequest(f"The form has more than {_MAX_PARTS} parts.", code="invalid_multipart")
        self._headers, self._value, self._is_file = {}, bytearray(), False
        self._header_field = self._header_value = b""
        self._header_bytes = 0

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_field += data[start:end]
        self._count_header(end - start)

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        self._count_header(end - start)

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise BadRequest("The headers of a multipart part are over 16 KiB.", code="invalid_multipart")

    def _header_end(self) -> None:
        self._headers[self._header_field.lower()] = self._header_value
        self._header_field = self._header_value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == self._part:
            if self._filename is not None:
                raise BadRequest(
                    f"More than one part is named '{self._part}'.", param=self._part, code="invalid_multipart"
                )
            self._filename = checked_filename(options.get(b"filename", b""))
            self._is_file = True
        elif b"filename" in options:
            raise BadRequest(
                f"A file was sent as {shown(self._name)}; its part must be named '{self._part}'.",
                param=self._part,
                code="invalid_multipart",
            )

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        piece = bytes(data[start:end])
        if not self._is_file:
            self._value += piece
            if len(self._value) > _FIELD_BYTES:
                raise InvalidValue(f"The form field {shown(self._name)} is over {_FIELD_BYTES} bytes.", self._name)
            return
        self._size += len(piece)
        if self._size > self._limit_bytes:
            raise BodyTooLarge(self._limit_bytes, param=self._part)
        self._hash.update(piece)
        self._pending.append(piece)
        self.pending_bytes += len(piece)

    def _part_end(self) -> None:
        if not self._is_file:
            self._fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._ended = True


def checked_filename(raw: bytes, param: str = "file") -> str:
    """The name is shown and sent back, never used as a path; names that look like a path are still rejected."""
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest("The filename is not UTF-8.", param=param, code="invalid_filename") from error
    if not name or name in (".", ".."):
        problem = "is empty" if not name else "is a directory"
    elif len(raw) > MAX_FILENAME_BYTES:
        problem = f"has {len(raw)} bytes, at most {MAX_FILENAME_BYTES} are allowed"
    elif "/" in name or "\\" in name:
        problem = "contains a path; send the bare name"
    elif not name.isprintable():
        problem = "contains control characters"
    else:
        return name
    raise BadRequest(f"The filename {shown(name, 60)} {problem}.", param=param, code="invalid_filename")
