"""Reserves the draft of the next snapshot on rank 0 during the step at whose end it is written.

A reservation takes locks and scans the whole store; at the step boundary every rank would wait for it. Rank 0 announces
its reservation in the all-reduce that ends the step anyway, as a number from which the draft's name is built.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any

from weights.format.errors import StoreError

log = logging.getLogger(__name__)

_NUMBERS = 2**24  # a float32 holds them exactly


def draft_name(job_id: str, number: int) -> str:
    """What the draft with this number (1 to 2**24 - 1) is reserved under, on every rank."""
    return f"{hashlib.sha256(job_id.encode()).hexdigest()[:16]}-{number:06x}"


class SnapshotReservation:
    """At most one draft at a time, on rank 0. `reserve(step, name)` reserves it; it runs on a thread."""

    def __init__(self, job_id: str, reserve: Callable[[int, str], Any]):
        self._job_id, self._reserve = job_id, reserve
        self._step = -1
        self._number = 0
        self._draft: Any = None
        self._thread: threading.Thread | None = None

    def begin(self, step: int) -> None:
        """Reserve for the snapshot of `step`, unless that is done or under way."""
        if self._step == step:
            return
        self.drop()
        self._step = step
        self._thread = threading.Thread(target=self._run, name="snapshot-reservation", daemon=True)
        self._thread.start()

    def number(self, step: int) -> int:
        """The number of the draft for the snapshot of `step`; 0 where there is none, because nobody asked or because it
        could not be reserved."""
        if self._step != step:
            return 0
        self._join()
        return self._number if self._draft is not None else 0

    def take(self) -> Any:
        """The draft; it is the caller's from now on."""
        self._join()
        draft, self._draft, self._step = self._draft, None, -1
        return draft

    def drop(self) -> None:
        """Free an unneeded reservation."""
        draft = self.take()
        if draft is not None:
            draft.abort()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        self._number = 1 + secrets.randbelow(_NUMBERS - 1)
        try:
            self._draft = self._reserve(self._step, draft_name(self._job_id, self._number))
        except (StoreError, OSError) as error:  # tried again at the step boundary, where every rank hears of it
            log.info("no draft was reserved ahead of the snapshot of step %d: %s", self._step, error)
