"""What the loop is told between its rounds. Built before the loop, so that parts which only tell it something need not
know it."""

from __future__ import annotations

import asyncio

from scheduler.core.failures import Cause


class Inbox:
    """generation: number of the newest nudge. All of it runs on the loop's asyncio loop."""

    def __init__(self) -> None:
        self.generation = 0
        self.changed = asyncio.Event()
        self._requests: list[tuple[int, str, str]] = []  # generation, who asked, what for
        self._gone: list[Cause] = []

    def nudge(self, by: str = "", what: str = "") -> int:
        """Report a change in the store or in the demand: plan soon. Returns the generation for `wait_settled`.

        by, what: the person who asked, "" for the box itself, and what for; without `what` nobody did."""
        self.generation += 1
        if what:
            self._requests.append((self.generation, by or "box", what))
        self.changed.set()
        return self.generation

    def retry(self, cause: Cause) -> None:
        """This cause of failures is gone: retry jobs and models that are in backoff because of it at once."""
        self._gone.append(cause)
        self.nudge()

    def take_gone(self) -> list[Cause]:
        gone, self._gone = self._gone, []
        return gone

    def newest_request(self, settled: int) -> tuple[str, str] | None:
        """Who asked last after this generation, and what for; earlier requests are forgotten."""
        self._requests = [request for request in self._requests if request[0] > settled]
        return self._requests[-1][1:] if self._requests else None
