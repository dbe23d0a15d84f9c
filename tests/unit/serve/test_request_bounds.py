"""What would end an engine within a step is refused, or made to fit, before it gets there."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import HfRenderer
from vllm.renderers.params import TokenizeParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.worker.gpu.sample import bad_words, logit_bias

from serve.vllm.fairness import request_bounds


class Letters:
    """A tokenizer with a token for each character."""

    max_token_id = 255

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]


def bounded_parameters(**given: Any) -> SamplingParams:
    """As the frontend makes them of a request: with the model's settings, then with its tokenizer."""
    parameters = type("Bounded", (SamplingParams,), {})
    request_bounds.bound_forbidden(parameters)
    made = parameters(**given)
    made.update_from_generation_config({"eos_token_id": list(range(100, 180))}, 2)
    made.update_from_tokenizer(Letters())
    return made


def test_more_than_a_gpus_runner_has_room_for_is_refused_before_it_ends_the_engine() -> None:
    states: Any = object.__new__(bad_words.BadWordsState)  # its rows are on a GPU
    states.num_bad_words = SimpleNamespace(np=[0])
    states.bad_word_token_ids = states.bad_word_offsets = SimpleNamespace(stage_write=lambda *_: None)
    room = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    assert logit_bias.MAX_NUM_STOP_TOKEN_IDS == request_bounds.STOP_IDS
    fits: Any = bounded_parameters(bad_words=["x" * 256, "y" * (room - 256)])
    assert states.add_request(0, fits)
    with pytest.raises(VLLMValidationError, match=f"1025 tokens long together.*at most {room}") as refused:
        bounded_parameters(bad_words=["x" * 256, "y" * (room - 255)])
    assert refused.value.parameter == "bad_words"
    fits._bad_words_token_ids.append([1])
    with pytest.raises(ValueError, match="Too many total bad word tokens"):
        states.add_request(0, fits)


def test_ids_that_end_an_answer_are_bounded_where_a_gpus_runner_forbids_them() -> None:
    ends = list(range(64))
    assert len(bounded_parameters(stop_token_ids=ends).all_stop_token_ids) > request_bounds.STOP_IDS
    with pytest.raises(VLLMValidationError, match=r"at most 128 tokens.*these are 14\d"):
        bounded_parameters(stop_token_ids=ends, min_tokens=1)


def test_a_token_that_the_embedding_has_no_row_for_is_refused() -> None:
    """vLLM's own check goes by what the tokenizer knows, if that is more."""
    bounded = type("Bounded", (HfRenderer,), {})
    request_bounds.bound_tokens(bounded)
    renderer: Any = object.__new__(bounded)
    renderer.tokenizer = SimpleNamespace(max_token_id=262_144)
    for pictures in (False, True):
        renderer.model_config = SimpleNamespace(get_vocab_size=lambda: 262_144, is_multimodal_model=pictures)
        renderer.validate_token_ids([5, 262_143])
        HfRenderer.validate_token_ids(renderer, [5, 262_144])
        with nullcontext() if pictures else pytest.raises(VLLMValidationError, match="262144"):
            renderer.validate_token_ids([5, 262_144])


def test_what_the_model_has_no_token_for_is_not_forbidden_in_another_requests_row() -> None:
    """vLLM's kernel for GPUs stores at the token's place in the row of logits and does not ask how long it is."""

    class Processor:
        model_config = SimpleNamespace(get_vocab_size=lambda: 128)

        def process_inputs(self, parameters: SamplingParams) -> Any:
            parameters.update_from_generation_config({"eos_token_id": [2, 200]}, 2)
            parameters.update_from_tokenizer(Letters())
            return SimpleNamespace(sampling_params=parameters)

    assert max(Processor().process_inputs(SamplingParams(bad_words=["\xff"])).sampling_params.bad_words_token_ids) > [
        128
    ]
    request_bounds.forbid_known(Processor)
    made = Processor().process_inputs(SamplingParams(bad_words=["ab", "a\xff", "\xff"], min_tokens=1)).sampling_params
    assert made.bad_words_token_ids == [[97, 98]] and made.all_stop_token_ids == {2}
    nothing = Processor().process_inputs(SamplingParams()).sampling_params
    assert nothing.bad_words_token_ids is None and nothing.all_stop_token_ids == {2}


def test_seeds_of_several_answers_differ_and_fit_where_a_gpus_runner_keeps_them() -> None:
    bounded = type("Bounded", (ParentRequest,), {})
    request_bounds.keep_seeds(bounded)
    kept = np.zeros(4, dtype=np.int64)  # as SamplingStates of vllm/v1/worker/gpu/sample/states.py
    for seed, expected in ((7, [7, 8, 9, 10]), (2**63 - 2, [2**63 - 2, 2**63 - 1, -(2**63), 1 - 2**63])):
        parameters = SamplingParams(n=4, seed=seed, temperature=1.0)
        request = bounded(SimpleNamespace(request_id="r", external_req_id="r", params=parameters))
        for index in range(4):
            kept[index] = request.get_child_info(index)[1].seed
        assert kept.tolist() == expected
    request = bounded(SimpleNamespace(request_id="r", external_req_id="r", params=SamplingParams(n=4)))
    assert request.get_child_info(3)[1].seed is None


@pytest.mark.parametrize("cut_to", [1, 700, -1])
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("usual", ["left", "right"])
def test_of_a_text_that_is_cut_little_more_is_read_than_what_is_left(cut_to: int, side: Any, usual: str) -> None:
    """A tokenizer makes a piece of it for each so many tokens: 8 MiB cut to one token took 3.7 GB."""
    parameters: Any = type("Bounded", (TokenizeParams,), {})
    request_bounds.cut_texts(parameters)
    tokenizer: Any = SimpleNamespace(max_chars_per_token=16, truncation_side=usual)
    text = "".join(map(str, range(200_000)))
    asked = parameters(max_total_tokens=4096, truncate_prompt_tokens=cut_to, truncation_side=side)
    left = asked._text_len_check(tokenizer, text)
    tokens = cut_to if cut_to > 0 else 4096
    assert tokens * 16 <= len(left) <= (tokens + request_bounds.SPARE_TOKENS) * 16
    assert text.endswith(left) if (side or usual) == "left" else text.startswith(left)
    assert asked._text_len_check(tokenizer, "short") == "short"
    whole = parameters(max_total_tokens=4096)
    with pytest.raises(VLLMValidationError, match="maximum context length"):
        whole._text_len_check(tokenizer, text)
