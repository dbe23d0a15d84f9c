"""Collects what the load report says of one row of the routing table. Pure: the caller passes the time."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from appliance.gateway.access.request import Request
from appliance.gateway.routing import prefill_rate
from appliance.gateway.routing.canary_comparison import bucket

RECENT_S: Final = 60.0
_RECENT_REQUESTS: Final = 256
_COMPUTED_TOKENS: Final = 1e6
"""Prompt tokens after which those before count half."""


class RowLoad:
    """Counts and recent times of one row since it is in the table. Times in seconds by the monotonic clock.

    active_s: last arrival, first byte or end of a request. arrived_prompts, first_tokens: requests by bucket of their
    prompt tokens (from 1), and streams by bucket of the time to their first token (`canary_comparison.bucket`).
    """

    def __init__(self) -> None:
        self.active_s = 0.0
        self.last_request_s: float | None = None
        self.arrived_requests = self.arrived_prompt_tokens = 0
        self.arrived_prompts: Counter[int] = Counter()
        self.first_tokens: Counter[int] = Counter()
        self._prefills: deque[tuple[int, float]] = deque(maxlen=prefill_rate.SAMPLES)
        self._estimated = self._computed = 0.0
        self._ttft: deque[tuple[float, float]] = deque(maxlen=_RECENT_REQUESTS)
        self._tpot: deque[tuple[float, float]] = deque(maxlen=_RECENT_REQUESTS)

    def arrived(self, prompt_tokens: int, now_s: float) -> None:
        """Count an admitted request."""
        self.active_s = self.last_request_s = now_s
        self.arrived_requests += 1
        self.arrived_prompt_tokens += prompt_tokens
        self.arrived_prompts[bucket(prompt_tokens, 1.0)] += 1

    def first_token(self, seconds: float) -> None:
        """Count a stream by the time from its complete request to its first token."""
        self.first_tokens[bucket(seconds)] += 1

    def prefilled(self, prompt_tokens: int, seconds: float) -> None:
        """Record the time to the first byte of a stream that was alone on its replica."""
        self._prefills.append((prompt_tokens, seconds))

    def first_byte(self, seconds: float, now_s: float) -> None:
        self.active_s = now_s
        self._ttft.append((now_s, seconds))

    def finished(self, request: Request, token_s: float | None, now_s: float) -> None:
        """Count a finished request. token_s: mean time from one token to the next, of a stream."""
        self.active_s = now_s
        # What another engine had computed and refused says nothing of this one.
        prompt = request.tokens.prompt - request.refused_prompt
        if prompt and request.asked.prompt_tokens:
            fade = 1.0 if self._estimated < _COMPUTED_TOKENS else 0.5
            self._estimated = self._estimated * fade + request.asked.prompt_tokens
            self._computed = self._computed * fade + max(prompt - request.tokens.found, 0)
        if token_s is not None:
            self._tpot.append((now_s, token_s))

    @property
    def computed_part(self) -> float | None:
        """Prompt tokens computed by engines for an estimated one; None without answers that told.

        Fewer where prompts share a cached prefix, more or fewer where the estimate errs.
        """
        return self._computed / self._estimated if self._estimated else None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens per second of one replica; None if the streams so far do not determine it."""
        return prefill_rate.prefill_tokens_per_s(self._prefills)

    def ttft_p95_s(self, now_s: float) -> float | None:
        """95th percentile of the time to the first byte over the last minute; None without requests."""
        return _p95(self._ttft, now_s)

    def tpot_p95_s(self, now_s: float) -> float | None:
        """95th percentile of streams' mean time between tokens over the last minute; None without streams."""
        return _p95(self._tpot, now_s)


def _p95(recent: deque[tuple[float, float]], now_s: float) -> float | None:
    values = sorted(seconds for at_s, seconds in recent if at_s >= now_s - RECENT_S)
    return values[min(len(values) - 1, int(len(values) * 0.95))] if values else None
