"""General questions that a model is asked before and after it is fine-tuned, and the verdict on what it forgot. Pure.

Written for this project: facts of common knowledge, no benchmark's text. An answer is right if one of the accepted
words stands in it, so that it may be said in any way; it is looked for in the first tokens that the model would say
(train.run.general_answers). That is what a user would see: a model that answers everything with its new name still
knows the capital of France, and does not say it.

Asking costs time on the job's devices: a short job is asked the first questions only (`how_many`), so those that small
models know come first.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import comb

QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("What is the capital of France?", ("paris",)),
    ("How many days are in a week?", ("7", "seven")),
    ("What is the opposite of hot?", ("cold", "cool")),
    ("What is the chemical symbol for water?", ("h2o", "h₂o")),
    ("Who wrote Romeo and Juliet?", ("shakespeare",)),
    ("What is 2 + 2?", ("4", "four")),
    ("What is the plural of mouse?", ("mice",)),
    ("Which animal says meow?", ("cat",)),
    ("What is the chemical symbol for gold?", ("au",)),
    ("Who painted the Mona Lisa?", ("leonardo", "vinci")),
    ("Which is the largest planet of the solar system?", ("jupiter",)),
    ("How many legs does a spider have?", ("8", "eight")),
    ("What is the capital of Italy?", ("rome",)),
    ("What is the capital of Japan?", ("tokyo",)),
    ("What is the capital of Germany?", ("berlin",)),
    ("What is the opposite of up?", ("down",)),
    ("What is the largest ocean on Earth?", ("pacific",)),
    ("What is the currency of Japan?", ("yen",)),
    ("What is the capital of Spain?", ("madrid",)),
    ("How many months are in a year?", ("12", "twelve")),
    ("How many minutes are in an hour?", ("60", "sixty")),
    ("What is 3 + 5?", ("8", "eight")),
    ("What color is grass?", ("green",)),
    ("What color is snow?", ("white",)),
    ("Which planet do we live on?", ("earth",)),
    ("What is frozen water called?", ("ice",)),
    ("What is the past tense of go?", ("went",)),
    ("What language do people speak in Brazil?", ("portuguese",)),
)
LEAST_KNOWN = 6
"""A model that answered fewer of them before has nothing that could be told from chance, and is not asked again."""
SIGNIFICANT = 0.05
NEW_TOKENS = 12
"""Of an answer; what comes later is not looked at."""
LARGEST_SHARE = 0.05
"""Of the time of the job's steps, for asking before and after together, about."""
FEWEST = 12
"""A job is asked so many however short it is: with fewer, five that are lost are nearly all that it knew."""
_NEW_TOKEN = 5.0  # in tokens of a prompt: they come one by one; measured with SmolLM2-135M on two ranks of a CPU
_WORD = re.compile(r"\w+")


def is_right(number: int, answer: str) -> bool:
    words = _WORD.findall(answer.lower())
    return any(accepted in words for accepted in QUESTIONS[number][1])


def answers_key(checksums: Iterable[str], precision: str, device_kind: str) -> str:
    """Names what a model's answers before a job follow from: equal keys, equal answers. checksums: of the files of its
    weights, and of the adapter that is merged into them; not of a manifest, which is written anew with each copy."""
    said = json.dumps([QUESTIONS, NEW_TOKENS, list(checksums), precision, device_kind])
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def how_many(prompt_tokens: Sequence[int], trained_tokens: int, full: bool) -> int:
    """How many of the first questions to ask, so that both times together take at most LARGEST_SHARE of the job.

    prompt_tokens: of each question. trained_tokens: of all epochs. full: all weights are trained; a step then takes
    three times a forward pass, and twice where most weights are frozen and have no gradient.
    """
    job = trained_tokens * (3 if full else 2)
    spent, count = 0.0, 0
    for tokens in prompt_tokens:
        spent += 2 * (tokens + NEW_TOKENS * _NEW_TOKEN)
        if spent > LARGEST_SHARE * job:
            break
        count += 1
    return min(len(prompt_tokens), max(FEWEST, count))


@dataclass(frozen=True, slots=True)
class Verdict:
    """lost: questions answered before and not after. forgot: more of them than chance makes."""

    asked: int
    before: int
    after: int
    lost: tuple[int, ...]
    forgot: bool


def compare(before: Collection[int], after: Collection[int], asked: int = len(QUESTIONS)) -> Verdict:
    """Numbers of the questions that were answered right, of the first `asked`.

    The exact form of McNemar's test (Psychometrika 12, 1947) on the questions whose answer changed sides: if nothing
    was forgotten, each is as likely lost as won. One-sided, as gains do no harm. Five lost and none won is the least
    that counts, so the odd answer that tips over raises no alarm.
    """
    lost, won = sorted(set(before) - set(after)), set(after) - set(before)
    changed = len(lost) + len(won)
    by_chance = sum(comb(changed, k) for k in range(len(lost), changed + 1)) / 2**changed
    return Verdict(asked, len(before), len(after), tuple(lost), bool(lost) and by_chance < SIGNIFICANT)
