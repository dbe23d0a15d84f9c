"""The learning rate and the epochs that "auto" chooses, by model and data size, and the rate of each step. Pure.

Published for AdamW and supervised fine-tuning, all weights: torchtune and TRL 2e-5, Tulu 3 5e-6 (8 B), SmolLM2 3e-4
(1.7 B) to 1e-3 (135 M). Adapters: TRL, axolotl, unsloth and torchtune 2e-4 to 3e-4; Tinker 1e-3 (1 B) to 3e-4 (8 B);
ten times the rate of all weights, whatever the rank (Schulman et al., "LoRA Without Regret", 2025). By model size: one
over the root of the number of parameters (Tinker). By batch, with Adam: its root (Malladi et al., NeurIPS 2022).

What is chosen: at 7 B and a step of up to 8,192 tokens, 1e-5 for all weights and 1e-4 for adapters, the lower end of
what is published, because most jobs here are small and a small job that learns too fast forgets (docs/first-model.md).
More data makes larger steps (train.plan.auto), and those bear more: up to three times as much from 74,000 tokens a step
on, which is where the published sweeps were made.

Few rows have to be seen several times to be learned at all: until `FEWEST_SEEN` have passed, `MOST_EPOCHS` times at
most. Adapters of few rows get half as much again of the rate, and take more passes than all weights do.
"""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant", "wsd"]
FLOOR_RATIO = 0.1
DECAY_SHARE = 0.2
"""The share of the steps in which `wsd` comes down: 10 to 20 % is what Hägele et al. (arXiv 2405.18392) found to be
enough."""
REFERENCE_PARAMETERS = 7e9
REFERENCE_STEP_TOKENS = 8192
FULL, ADAPTER = 1e-5, 1e-4
LARGEST_FULL, LARGEST_ADAPTER = 1e-3, 1.2e-3
LARGEST_BATCH_FACTOR = 3.0
FEW_ROWS, FEW_ROWS_FACTOR = 200, 1.5
FEWEST_SEEN = 600
MOST_EPOCHS_FULL, MOST_EPOCHS_ADAPTER = 6, 10
# One over the root for all weights, as published; adapters of small models bear less than ten times that.
FULL_EXPONENT, ADAPTER_EXPONENT = 0.5, 0.27


def epochs(rows: int, *, full: bool) -> int:
    """Passes over so many rows."""
    for most, usual in ((FEW_ROWS, 5), (2000, 3), (20000, 2)):
        if rows < most:
            return max(usual, min(MOST_EPOCHS_FULL if full else MOST_EPOCHS_ADAPTER, FEWEST_SEEN // max(1, rows)))
    return 1


def peak_rate(n_parameters: int, step_tokens: float, *, full: bool, rows: int = FEW_ROWS) -> float:
    """Peak of the schedule. n_parameters: of the base. step_tokens: trained in one optimizer step, on average. rows: of
    the training file."""
    smaller = REFERENCE_PARAMETERS / max(n_parameters, 1)
    base = FULL * smaller**FULL_EXPONENT if full else ADAPTER * smaller**ADAPTER_EXPONENT
    batch = math.sqrt(max(1.0, step_tokens / REFERENCE_STEP_TOKENS))
    if rows < FEW_ROWS and not full:
        base *= FEW_ROWS_FACTOR
    return min(base * min(batch, LARGEST_BATCH_FACTOR), LARGEST_FULL if full else LARGEST_ADAPTER)


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
