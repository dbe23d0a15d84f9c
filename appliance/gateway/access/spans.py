"""Defines the interface of one request's trace spans for the code that begins and ends them (observe/tracing.py)."""

from __future__ import annotations

from typing import Protocol


class Spans(Protocol):
    """Spans still open at the end of the request end with it."""

    def hold(self) -> None: ...
    def unhold(self) -> None: ...

    def attempt(self) -> bytes:
        """Record that the request goes to a replica now. Returns the `traceparent` for the engine."""

    def attempt_ended(self, failed: bool) -> None: ...
    def end(self) -> None: ...
