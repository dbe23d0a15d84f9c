"""A request for inference as the tables see it: it may be held, it is placed, and it counts for a row."""

from __future__ import annotations

from appliance.gateway.http.handler import Handler
from appliance.gateway.routing.holds import Refusal


class Placeable(Handler):
    """`inference.placement.Placement` is the only one. Placeable or not: it is one for as long as it is answered."""

    @property
    def row(self) -> str:
        """The row of the table it counts for: that of the canary while it is there, else its model's."""
        raise NotImplementedError

    @property
    def waiting_prompt_tokens(self) -> int:
        """Estimated prompt tokens if it is known to have no first token yet. At a replica only streams say so."""
        raise NotImplementedError

    def place(self, now: float = 0.0) -> None:
        """Send the request to a replica that can take it, or hold it. now: the monotonic clock, if it was just read."""
        raise NotImplementedError

    def hold_refused(self, refusal: Refusal) -> None:
        """It may not wait (any longer). Its ticket is already out of the queue."""
        raise NotImplementedError
