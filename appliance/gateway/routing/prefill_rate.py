"""Estimates a replica's prefill rate from the times to first token of streams that were alone on a replica."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

SAMPLES = 48
"""Streams kept per model: this many new streams replace those of old engines and weights."""
LEAST_SAMPLES = 12
TELLING = 1.2
"""Long prompts must take longer than short ones by this factor; otherwise the data determine no rate."""


def prefill_tokens_per_s(samples: Sequence[tuple[int, float]]) -> float | None:
    """Tokens per second from (prompt tokens, seconds to the first token) on idle replicas; None if undetermined.

    The slope of the resistant line through the outer thirds (Tukey 1977, "Exploratory Data Analysis", chapter 5): the
    part of the time that does not grow with the prompt (scheduling, the first step of decoding) drops out, and single
    slow ones (an engine that has just woken, a neighbour that another worker sent) move no median. Tokens are counted
    as routing estimates them; whatever its error, the work of the same estimate comes out right.
    """
    if len(samples) < LEAST_SAMPLES:
        return None
    ordered = sorted(samples)
    third = len(ordered) // 3
    short, long = ordered[:third], ordered[-third:]
    tokens = median(n for n, _ in long) - median(n for n, _ in short)
    short_s, long_s = median(s for _, s in short), median(s for _, s in long)
    if tokens <= 0 or short_s <= 0 or long_s < TELLING * short_s:
        return None
    return tokens / (long_s - short_s)
