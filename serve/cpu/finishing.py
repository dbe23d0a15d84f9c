"""Which weights a running engine computes with while it holds two versions. Pure decisions.

A staged swap leaves two versions in memory. The requests that the engine had when it exchanged them are answered by the
old one to their last token ("finishing"), those that come after by the new one; every step of the engine computes
requests of one side only (serve.cpu.finishing_scheduler).
"""

from __future__ import annotations

import re
from enum import StrEnum

SHORT_OF_MEMORY = "memory was short"

# What a host may run down to before streams give up the memory of the weights they finish on.
LOW_MEMORY_FRACTION = 0.04

# vLLM's request ids: `[choice_]<id of the answer>[-prompt]-<8 random characters>` (vllm/v1/engine/parallel_sampling.py,
# entrypoints/openai/completion/serving.py, v1/engine/input_processor.py).
_REQUEST_ID = re.compile(r"(?:\d+_)?(.+?)(?:-\d+)?-[0-9a-f]{8}")


class Weights(StrEnum):
    """Which of the two versions in memory."""

    OLD = "old"
    NEW = "new"


def next_turn(last: Weights, *, old_ready: bool, new_ready: bool) -> Weights:
    """Whose requests the next step computes: by turns where both sides have some that can run."""
    if old_ready and new_ready:
        return Weights.NEW if last is Weights.OLD else Weights.OLD
    if old_ready:
        return Weights.OLD
    return Weights.NEW if new_ready else last


def answer_of(request_id: str) -> str:
    """What the requests of one answer (its choices, its prompts) have in common, so that one version gives all of it.

    A caller's own id that looks numbered may join two answers, which then only finish together.
    """
    match = _REQUEST_ID.fullmatch(request_id)
    return match[1] if match else request_id


def why_move(*, now_s: float, deadline_s: float, free_bytes: int, total_bytes: int) -> str | None:
    """Why the requests that still finish on the old weights go over to the new ones now; None: they need not."""
    if now_s >= deadline_s:
        return "time was up"
    if free_bytes < LOW_MEMORY_FRACTION * total_bytes:
        return SHORT_OF_MEMORY
    return None
