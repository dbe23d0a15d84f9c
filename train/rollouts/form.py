"""The form of a job's answers (OpenAI's `response_format`): which tokens could have followed each token of an answer.

Under a form an engine draws a token from the model's distribution without the tokens that the form forbids there, and
records the log-probability in that distribution. Learning must be restricted to the same tokens: if the form leaves
only a brace, the brace has probability 1, whatever the model thinks of braces, and nothing is learnt from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xgrammar

from train.plan.errors import InvalidSpec


class Form:
    """form: a `response_format` of the type json_schema or json_object. vocabulary: tokens that the model's head
    tells apart. ends: tokens that end an answer. Raises InvalidSpec for one that is not followed."""

    def __init__(self, form: dict[str, Any], tokenizer: Any, vocabulary: int, ends: Sequence[int]):
        self._vocabulary, self._ends = vocabulary, list(ends)
        schema = form["json_schema"]["schema"] if form["type"] == "json_schema" else {"type": "object"}
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
        try:
            compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            # As engines compile it (serve.vllm.arguments: disable_any_whitespace).
            self._grammar = compiler.compile_json_schema(
                json.dumps(schema), any_whitespace=False, separators=(",", ":")
            )
        except RuntimeError as error:
            raise InvalidSpec(f"response_format: xgrammar does not follow its schema: {error}") from None

    def allowed(self, ids: Iterable[int]) -> np.ndarray:
        """The tokens that could be in the place of each of an answer's: (tokens, words) int32, a bit for each, the
        lowest first. Raises InvalidSpec for a form that no answer can have."""
        matcher = xgrammar.GrammarMatcher(self._grammar, override_stop_tokens=self._ends)
        found = []
        for token in ids:
            mask = xgrammar.allocate_token_bitmask(1, self._vocabulary)
            if not matcher.is_terminated():
                matcher.fill_next_token_bitmask(mask)
            if not mask.any():
                raise InvalidSpec("response_format: no text fits its schema")
            found.append(mask[0].numpy())
            matcher.accept_token(int(token))
        return np.stack(found)
