"""Answers in token ids: what is asked of an engine, and how its answer is read."""

from __future__ import annotations

import pytest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateLogProbs,
    GenerateLogProbsContent,
    GenerateRequest,
    GenerateTokensChoice,
    GenerateTokensResponse,
)

from appliance.controller.engines import sampling


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
    assert sampling.read(body, 2) == [([3, 2], [-1.0, -2.0], True), ([5], [-0.5], True)]


def test_what_was_interrupted_is_read_as_far_as_it_is_there():
    cut = {"finish_reason": "abort"}
    choices = [choice(0, [3], [-1.0]) | cut, {"index": 1, "token_ids": None, "logprobs": {"content": []}} | cut]
    assert sampling.read({"choices": choices}, 2) == [([3], [-1.0], False), ([], [], False)]


@pytest.mark.parametrize(
    "choices",
    [
        [choice(0, [3], [-1.0])],
        [choice(0, [3], [-1.0]), choice(1, [], [])],
        [choice(0, [3], [-1.0]), choice(1, [3, 4], [-1.0])],
        [choice(0, [3], [-1.0]), {"index": 1, "token_ids": [3], "logprobs": None}],
        [choice(0, [3], [-1.0]), choice(1, [3], [-9999.0])],
        None,
    ],
)
def test_what_is_not_as_asked_for_is_no_sample(choices):
    with pytest.raises(ValueError):
        sampling.read({"choices": choices}, 2)


def test_vllm_takes_the_request_and_answers_in_this_shape():
    asked = GenerateRequest.model_validate(sampling.request("m@1", [1, 2], n=2, seed=9, max_tokens=5, ends=[2]))
    params = asked.sampling_params
    assert (params.n, params.seed, params.max_tokens, params.logprobs, params.detokenize) == (2, 9, 5, 0, False)
    assert params.all_stop_token_ids == {2} and params.top_p == 1 and params.top_k in (0, -1)
    content = [GenerateLogProbsContent(token_id=4, logprob=-0.25)]
    choices = [
        GenerateTokensChoice(index=index, token_ids=[4], logprobs=GenerateLogProbs(content=content)) for index in (1, 0)
    ]
    answer = GenerateTokensResponse(choices=choices).model_dump()
    assert sampling.read(answer, 2) == [([4], [-0.25], True)] * 2
