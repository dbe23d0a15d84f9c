"""Unix sockets that only their owner may connect to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Sockets bound meanwhile have mode 0600 from their first moment: a chmod afterwards would leave a gap."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
