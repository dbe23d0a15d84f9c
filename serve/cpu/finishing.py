"""Decides which weights a running engine computes with while it holds two versions. Pure functions.

A staged swap leaves two versions in memory. The old version answers the requests that were in the engine at the swap to
their last token ("finishing"); the new version answers later ones. Every engine step computes requests of one version
only (serve.cpu.finishing_scheduler).
"""

from __future__ import annotations

import re
from enum import StrEnum

SHORT_OF_MEMORY = "memory was short"

# Free host memory below which finishing streams move to the new weights so that the old ones can be freed.
LOW_MEMORY_FRACTION = 0.04

# vLLM's request ids: `[choice_]<id of the answer>[-prompt]-<8 random characters>` (vllm/v1/engine/parallel_sampling.py,
# entrypoints/openai/completion/serving.py, v1/engine/input_processor.py).
_REQUEST_ID = re.compile(r"(?:\d+_)?(.+?)(?:-\d+)?-[0-9a-f]{8}")


class Weights(StrEnum):
    """One of the two versions in memory."""

    OLD = "old"
    NEW = "new"


def next_turn(last: Weights, *, old_ready: bool, new_ready: bool) -> Weights:
    """Choose the version whose requests the next step computes: they alternate if both have runnable requests."""
    if old_ready and new_ready:
        return Weights.NEW if last is Weights.OLD else Weights.OLD
    if old_ready:
        return Weights.OLD
    return Weights.NEW if new_ready else last


def answer_of(request_id: str) -> str:
    """Return the id shared by all requests of one answer (choices, prompts), so that one version computes all of it.

    A caller's own id that looks numbered may join two answers; they then merely finish together.
    """
    match = _REQUEST_ID.fullmatch(request_id)
    return match[1] if match else request_id


def why_move(*, now_s: float, deadline_s: float, free_bytes: int, total_bytes: int) -> str | None:
    """Return why the finishing requests must move to the new weights now; None: they need not."""
    if now_s >= deadline_s:
        return "time was up"
    if free_bytes < LOW_MEMORY_FRACTION * total_bytes:
        return SHORT_OF_MEMORY
    return None
