"""Reads the page's files into memory and answers requests for them. Pure once read.

`/ui` is the document and always asked again; what it names is below `/ui/HASH/`, a hash of all files, and kept by
browsers for ever. A release thus never mixes with the files of another one.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

STATIC: Final = Path(__file__).parent / "static"
ROOT: Final = b"/ui"
DOCUMENT: Final = "index.html"
# The document has this where the hash of all files goes.
HASH_MARK: Final = b"{{hash}}"
CONTENT_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".json": b"application/json",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}
# Scripts and styles of these files alone, nothing from elsewhere, no text made into markup or code, in nobody's frame.
CONTENT_SECURITY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"form-action 'none'; frame-ancestors 'none'; base-uri 'none'; require-trusted-types-for 'script'; "
    b"trusted-types 'none'"
)
_SECURITY: Final = (
    (b"content-security-policy", CONTENT_SECURITY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)
_FOR_EVER: Final = b"public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class SiteFile:
    """A file as it is sent; `packed` with gzip."""

    content_type: bytes
    plain: bytes
    packed: bytes
    etag: bytes
    cache_control: bytes


@dataclass(frozen=True, slots=True)
class SiteAnswer:
    """status: 200, 304 without a body where the client has the file, or 303 to where the page is."""

    status: int
    content_type: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


TO_THE_PAGE: Final = SiteAnswer(
    303, CONTENT_TYPES[".txt"], (*_SECURITY, (b"location", ROOT), (b"vary", b"accept")), b"The page is at /ui.\n"
)


@cache
def site() -> Mapping[bytes, SiteFile]:
    """The files of this release by their URLs' paths."""
    return read_site(STATIC)


def read_site(folder: Path) -> Mapping[bytes, SiteFile]:
    """The files below `folder` by their URLs' paths. Raises KeyError for a kind that CONTENT_TYPES does not have."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    total = hashlib.sha256()
    for name, content in sorted(found.items()):
        total.update(b"%b\0%d\0%b" % (name.encode(), len(content), content))
    digest = total.hexdigest()[:16].encode()
    document = found.pop(DOCUMENT).replace(HASH_MARK, digest)
    files = {b"%b/%b/%b" % (ROOT, digest, name.encode()): _file(name, found[name], _FOR_EVER) for name in found}
    return files | {ROOT: _file(DOCUMENT, document, b"no-cache")}


def answer(file: SiteFile, *, if_none_match: bytes | None, accept_encoding: bytes | None) -> SiteAnswer:
    """The answer to a GET of `file` with these headers."""
    headers = (
        *_SECURITY,
        (b"etag", file.etag),
        (b"cache-control", file.cache_control),
        (b"vary", b"accept-encoding"),
    )
    if if_none_match is not None and file.etag in if_none_match:
        return SiteAnswer(304, file.content_type, headers, b"")
    if not _takes_gzip(accept_encoding or b""):
        return SiteAnswer(200, file.content_type, headers, file.plain)
    return SiteAnswer(200, file.content_type, (*headers, (b"content-encoding", b"gzip")), file.packed)


def _file(name: str, content: bytes, cache_control: bytes) -> SiteFile:
    etag = b'"%b"' % hashlib.sha256(content).hexdigest()[:32].encode()
    # Its head has no time, so that all workers and restarts send the same bytes.
    return SiteFile(CONTENT_TYPES[Path(name).suffix], content, gzip.compress(content, 9, mtime=0), etag, cache_control)


def _takes_gzip(accepted: bytes) -> bool:
    for one in accepted.lower().split(b","):
        coding, _, quality = one.partition(b";")
        if coding.strip() in (b"gzip", b"*"):
            return quality.strip().replace(b" ", b"") not in (b"q=0", b"q=0.0", b"q=0.00", b"q=0.000")
    return False
