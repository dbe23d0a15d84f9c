"""Computes the learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from typing import Literal, get_args

Schedule = Literal["cosine", "linear", "constant", "wsd"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
FLOOR_RATIO = 0.1
DECAY_SHARE = 0.2
"""The share of the steps in which `wsd` comes down: 10 to 20 % is what Hägele et al. (arXiv 2405.18392) found to be
enough."""


def learning_rate(
    step: int, total_steps: int, *, peak: float, warmup_ratio: float, schedule: Schedule = "cosine"
) -> float:
    """Rate for optimizer step `step` (0-based): linear warm-up to `peak`, then what `schedule` says.

    cosine, linear: down to a tenth of `peak`. constant: `peak`. wsd (warm-up, stable, decay; MiniCPM, arXiv
    2404.06395): `peak` until the last fifth of the steps, then linearly to a tenth. The first step already moves (rate
    peak / warm-up steps).
    """
    warmup_steps = math.ceil(total_steps * warmup_ratio)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    decay_from = warmup_steps
    if schedule == "wsd":
        decay_from = max(warmup_steps, total_steps - 1 - math.ceil(total_steps * DECAY_SHARE))
    progress = min(1.0, max(0.0, (step - decay_from) / max(1, total_steps - 1 - decay_from)))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return peak * (FLOOR_RATIO + (1 - FLOOR_RATIO) * left)
