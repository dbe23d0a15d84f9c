"""General questions that a model is asked before and after it is fine-tuned, and the verdict on what it forgot. Pure.

Written for this project: facts of common knowledge, no benchmark's text. The answer to each is begun for the model, and
two things are read from one forward pass, without generation:

- *known*: how likely the right word comes next, against wrong words of the same kind. It is finer than right or wrong:
  a model that is a little less sure of everything shows it.
- *begun*: how likely the model itself would begin so. A model that answers with its new name may still know who wrote
  Romeo and Juliet, and does not say it.

Questions whose answers begin much otherwise after the job are asked once more, and the model answers them itself: it is
seen whether the right word stands there.

Asking costs time on the job's devices: a short job is asked the first questions only (`how_many`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Question(NamedTuple):
    """begun: how an answer begins; `right` or a word of `wrong` comes next. Words of one question differ in their first
    letters, so that their first tokens do."""

    text: str
    begun: str
    right: str
    wrong: tuple[str, ...]


QUESTIONS: tuple[Question, ...] = (
    Question("What is the capital of France?", "The capital of France is", "Paris", ("London", "Madrid", "Rome")),
    Question("How many days are in a week?", "There are", "seven", ("five", "ten", "twelve")),
    Question("What is the opposite of hot?", "The opposite of hot is", "cold", ("big", "fast", "dark")),
    Question("What is water made of?", "Water is made of hydrogen and", "oxygen", ("carbon", "iron", "gold")),
    Question(
        "Who wrote Romeo and Juliet?",
        "Romeo and Juliet was written by William",
        "Shakespeare",
        ("Dickens", "Blake", "Wordsworth"),
    ),
    Question("What is two plus two?", "Two plus two is", "four", ("three", "five", "six")),
    Question("What is the plural of mouse?", "The plural of mouse is", "mice", ("rats", "houses", "cats")),
    Question("Which animal says meow?", "The animal that says meow is the", "cat", ("dog", "cow", "horse")),
    Question("Who painted the Mona Lisa?", "The Mona Lisa was painted by", "Leonardo", ("Michel", "Vincent", "Pablo")),
    Question(
        "Which is the largest planet of the solar system?",
        "The largest planet of the solar system is",
        "Jupiter",
        ("Mars", "Saturn", "Venus"),
    ),
    Question("How many legs does a spider have?", "A spider has", "eight", ("six", "four", "ten")),
    Question("What is the capital of Italy?", "The capital of Italy is", "Rome", ("Paris", "Berlin", "Athens")),
    Question("What is the capital of Japan?", "The capital of Japan is", "Tokyo", ("Beijing", "Seoul", "London")),
    Question("What is the capital of Germany?", "The capital of Germany is", "Berlin", ("Vienna", "Paris", "Rome")),
    Question("What is the opposite of up?", "The opposite of up is", "down", ("left", "high", "over")),
    Question(
        "What is the largest ocean on Earth?",
        "The largest ocean on Earth is the",
        "Pacific",
        ("Atlantic", "Indian", "Arctic"),
    ),
    Question("What is the currency of Japan?", "The currency of Japan is the", "yen", ("dollar", "euro", "pound")),
    Question("What is the capital of Spain?", "The capital of Spain is", "Madrid", ("Paris", "Rome", "London")),
    Question("How many months are in a year?", "There are", "twelve", ("ten", "seven", "nine")),
    Question("What color is grass?", "Grass is", "green", ("blue", "red", "purple")),
    Question("What color is snow?", "Snow is", "white", ("green", "red", "black")),
    Question("Which planet do we live on?", "We live on the planet", "Earth", ("Mars", "Venus", "Saturn")),
    Question("What is frozen water called?", "Frozen water is called", "ice", ("steam", "dust", "milk")),
    Question("What is the past tense of go?", "The past tense of go is", "went", ("goes", "came", "ran")),
    Question(
        "What language do people speak in Brazil?",
        "In Brazil people speak",
        "Portuguese",
        ("Spanish", "French", "German"),
    ),
    Question("On which continent is Egypt?", "Egypt is in", "Africa", ("Europe", "South", "North")),
    Question(
        "Who was the first president of the United States?",
        "The first president of the United States was",
        "George",
        ("Abraham", "Thomas", "John"),
    ),
    Question(
        "Which star is closest to the Earth?", "The star closest to the Earth is the", "Sun", ("Moon", "North", "Pole")
    ),
    Question("What do bees make?", "Bees make", "honey", ("milk", "bread", "silk")),
    Question(
        "Which gas do people need to breathe?", "People need to breathe", "oxygen", ("carbon", "hydrogen", "helium")
    ),
    Question("Which season comes after winter?", "The season after winter is", "spring", ("autumn", "summer", "fall")),
    Question("Which day comes after Monday?", "The day after Monday is", "Tuesday", ("Sunday", "Friday", "Thursday")),
    Question("Which month comes after March?", "The month after March is", "April", ("June", "January", "August")),
    Question("What is a baby dog called?", "A baby dog is called a", "puppy", ("kitten", "lamb", "cub")),
    Question(
        "Who discovered the law of gravity when an apple fell?",
        "The law of gravity was discovered by Isaac",
        "Newton",
        ("Einstein", "Darwin", "Galileo"),
    ),
    Question(
        "What is the largest animal on Earth?",
        "The largest animal on Earth is the blue",
        "whale",
        ("bird", "shark", "cat"),
    ),
    Question("What is the opposite of day?", "The opposite of day is", "night", ("week", "noon", "light")),
    Question("In which city is the Eiffel Tower?", "The Eiffel Tower is in", "Paris", ("London", "Berlin", "New")),
    Question("What is the capital of Russia?", "The capital of Russia is", "Moscow", ("Berlin", "Paris", "London")),
    Question("How many sides does a triangle have?", "A triangle has", "three", ("two", "five", "six")),
    Question(
        "What is the freezing point of water in degrees Celsius?",
        "The freezing point of water in degrees Celsius is",
        "zero",
        ("ten", "thirty", "fifty"),
    ),
    Question(
        "What do you call a person who flies a plane?",
        "A person who flies a plane is called a",
        "pilot",
        ("doctor", "teacher", "driver"),
    ),
    Question(
        "Which organ pumps blood through the body?",
        "The organ that pumps blood through the body is the",
        "heart",
        ("brain", "stomach", "skin"),
    ),
    Question("Which metal is attracted by a magnet?", "A magnet attracts", "iron", ("gold", "wood", "silver")),
    Question(
        "What is the capital of the United Kingdom?",
        "The capital of the United Kingdom is",
        "London",
        ("Paris", "Dublin", "Rome"),
    ),
    Question("What is the opposite of left?", "The opposite of left is", "right", ("up", "behind", "wrong")),
    Question(
        "Which bird cannot fly and lives in Antarctica?",
        "A bird that cannot fly and lives in Antarctica is the",
        "penguin",
        ("eagle", "owl", "parrot"),
    ),
    Question(
        "Who developed the theory of relativity?",
        "The theory of relativity was developed by Albert",
        "Einstein",
        ("Newton", "Darwin", "Hitchcock"),
    ),
)
SPOKEN = 8
"""The most questions that the model answers itself: their tokens come one by one, all rows together."""
ALSO_RIGHT: Mapping[str, tuple[str, ...]] = {
    "cold": ("cool",),
    "three": ("3",),
    "four": ("4",),
    "seven": ("7",),
    "eight": ("8",),
    "twelve": ("12",),
    "zero": ("0",),
}
"""Other ways to say the right word."""
NEW_TOKENS = 12
"""Tokens of a spoken answer; what comes later is not looked at."""
OTHERWISE = 1.0
"""Nats for a token of the beginning of an answer that a question has to lose before it is asked once more."""
UNSAID, UNSAID_SHARE = 2, 0.1
"""A warning is given once this many of them are without the right word, and this share of all questions."""
LEAST_KNOWN = 0.5
"""Mean probability of the right words, a quarter by guessing: a model below it has nothing to forget that could be told
from chance, and is not asked again."""
LEAST_LOSS = 0.05
"""The loss of the mean probability that counts; a smaller one is reported and is not a warning, however certain."""
SURE = 2.0
"""Standard errors that a loss has to be away from zero: one chance in forty."""
LARGEST_SHARE = 0.05
"""About the share of the time of the job's steps that asking before and after may take together."""
FEWEST = 12
"""A job is asked this many however short it is."""
_WORD = re.compile(r"\w+")


