"""Events of a job about the models that judge or teach it: that it waits for them, and how they failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from appliance.controller.bus.asking import Asking
from appliance.controller.jobs.events import add_message
from appliance.store.database import Database

ANSWER_WITHIN_S = 3600.0
"""How long a model that judges or teaches may take; the job's devices stand still meanwhile. In mode `train` a person
may want exactly that for a while."""
SAY_AFTER_S = 30.0
"""After this long without an answer the job says that it waits."""
SAY_AGAIN_S = 600.0
"""If every step waits so long, the job says it this often."""


class Saying:
    """Invariant: for each job `_waited` has what it last said about waiting, and since when; `_failed` what it last
    said about failures, until nothing fails."""

    def __init__(self, db: Database, asking: Asking, after_s: float = SAY_AFTER_S):
        self._db, self._asking, self._after_s = db, asking, after_s
        self._waited: dict[str, tuple[str, float]] = {}
        self._failed: dict[str, Hashable] = {}

    @contextmanager
    def waiting(self, job_id: str, key_id: str | None, whom: str, model: str) -> Iterator[None]:
        """Says that the job waits, and why, if this takes long. whom: what the model is to it."""
        timer = asyncio.get_running_loop().call_later(self._after_s, self._waits, job_id, key_id, whom, model)
        try:
            yield
        finally:
            timer.cancel()

    def failed(self, job_id: str, text: str, kind: Hashable = None) -> None:
        """Says it once, until nothing fails or something else does. kind: of what failed, where it is told in many
        words."""
        if self._failed.get(job_id) != (kind or text):
            self._failed[job_id] = kind or text
            add_message(self._db, job_id, text, level="warn")

    def nothing_failed(self, job_id: str) -> None:
        self._failed.pop(job_id, None)

    def _waits(self, job_id: str, key_id: str | None, whom: str, model: str) -> None:
        why = self._asking.why(key_id, model) or "its engines are busy"
        text = f"the job waits for its {whom} {model}, up to {ANSWER_WITHIN_S / 60:.0f} minutes: {why}"
        said, at_s = self._waited.get(job_id, ("", 0.0))
        if said != text or time.monotonic() - at_s > SAY_AGAIN_S:
            self._waited[job_id] = text, time.monotonic()
            add_message(self._db, job_id, text, level="warn")
