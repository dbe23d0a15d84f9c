"""The form of a job's answers (OpenAI's `response_format`): which tokens may follow, both for whoever samples an answer
and for whoever learns from it.

Under a form a token is drawn from the model's distribution without the tokens that the form forbids there, and the
log-probability in that distribution is what is recorded. Learning must be restricted to the same tokens: if the form
leaves only a brace, the brace has probability 1, whatever the model thinks of braces, and nothing is learnt from it.
Otherwise the ratio to the recorded probability would measure how far the form is from the model, not how far a step has
moved.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xgrammar

from train.plan.errors import InvalidSpec

_WHITESPACE = 32
"""The longest run of whitespace in JSON: as deep as people indent."""


class Form:
    """form: a `response_format` of the type json_schema or json_object. vocabulary: tokens that the model's head
    tells apart. ends: tokens that end an answer. Raises InvalidSpec for one that is not followed."""

    def __init__(self, form: dict[str, Any], tokenizer: Any, vocabulary: int, ends: Sequence[int]):
        self._vocabulary, self._ends = vocabulary, list(ends)
        schema = form["json_schema"]["schema"] if form["type"] == "json_schema" else {"type": "object"}
        told = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
        try:
            compiler = xgrammar.GrammarCompiler(told, max_threads=1, cache_enabled=False)
            self._grammar = compiler.compile_json_schema(json.dumps(schema), max_whitespace_cnt=_WHITESPACE)
        except RuntimeError as error:
            raise InvalidSpec(f"response_format: xgrammar does not follow its schema: {error}") from None

    def begin(self) -> Answer:
        """An answer without a token."""
        return Answer(xgrammar.GrammarMatcher(self._grammar, override_stop_tokens=self._ends), self._vocabulary)

    def allowed(self, ids: Iterable[int]) -> np.ndarray:
        """`Answer.allowed` before each of an answer's tokens, (tokens, words)."""
        answer, found = self.begin(), []
        for token in ids:
            found.append(answer.allowed())
            answer.take(int(token))
        return np.stack(found)


class Answer:
    """How far one answer is in its form."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, vocabulary: int):
        self._matcher, self._vocabulary = matcher, vocabulary

    def allowed(self) -> np.ndarray:
        """The tokens that may be next, a bit for each, the lowest first: (words,) int32. Raises InvalidSpec for a form
        that no answer can have."""
        mask = xgrammar.allocate_token_bitmask(1, self._vocabulary)
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(mask)
        found: np.ndarray = mask[0].numpy()
        if not found.any():
            raise InvalidSpec("response_format: no text fits its schema")
        return found

    def take(self, token: int) -> None:
        self._matcher.accept_token(token)