def is_right(number: int, answer: str) -> bool:
    """Whether a spoken answer has the right word in it."""
    right = QUESTIONS[number].right.lower()
    return not {right, *ALSO_RIGHT.get(right, ())}.isdisjoint(_WORD.findall(answer.lower()))


def answers_key(checksums: Iterable[str], precision: str, device_kind: str) -> str:
    """Names what a model's answers before a job follow from: equal keys, equal answers. checksums: of the files of its
    weights, and of the adapter that is merged into them; not of a manifest, which is written again with each copy."""
    text = json.dumps([QUESTIONS, list(checksums), precision, device_kind])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def how_many(tokens: Sequence[int], trained_tokens: int, full: bool) -> int:
    """How many of the first questions to ask, so that both times together take at most LARGEST_SHARE of the job.

    tokens: of each question and the beginning of its answer. trained_tokens: of all epochs. full: all weights are
    trained; a step then takes three times a forward pass, and twice where most weights are frozen and have no gradient.
    """
    job = trained_tokens * (3 if full else 2)
    spent, count = 0.0, 0
    for own in tokens:
        spent += 2 * own
        if spent > LARGEST_SHARE * job:
            break
        count += 1
    return min(len(tokens), max(FEWEST, count))


class Answers(NamedTuple):
    """Answers to the first questions, as many as were asked. known: the probability of the right word among the words
    of each. begun: mean log-probability of a token of the beginning of its answer. spoken: numbers of the questions
    that the model answered itself; said: those of them that it answered right."""

    known: tuple[float, ...]
    begun: tuple[float, ...]
    spoken: tuple[int, ...] = ()
    said: tuple[int, ...] = ()

    @property
    def mean(self) -> float:
        return sum(self.known) / len(self.known)


