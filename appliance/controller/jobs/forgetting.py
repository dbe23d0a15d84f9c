"""Says what a model forgot by being fine-tuned, from the general questions asked before and after. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from train.data.general_questions import LEAST_KNOWN, QUESTIONS, Answers, Verdict, compare

EXAMPLES = 3
_SAID_CHARACTERS = 60
REMEDY = (
    "What helps: general questions among the examples, fewer epochs (`--epochs`), a lower learning rate "
    "(`--learning-rate-multiplier 0.5`), adapters in place of all weights (`--lora-rank 16`)."
)


def verdict(general: dict[str, Any] | None) -> Verdict | None:
    """Returns None while there is nothing to compare, and for a model that knew too little before the job."""
    if general is None or "before" not in general or "after" not in general:
        return None
    before, after = (Answers(**general[when]) for when in ("before", "after"))
    return compare(before, after) if before.mean >= LEAST_KNOWN else None


def in_short(general: dict[str, Any] | None) -> str | None:
    found = verdict(general)
    if found is None:
        return None
    says = "the model forgot" if found.forgot else "no more forgotten than by chance, or little"
    return f"{_likely(found)} after, {found.asked} asked: {says}"


def in_words(found: Verdict, answers: Mapping[int, str]) -> str:
    """answers: to the questions that the model answered itself after the job, by their numbers."""
    few = "" if found.asked == len(QUESTIONS) else f" ({len(QUESTIONS)} would take too much of so short a job)"
    counts = f"Of {found.asked} general questions{few} the {_likely(found)} after"
    if not found.forgot:
        return f"{counts}; nothing was forgotten beyond chance, or little."
    spoken = [
        f"{QUESTIONS[number].text!r} is answered {answers[number][:_SAID_CHARACTERS].strip()!r} now"
        for number in found.unsaid
        if number in answers
    ]
    known = [
        f"to {QUESTIONS[number].text!r} {QUESTIONS[number].right!r} is not the likeliest now" for number in found.lost
    ]
    examples = "; ".join((spoken[: EXAMPLES - 1] + known)[:EXAMPLES])
    return f"The model forgot. {counts}{f' ({examples})' if examples else ''}. {REMEDY}"


def _likely(found: Verdict) -> str:
    return f"right word was {found.before:.0%} likely before the job, {found.after:.0%}"
