"""Answers with a version's files as a tar file, whole or the part that a Range header names."""

from __future__ import annotations

import re

from fastapi.responses import StreamingResponse

from appliance.controller.interfaces.errors import ApiError
from weights.tiers.archive import Archive

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


def answer(archive: Archive, name: str, asked_range: str | None, if_range: str | None) -> StreamingResponse:
    """The whole archive, or the part that a Range header names (RFC 9110, 14.2). Raises ApiError 416."""
    total, tag = archive.nbytes, f'"{archive.tag}"'
    start, end, status = 0, total, 200
    headers = {"etag": tag, "accept-ranges": "bytes", "x-content-type-options": "nosniff"}
    headers["content-disposition"] = f'attachment; filename="{re.sub(r"[^A-Za-z0-9._-]", "-", name)}.tar"'
    if (match := _RANGE.fullmatch(asked_range or "")) and if_range in (None, tag):
        start, end = int(match[1]), min(total, int(match[2]) + 1 if match[2] else total)
        if start >= end:
            message = f"The archive has {total} bytes and none at {asked_range}."
            raise ApiError(416, message, code="range_not_satisfiable", param="range")
        status, headers["content-range"] = 206, f"bytes {start}-{end - 1}/{total}"
    headers["content-length"] = str(end - start)
    return StreamingResponse(archive.chunks(start, end), status, headers, media_type="application/x-tar")