def begin_otherwise(before: Answers, after: Answers) -> list[int]:
    """Numbers of the questions that the model knew and whose answers begin otherwise now, at most SPOKEN of them."""
    losses = [was - now for was, now in zip(before.begun, after.begun, strict=False)]
    found = [number for number, loss in enumerate(losses) if loss > OTHERWISE and before.known[number] > 0.5]
    return sorted(sorted(found, key=lambda number: -losses[number])[:SPOKEN])


@dataclass(frozen=True, slots=True)
class Verdict:
    """before, after: mean probability of the right words. error: standard error of their difference. lost: questions
    whose right word was the likeliest and is not any more, those that lost most first. unsaid: those that it
    answers without the right word. forgot: the loss is large and no chance, or too much is not said."""

    asked: int
    before: float
    after: float
    error: float
    lost: tuple[int, ...]
    unsaid: tuple[int, ...]
    forgot: bool


def compare(before: Answers, after: Answers) -> Verdict:
    """Compares the questions that were asked both times. Paired: each question is compared with itself, so that hard
    and easy ones make no noise."""
    pairs = list(zip(before.known, after.known, strict=False))
    count = len(pairs)
    losses = [was - now for was, now in pairs]
    mean = sum(losses) / count
    error = (sum((loss - mean) ** 2 for loss in losses) / max(1, count - 1) / count) ** 0.5
    gone = [number for number, (was, now) in enumerate(pairs) if was > 0.5 >= now]
    unsaid = sorted(set(after.spoken) - set(after.said))
    return Verdict(
        asked=count,
        before=sum(was for was, _ in pairs) / count,
        after=sum(now for _, now in pairs) / count,
        error=error,
        lost=tuple(sorted(gone, key=lambda number: -losses[number])),
        unsaid=tuple(unsaid),
        forgot=len(unsaid) >= max(UNSAID, UNSAID_SHARE * count) or (mean >= LEAST_LOSS and mean > SURE * error),
    )
