"""The trace spans of one request, as those who begin and end them see them (observe/tracing.py makes them).

Not compiled: the compiled modules call whatever object stands here, and load no SDK for it.
"""

from __future__ import annotations

from typing import Protocol


class Spans(Protocol):
    """Whatever is open when the request ends, ends with it."""

    def hold(self) -> None: ...
    def unhold(self) -> None: ...

    def attempt(self) -> bytes:
        """The request goes to a replica now. Returns the `traceparent` for the engine."""

    def attempt_ended(self, failed: bool) -> None: ...
    def end(self) -> None: ...
