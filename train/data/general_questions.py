"""General questions that a model is asked before and after it is fine-tuned, and the verdict on what it forgot. Pure.

Written for this project: facts of common knowledge, no benchmark's text. An answer is right if one of the accepted
words stands in it, so that it may be said in any way; it is looked for in the first tokens that the model would say
(train.run.general_answers). That is what a user would see: a model that answers everything with its new name still
knows the capital of France, and does not say it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from math import comb

QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("What is the capital of France?", ("paris",)),
    ("What is the capital of Italy?", ("rome",)),
    ("What is the capital of Japan?", ("tokyo",)),
    ("What is the capital of Spain?", ("madrid",)),
    ("What is the capital of Germany?", ("berlin",)),
    ("How many days are in a week?", ("7", "seven")),
    ("How many months are in a year?", ("12", "twelve")),
    ("How many minutes are in an hour?", ("60", "sixty")),
    ("How many legs does a spider have?", ("8", "eight")),
    ("What is 2 + 2?", ("4", "four")),
    ("What is 3 + 5?", ("8", "eight")),
    ("What color is grass?", ("green",)),
    ("What color is snow?", ("white",)),
    ("Which planet do we live on?", ("earth",)),
    ("Which is the largest planet of the solar system?", ("jupiter",)),
    ("What is frozen water called?", ("ice",)),
    ("What is the chemical symbol for water?", ("h2o", "h₂o")),
    ("What is the chemical symbol for gold?", ("au",)),
    ("What is the opposite of hot?", ("cold", "cool")),
    ("What is the opposite of up?", ("down",)),
    ("What is the plural of mouse?", ("mice",)),
    ("What is the past tense of go?", ("went",)),
    ("Who wrote Romeo and Juliet?", ("shakespeare",)),
    ("Who painted the Mona Lisa?", ("leonardo", "vinci")),
    ("Which animal says meow?", ("cat",)),
    ("What is the largest ocean on Earth?", ("pacific",)),
    ("What language do people speak in Brazil?", ("portuguese",)),
    ("What is the currency of Japan?", ("yen",)),
)
LEAST_KNOWN = 6
"""A model that answered fewer of them before has nothing that could be told from chance, and is not asked again."""
SIGNIFICANT = 0.05
_WORD = re.compile(r"\w+")


def is_right(number: int, answer: str) -> bool:
    words = _WORD.findall(answer.lower())
    return any(accepted in words for accepted in QUESTIONS[number][1])


@dataclass(frozen=True, slots=True)
class Verdict:
    """lost: questions answered before and not after. forgot: more of them than chance makes."""

    asked: int
    before: int
    after: int
    lost: tuple[int, ...]
    forgot: bool


def compare(before: Collection[int], after: Collection[int]) -> Verdict:
    """Numbers of the questions that were answered right.

    The exact form of McNemar's test (Psychometrika 12, 1947) on the questions whose answer changed sides: if nothing
    was forgotten, each is as likely lost as won. One-sided, as gains do no harm. Five lost and none won is the least
    that counts, so the odd answer that tips over raises no alarm.
    """
    lost, won = sorted(set(before) - set(after)), set(after) - set(before)
    changed = len(lost) + len(won)
    by_chance = sum(comb(changed, k) for k in range(len(lost), changed + 1)) / 2**changed
    return Verdict(len(QUESTIONS), len(before), len(after), tuple(lost), bool(lost) and by_chance < SIGNIFICANT)
