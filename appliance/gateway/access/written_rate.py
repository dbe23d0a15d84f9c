"""Tokens that a model writes per second and per event of a stream, measured on its answers: what to charge where no
engine reports a cost."""

from __future__ import annotations

from typing import Final

_UNKNOWN: Final = 10.0
_MEASURED_FROM_TOKENS: Final = 8
_SMOOTHING: Final = 0.1
_WHOLE_TOKENS: Final = 64
"""A shorter answer counts for less: most of its time went by before its first token, and a client that asks long
prompts for eight tokens each would make it cheap to leave early."""


class WrittenRate:
    """How fast each model writes one sequence: a smoothed mean, and 10 tokens per second until an answer was long
    enough to tell. Also how many tokens an event of its streams has: one until a stream has told."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}
        self._in_event: dict[str, float] = {}

    def answered(self, model: str, tokens: int, sequences: int, took_s: float, longest: int = 0) -> None:
        """An answer of `tokens` in `sequences` together, written in `took_s` (0: unknown). longest: tokens of the
        longest of them, 0 where nobody knows: their mean makes the rate no lower then. The others ended before the
        answer did, four of random lengths after half of it on average, and whoever left early paid half."""
        if tokens < _MEASURED_FROM_TOKENS or took_s <= 0.0:
            return
        of_one = longest or tokens / sequences
        rate = of_one / max(took_s, 1e-3)
        known = self._rates.get(model)
        if known is not None and sequences > 1 and not longest:
            rate = max(rate, known)
        counts = _SMOOTHING * min(of_one / _WHOLE_TOKENS, 1.0)
        self._rates[model] = rate if known is None else known + counts * (rate - known)

    def streamed(self, model: str, tokens: int, events: int) -> None:
        """A whole stream of `tokens` came in so many events: several tokens in one where an engine drafts them, or
        writes faster than it sends."""
        if tokens < _MEASURED_FROM_TOKENS or not events:
            return
        each = max(tokens / events, 1.0)
        known = self._in_event.get(model, 1.0)
        self._in_event[model] = known + _SMOOTHING * min(tokens / _WHOLE_TOKENS, 1.0) * (each - known)

    def in_events(self, model: str, events: int) -> int:
        """Tokens that so many events of a stream have told of."""
        return round(events * self._in_event.get(model, 1.0))

    def written(self, model: str, sequences: int, for_s: float) -> int:
        """Tokens that a request's sequences had after this time."""
        return int(for_s * self._rates.get(model, _UNKNOWN) * sequences)
