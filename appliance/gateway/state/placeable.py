"""Defines the interface of an inference request that can be held, placed and counted for a table row."""

from __future__ import annotations

from appliance.gateway.http.handler import Handler
from appliance.gateway.routing.holds import Refusal


class Placeable(Handler):
    """`inference.placement.Placement` is the only implementation; a request stays one until it is answered."""

    @property
    def row(self) -> str:
        """The table row it counts for: the canary's while it is placed there, else its model's."""
        raise NotImplementedError

    @property
    def waiting_prompt_tokens(self) -> int:
        """Estimated prompt tokens if it is known to have no first token yet. On a replica only streams show this."""
        raise NotImplementedError

    @property
    def prompt_tokens(self) -> int:
        """Estimated prompt tokens, wherever it is."""
        raise NotImplementedError

    @property
    def waits_at(self) -> tuple[str, float]:
        """The replica at which it waits for a first token, and since when (monotonic clock), if it may move to another;
        else ("", 0)."""
        raise NotImplementedError

    def move(self) -> None:
        """Take it back from its replica, and place it at another."""
        raise NotImplementedError

    def place(self, now: float = 0.0) -> None:
        """Send the request to a replica that can take it, or hold it. now: the monotonic clock, if it was just read."""
        raise NotImplementedError

    def look_again(self) -> None:
        """End it if its key may not call its model any more, or the model is gone. Call for held ones, of every new
        table."""
        raise NotImplementedError

    def hold_refused(self, refusal: Refusal) -> None:
        """It may not wait (any longer). Its ticket is already removed from the queue."""
        raise NotImplementedError
