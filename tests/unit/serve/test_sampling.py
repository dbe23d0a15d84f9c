"""Answers in token ids: what is asked of an engine, and how its answer is read."""

from __future__ import annotations

import pytest

from serve.core import sampling


def choice(index, ids, log_probs):
    content = [{"token_id": one, "logprob": value} for one, value in zip(ids, log_probs, strict=False)]
    return {"index": index, "token_ids": ids, "logprobs": {"content": content}}


def test_the_distribution_is_the_policys_own():
    asked = sampling.request("m@1", [1, 2], n=3, seed=9, max_tokens=5, ends=[2])
    assert (asked["model"], asked["token_ids"]) == ("m@1", [1, 2])
    told = asked["sampling_params"]
    assert (told["temperature"], told["top_p"], told["top_k"], told["min_p"], told["logprobs"]) == (1.0, 1.0, 0, 0.0, 0)
    assert (told["n"], told["seed"], told["max_tokens"], told["stop_token_ids"]) == (3, 9, 5, [2])


def test_answers_are_read_in_their_order():
    body = {"choices": [choice(1, [5], [-0.5]), choice(0, [3, 2], [-1.0, -2.0])]}
    assert sampling.read(body, 2) == [([3, 2], [-1.0, -2.0]), ([5], [-0.5])]


@pytest.mark.parametrize(
    "choices",
    [
        [choice(0, [3], [-1.0])],
        [choice(0, [3], [-1.0]), choice(1, [], [])],
        [choice(0, [3], [-1.0]), choice(1, [3, 4], [-1.0])],
        [choice(0, [3], [-1.0]), {"index": 1, "token_ids": [3], "logprobs": None}],
        None,
    ],
)
def test_what_is_not_as_asked_for_is_no_sample(choices):
    with pytest.raises(ValueError):
        sampling.read({"choices": choices}, 2)
