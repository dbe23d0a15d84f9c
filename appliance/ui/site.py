"""Holds the web page's files in memory.

`/ui` is the document, which browsers always revalidate. The document's files are below `/ui/HASH/` (HASH: of all
files), and browsers cache them forever. So files of two releases never mix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

STATIC: Final = Path(__file__).parent / "static"
ROOT: Final = b"/ui"
DOCUMENT: Final = "index.html"
# The document has this placeholder for the hash of all files.
HASH_MARK: Final = b"{{hash}}"
CONTENT_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".json": b"application/json",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}
# Allow only the page's own scripts and styles: no other sources, no markup or code from text, no frames.
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
    """A file in the form that browsers get."""

    content_type: bytes
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]


TO_THE_PAGE: Final = SiteFile(
    CONTENT_TYPES[".txt"], b"The page is at /ui.\n", (*_SECURITY, (b"location", ROOT), (b"vary", b"accept"))
)


@cache
def site() -> Mapping[bytes, SiteFile]:
    """Return the page's files of this release by URL path."""
    return read_site(STATIC)


def read_site(folder: Path) -> Mapping[bytes, SiteFile]:
    """Read files below `folder`; return them by URL path. Raises KeyError for a suffix that is not in CONTENT_TYPES."""
    contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    total = hashlib.sha256()
    for name, content in sorted(contents.items()):
        total.update(b"%b\0%d\0%b" % (name.encode(), len(content), content))
    digest = total.hexdigest()[:16].encode()
    document = contents.pop(DOCUMENT).replace(HASH_MARK, digest)
    files = {b"%b/%b/%b" % (ROOT, digest, name.encode()): _file(name, contents[name], _FOR_EVER) for name in contents}
    return files | {ROOT: _file(DOCUMENT, document, b"no-cache")}


def _file(name: str, content: bytes, cache_control: bytes) -> SiteFile:
    return SiteFile(CONTENT_TYPES[Path(name).suffix], content, (*_SECURITY, (b"cache-control", cache_control)))
