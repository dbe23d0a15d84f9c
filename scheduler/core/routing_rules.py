"""What gateways and the simulator must judge alike about requests at engines. Pure."""

from __future__ import annotations

PENDING_TO_TOTAL = 16
"""A prompt token that stands before a first token weighs as much as this many tokens in all: those slow a step down."""


def is_sooner_there(
    prompt_tokens: int, *, pending: tuple[int, int], inflight: tuple[int, int], stuck: bool = False
) -> bool:
    """Whether a request without a first token is served sooner by an engine that has just opened than where it waits.

    pending, inflight: prompt tokens without a first token, and requests: (here, there), itself here. stuck: no prompt
    is being computed here, because the cache has no room for the first that waits.
    """
    here, there = pending
    return there + prompt_tokens <= here - prompt_tokens or (stuck and inflight[1] + 1 < inflight[0])
