"""The general questions, what counts as a right answer, and when a model forgot."""

from __future__ import annotations

import itertools

import pytest

from train.data.general_questions import LEAST_KNOWN, QUESTIONS, compare, is_right


def number(question: str) -> int:
    return next(n for n, (asked, _) in enumerate(QUESTIONS) if asked == question)


def test_no_question_stands_there_twice_and_accepted_words_are_words():
    assert len({question for question, _ in QUESTIONS}) == len(QUESTIONS) >= 20 > LEAST_KNOWN
    for n, (question, accepted) in enumerate(QUESTIONS):
        assert all(is_right(n, f"I think it is {word.upper()}, yes.") for word in accepted)
        assert not is_right(n, question), "a model that repeats the question knows nothing"
        assert not is_right(n, "")


def test_an_answer_may_be_said_in_any_way_but_must_hold_the_word():
    france = number("What is the capital of France?")
    assert is_right(france, "The capital of France is Paris.") and is_right(france, "PARIS")
    assert not is_right(france, "I am Boxer, an AI assistant.") and not is_right(france, "Parish")


@pytest.mark.parametrize(
    "before, after, forgot",
    [
        (range(20), range(20), False),
        (range(20), range(16), False),  # four lost: one in sixteen by chance
        (range(20), range(15), True),
        (range(20), range(0), True),
        (range(20), [*range(15), 20, 21, 22], False),  # five lost, three won: some tip over either way
        (range(10), range(20), False),
        ([], [], False),
    ],
)
def test_forgotten_is_what_chance_does_not_explain(before, after, forgot):
    found = compare(list(before), list(after))
    assert found.forgot is forgot and found.lost == tuple(sorted(set(before) - set(after)))


def test_noise_that_tips_answers_either_way_raises_an_alarm_in_one_case_of_twenty_at_most():
    for changed in range(1, 13):
        ways = list(itertools.product((True, False), repeat=changed))
        alarms = 0
        for lost in ways:
            before = [n for n, is_lost in enumerate(lost) if is_lost]
            after = [n for n, is_lost in enumerate(lost) if not is_lost]
            alarms += compare(before, after).forgot
        assert alarms / len(ways) < 0.05
