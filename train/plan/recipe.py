"""The learning rate and the epochs that "auto" chooses, by model and data size, and the rate of each step. Pure.

What others publish, for AdamW and supervised fine-tuning (read in November 2026):

    all weights     torchtune 2e-5 (7 B to 70 B), TRL's SFTTrainer 2e-5, Stanford Alpaca 2e-5 (7 B), Tulu 3 5e-6 (8 B),
                    SmolLM2's own instruct models 3e-4 (1.7 B) and 1e-3 (135 M), on some hundred million tokens
    adapters        torchtune 3e-4, axolotl and unsloth 2e-4, TRL 2e-4 ("about ten times as much"); Tinker's sweep over
                    Tulu 3 (128 conversations a step, 780 steps): 1e-3 at 1 B, 3e-4 at 8 B and 70 B
                    (tinker_cookbook/hyperparam_utils.py)
    one to other    Schulman et al., "LoRA Without Regret" (2025): adapters want ten times the rate of all weights,
                    whatever the rank, and bear large batches worse; Biderman et al., "LoRA Learns Less and Forgets
                    Less" (TMLR 2024): the same order, and that full tuning forgets more at the rate that it needs
    model size      Tinker's: all weights by one over the root of the number of parameters
    batch           Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (NeurIPS 2022):
                    with Adam the rate goes by the root of the batch
    OpenAI          says no rates, only a multiplier of its own choice ("auto"; larger for larger batches)

What is chosen: at 7 B and a step of up to 8,192 tokens, 1e-5 for all weights and 1e-4 for adapters, the lower end of
what is published, because most jobs here are small and a small job that learns too fast forgets: SmolLM2-135M learnt 64
examples at 7.2e-4, 4.3e-4 and 2.9e-4 alike, and of twelve general questions, of which it had answered eleven before,
answered ten, eleven and twelve after (docs/first-model.md). More data makes larger steps (train.plan.auto), and those
bear more: up to three times as much from 74,000 tokens a step on, which is where the published sweeps were made.

Few rows have to be seen several times to be learned at all: until `FEWEST_SEEN` have passed, `MOST_EPOCHS` times at
most. Adapters of few rows get half as much again of the rate, and take more passes than all weights do.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

Schedule = Literal["cosine", "linear", "constant", "wsd"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
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
