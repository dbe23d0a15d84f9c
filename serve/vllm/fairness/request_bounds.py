"""Refuses or changes what vLLM's frontend accepts but a step cannot take: an error there ends the engine and every
request on it.

The runner for GPUs has a row of fixed length for the tokens that a request forbids, and raises if it is too short
(vllm/v1/worker/gpu/sample): 64 texts of 256 letters, which the gateway accepts, may be 16,000 tokens. Several answers
with a seed get successive seeds, and no 64-bit seed follows the largest one. Such requests are refused, or made to fit,
on every device alike.

A token that the tokenizer has and the model lacks, such as a picture's placeholder in a model of text only, passes
vLLM's check, which uses the larger of the two vocabularies. The embedding has no row for it on any device, and on a GPU
the error names some later kernel. If a request forbids it, a GPU's kernel writes beyond the row of the request's
logits, into the next request's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError

# Ids that end an answer: MAX_NUM_STOP_TOKEN_IDS of vllm/v1/worker/gpu/sample/logit_bias.py.
STOP_IDS = 128
# How many tokens are read beyond those that a text is cut to: the end of a text decides what its last tokens are.
SPARE_TOKENS = 1024


def bound_forbidden(parameters: Any) -> None:
    """parameters: vllm.sampling_params.SamplingParams. Its `update_from_tokenizer` is the last method in the frontend
    that adds to them."""
    update = parameters.update_from_tokenizer

    @functools.wraps(update)
    def update_from_tokenizer(self: Any, tokenizer: Any) -> None:
        update(self, tokenizer)
        most = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        if (tokens := sum(map(len, self.bad_words_token_ids or ()))) > most:
            raise VLLMValidationError(
                f"The texts of bad_words are {tokens} tokens long together, with and without a space before them; at "
                f"most {most} are allowed.",
                parameter="bad_words",
            )
        if self.min_tokens > 0 and len(self.all_stop_token_ids) > STOP_IDS:
            raise VLLMValidationError(
                f"With min_tokens at most {STOP_IDS} tokens may end an answer, those of the model among them; these "
                f"are {len(self.all_stop_token_ids)}.",
                parameter="stop_token_ids",
            )

    parameters.update_from_tokenizer = update_from_tokenizer


def bound_tokens(renderer: Any) -> None:
    """renderer: vllm.renderers.base.BaseRenderer. Models that read pictures put these in the places of such tokens."""
    validate = renderer.validate_token_ids

    @functools.wraps(validate)
    def validate_token_ids(self: Any, token_ids: Sequence[int], *, parameter: str | None = None) -> None:
        validate(self, token_ids, parameter=parameter)
        known = self.model_config.get_vocab_size()
        if token_ids and max(token_ids) >= known and not self.model_config.is_multimodal_model:
            raise VLLMValidationError(
                f"The prompt has the token {max(token_ids)}, which the model's tokenizer has and the model does not.",
                parameter=parameter,
            )

    renderer.validate_token_ids = validate_token_ids


def cut_texts(parameters: Any) -> None:
    """parameters: vllm.renderers.params.TokenizeParams. With `truncate_prompt_tokens` a text may have any length, and
    the tokenizer splits all of it into pieces of so many tokens: 8 MiB cut to one token took 3.7 GB, which ended an
    engine and its machine. So text far behind the cut is not read."""
    check = parameters._text_len_check

    @functools.wraps(check)
    def _text_len_check(self: Any, tokenizer: Any, text: str) -> str:
        text = check(self, tokenizer, text)
        tokens = self.truncate_prompt_tokens
        if tokens is None or tokenizer is None:
            return text
        if tokens < 0:
            tokens = self.max_truncation_tokens or 0
        most = (tokens + SPARE_TOKENS) * tokenizer.max_chars_per_token
        if len(text) <= most:
            return text
        return text[-most:] if (self.truncation_side or tokenizer.truncation_side) == "left" else text[:most]

    parameters._text_len_check = _text_len_check


def forbid_known(processor: Any) -> None:
    """processor: vllm.v1.engine.input_processor.InputProcessor. The model never writes a token that it lacks, so such a
    token need not be forbidden, and no answer ends with one."""
    process = processor.process_inputs

    @functools.wraps(process)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = process(self, *args, **kwargs)
        params = made.sampling_params
        if params is not None:
            known = self.model_config.get_vocab_size()
            if params.bad_words_token_ids:
                params._bad_words_token_ids = [ids for ids in params.bad_words_token_ids if max(ids) < known]
            if max(params.all_stop_token_ids, default=0) >= known:
                params._all_stop_token_ids = {token for token in params.all_stop_token_ids if token < known}
        return made

    processor.process_inputs = process_inputs


def keep_seeds(parent: Any) -> None:
    """parent: vllm.v1.engine.parallel_sampling.ParentRequest, which counts on from the seed for each further answer."""
    of_child = parent._get_child_sampling_params

    @functools.wraps(of_child)
    def _get_child_sampling_params(self: Any, index: int) -> Any:
        found = of_child(self, index)
        if found.seed is not None and found.seed >= 1 << 63:
            found.seed -= 1 << 64  # the same bits
        return found

    parent._get_child_sampling_params = _get_child_sampling_params
