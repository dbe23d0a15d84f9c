"""Bounds what one request may do to an engine's steps, where an error ends the engine and every request on it.

Ids beyond the model's vocabulary: a tokenizer may know tokens that the model has no row for, such as placeholders of
images, and vLLM checks ids against the larger of the two vocabularies. `bad_words`: the runner for GPUs has rows of a
fixed length and raises if one is too short. Grammars: a form that takes an engine too long to follow ends its own
request.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError

ACCEPT_S, MASK_S, MOST_BEYOND_S = 0.02, 0.3, 0.5
"""Seconds of thread time for a grammar to accept tokens and to fill a mask, and how much all of a request's may take
beyond that. Most forms take 0.01 to 4 ms; a mask of a text of `maxLength` 500 takes 0.2 s on busy cores."""


def bound_time(grammar: Any) -> None:
    """grammar: a class of vLLM's StructuredOutputGrammar. vLLM ends a request whose grammar accepts no token."""

    def bounded(call: Callable[..., Any], allowed_s: float) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(self: Any, *args: Any) -> Any:
            began_s = time.thread_time()
            result = call(self, *args)
            beyond_s = max(0.0, time.thread_time() - began_s - allowed_s)
            self.shm_beyond_s = getattr(self, "shm_beyond_s", 0.0) + beyond_s
            return result and self.shm_beyond_s <= MOST_BEYOND_S

        return run

    grammar.accept_tokens = bounded(grammar.accept_tokens, ACCEPT_S)
    grammar.fill_bitmask = bounded(grammar.fill_bitmask, MASK_S)


def bound_tokens(renderer: Any) -> None:
    """renderer: vllm.renderers.base.BaseRenderer."""
    validate = renderer.validate_token_ids

    def validate_token_ids(self: Any, token_ids: Sequence[int], *, parameter: str | None = None) -> None:
        validate(self, token_ids, parameter=parameter)
        known = self.model_config.get_vocab_size()
        # Models that read images put these in the places of such tokens.
        if token_ids and max(token_ids) >= known and not self.model_config.is_multimodal_model:
            message = f"The prompt has the token {max(token_ids)}, which the tokenizer has and the model does not."
            raise VLLMValidationError(message, parameter=parameter)

    renderer.validate_token_ids = validate_token_ids


def bound_forbidden(processor: Any) -> None:
    """processor: vllm.v1.engine.input_processor.InputProcessor. A token that the model lacks need not be forbidden: a
    kernel would do it in the next request's row."""
    process = processor.process_inputs

    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = process(self, *args, **kwargs)
        if (params := made.sampling_params) is not None:
            known, words = self.model_config.get_vocab_size(), params.bad_words_token_ids or []
            if sum(map(len, words)) > envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS:
                message = f"The bad_words have more than {envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS} tokens together."
                raise VLLMValidationError(message, parameter="bad_words")
            if words:
                params._bad_words_token_ids = [ids for ids in words if max(ids) < known]
            params._all_stop_token_ids = {token for token in params.all_stop_token_ids if token < known}
        return made

    processor.process_inputs = process_inputs
