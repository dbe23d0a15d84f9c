"""Says in words what a model forgot by being fine-tuned: of the general questions asked before and after. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from train.data.general_questions import LEAST_KNOWN, QUESTIONS, Verdict, compare

EXAMPLES = 3
_SAID_CHARACTERS = 60
REMEDY = (
    "What helps: general questions among the examples, fewer epochs (`--epochs`), a lower learning rate "
    "(`--learning-rate-multiplier 0.5`), adapters in place of all weights (`--lora-rank 16`)."
)


def verdict(general: dict[str, Any] | None) -> Verdict | None:
    """None while there is nothing to compare, and for a model that knew too little before."""
    if general is None or "after" not in general or len(general.get("before", ())) < LEAST_KNOWN:
        return None
    asked = len(general.get("asked", QUESTIONS))  # rows of older boxes do not say it: all were asked
    return compare(general["before"], general["after"], asked)


def in_short(general: dict[str, Any] | None) -> str | None:
    found = verdict(general)
    if found is None:
        return None
    counts = f"{found.before} of {found.asked} general questions answered before, {found.after} after"
    return f"{counts}: {'the model forgot' if found.forgot else 'no more forgotten than by chance'}"


def in_words(found: Verdict, answers: Sequence[str]) -> str:
    """answers: to every question, after the job."""
    few = "" if found.asked == len(QUESTIONS) else f" ({len(QUESTIONS)} would take too much of so short a job)"
    counts = (
        f"Of {found.asked} general questions{few} the model answered {found.before} before the job and "
        f"{found.after} after"
    )
    if not found.forgot:
        return f"{counts}; nothing was forgotten beyond chance."
    examples = "; ".join(
        f"{QUESTIONS[number][0]!r} is answered {answers[number][:_SAID_CHARACTERS].strip()!r} now"
        for number in found.lost[:EXAMPLES]
        if number < len(answers)
    )
    return f"The model forgot. {counts} ({examples}). {REMEDY}"
