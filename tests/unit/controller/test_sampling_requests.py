"""Answers in token ids: what is asked of an engine, and how its answer is read."""

from __future__ import annotations

import pytest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from appliance.controller.grading.judging import samples_of, sampling_request, scores_of


def choice(index, ids, log_probs, text="x"):
    return {"index": index, "token_ids": ids, "logprobs": {"token_logprobs": log_probs}, "text": text}


def test_answers_are_read_in_their_order():
    body = {"choices": [choice(1, [5], [-0.5], "b"), choice(0, [3, 2], [-1.0, -2.0], "a")]}
    assert samples_of(body, 2) == [([3, 2], [-1.0, -2.0], "a"), ([5], [-0.5], "b")]
    with pytest.raises(ValueError):
        samples_of({"choices": [choice(0, [3], [-1.0]), choice(1, [3], [-9999.0])]}, 2)


@pytest.mark.parametrize("odd", [{"logprobs": None}, {"logprobs": {}}, {"token_ids": None}, {"index": None}])
def test_samples_of_incomplete_answers_raise_in_words(odd):
    with pytest.raises(ValueError):
        samples_of({"choices": [choice(0, [3], [-1.0]), choice(1, [3], [-1.0]) | odd]}, 2)


@pytest.mark.parametrize("places", [None, [], [None], [{}], [{"3": None}], [{"3": {"logprob": None}}]])
def test_scores_of_incomplete_answers_raise_in_words(places):
    with pytest.raises(ValueError):
        scores_of({"choices": [{"prompt_logprobs": places}]}, [1, 3], 1)


def test_vllm_draws_from_the_policys_own_distribution():
    asked = CompletionRequest.model_validate(
        sampling_request("m@1", [1, 2], n=2, seed=9, max_tokens=5, ends=[2]), strict=False
    )
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    params = asked.to_sampling_params(5, defaults)
    assert (params.n, params.seed, params.max_tokens, params.logprobs) == (2, 9, 5, 0)
    assert (params.temperature, params.top_p, params.min_p, params.repetition_penalty) == (1.0, 1.0, 0.0, 1.0)
    assert params.top_k in (0, -1) and params.all_stop_token_ids == {2} and asked.return_token_ids
