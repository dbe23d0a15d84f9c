"""Requests and hints for the loop between its rounds. Built before the loop, for parts that only report to it."""

from __future__ import annotations

import asyncio

from scheduler.core.failures import Cause


class Inbox:
    """generation: number of the newest nudge. All of it runs on the loop's asyncio loop."""

    def __init__(self) -> None:
        self.generation = 0
        self.changed = asyncio.Event()
        self._requests: list[tuple[int, str, str]] = []  # generation, by, request
        self._resolved: list[Cause] = []

    def nudge(self, by: str = "", request: str = "") -> int:
        """Report a change in the store or in the demand: plan soon. Returns the generation for `wait_settled`.

        by: the person who requested it, "" for the box itself. request: "" if nothing was requested."""
        self.generation += 1
        if request:
            self._requests.append((self.generation, by or "box", request))
        self.changed.set()
        return self.generation

    def retry(self, cause: Cause) -> None:
        """Retry jobs and models at once that are in backoff because of this cause, which is gone."""
        self._resolved.append(cause)
        self.nudge()

    def take_resolved(self) -> list[Cause]:
        resolved, self._resolved = self._resolved, []
        return resolved

    def newest_request(self, settled: int) -> tuple[str, str] | None:
        """The last request after this generation and who made it first; earlier ones are forgotten."""
        self._requests = [request for request in self._requests if request[0] > settled]
        return self._requests[-1][1:] if self._requests else None
