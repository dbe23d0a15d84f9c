"""Limits the rate of a background copy, reports its progress, and lets the caller stop it."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Keeps a copy under `rate_bytes_s` by waiting after each chunk, and calls `on_progress(done_bytes, total_bytes)`.

    `wait` waits the given number of seconds. An exception from `on_progress` or `wait` aborts the copy.
    """

    def __init__(
        self,
        rate_bytes_s: float | None = None,
        total_bytes: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        if rate_bytes_s is not None and rate_bytes_s <= 0:
            raise ValueError(f"rate_bytes_s must be positive or None, got {rate_bytes_s}")
        self.done_bytes = 0
        self.total_bytes = total_bytes
        self._rate = rate_bytes_s
        self._on_progress = on_progress
        self._wait = wait
        self._started_s = time.monotonic()

    def moved(self, nbytes: int) -> None:
        """Adds `nbytes` to the bytes done; returns when the rate allows them."""
        self.done_bytes += nbytes
        if self._on_progress is not None:
            self._on_progress(self.done_bytes, self.total_bytes)
        if self._rate is not None:
            ahead_s = self.done_bytes / self._rate - (time.monotonic() - self._started_s)
            if ahead_s > 0:
                (self._wait or time.sleep)(ahead_s)
