"""Tokens per second that a model writes, measured on its answers: what to charge where no engine reports a cost."""

from __future__ import annotations

from typing import Final

_UNKNOWN: Final = 10.0
_MEASURED_FROM_TOKENS: Final = 8
_SMOOTHING: Final = 0.1
_WHOLE_TOKENS: Final = 64
"""A shorter answer counts for less: most of its time went by before its first token, and who asks long prompts for
eight tokens each would make it cheap to leave early."""


class WrittenRate:
    """By model, of one sequence: a smoothed mean, and 10 tokens per second until an answer was long enough to tell."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def answered(self, model: str, tokens: int, sequences: int, took_s: float) -> None:
        """An answer of `tokens` in `sequences` together, written in `took_s` (0: unknown)."""
        if tokens < _MEASURED_FROM_TOKENS or took_s <= 0.0:
            return
        of_one = tokens / sequences
        rate = of_one / max(took_s, 1e-3)
        known = self._rates.get(model)
        counts = _SMOOTHING * min(of_one / _WHOLE_TOKENS, 1.0)
        self._rates[model] = rate if known is None else known + counts * (rate - known)

    def written(self, model: str, sequences: int, for_s: float) -> int:
        """Tokens that a request's sequences had after this time."""
        return int(for_s * self._rates.get(model, _UNKNOWN) * sequences)
