"""Computes the learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

FLOOR_RATIO = 0.1


def learning_rate(step: int, total_steps: int, *, peak: float, warmup_ratio: float) -> float:
    """Rate for optimizer step `step` (0-based): linear warm-up, then cosine from `peak` to a tenth of it.

    The first step already moves (rate peak / warm-up steps), the last ends at the floor.
    """
    warmup_steps = math.ceil(total_steps * warmup_ratio)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay_steps = max(1, total_steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    return peak * (FLOOR_RATIO + (1 - FLOOR_RATIO) * 0.5 * (1 + math.cos(math.pi * progress)))
