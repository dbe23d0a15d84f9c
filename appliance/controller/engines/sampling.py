"""Asks an engine for answers in token ids, each with its log-probability when it was sampled: OpenAI's completions with
vLLM's `return_token_ids`. Pure.

At temperature 1 and from the whole vocabulary: what vLLM records by default (`logprobs_mode` raw_logprobs) is then the
log-probability in the very distribution that the token was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

URL = "/v1/completions"
MOST_ANSWERS = 8
"""As many as one request has at most; no engine of the box has fewer places unless it was told so."""
MOST_TOKENS = 8192
"""The tokens of the answers of one request together, where it has several: the controller reads them on its loop."""

_NONE = -9999.0
"""What vLLM writes where it knows no log-probability of the token."""


class Sampled(NamedTuple):
    """One answer. ids end with the token that ended it, unless it was cut; log_probs: one for each; text: without that
    token and other special ones."""

    ids: list[int]
    log_probs: list[float]
    text: str


def answers_at_once(max_tokens: int) -> int:
    """How many answers of up to this many tokens one request has."""
    return max(1, min(MOST_ANSWERS, MOST_TOKENS // max_tokens))


def request(
    model: str, prompt: Sequence[int], *, n: int, seed: int, max_tokens: int, ends: Sequence[int]
) -> dict[str, Any]:
    """The body. n: answers, up to `answers_at_once`. seed: answer i has the random numbers of seed + i. ends: tokens
    that end an answer."""
    return {
        "model": model,
        "prompt": list(prompt),
        "n": n,
        "seed": seed,
        "max_tokens": max_tokens,
        "stop_token_ids": list(ends),
        # All of them: an engine takes what is left out from the model's generation_config.json.
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,  # of the sampled token alone
        "return_token_ids": True,
    }


def read(body: Any, n: int) -> list[Sampled]:
    """The n answers of a response. Raises ValueError if they are not there as asked for."""
    try:
        found = [
            Sampled(list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"]), choice["text"])
            for choice in sorted(body["choices"], key=lambda choice: choice["index"])
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"an engine's samples lack {error}") from error
    if len(found) != n or any(not one.ids or len(one.ids) != len(one.log_probs) for one in found):
        sizes = [(len(one.ids), len(one.log_probs)) for one in found]
        raise ValueError(f"{len(found)} of {n} samples, of {sizes} tokens and numbers")
    if any(value is None or value <= _NONE for one in found for value in one.log_probs):
        raise ValueError("an engine's samples lack the log-probability of a token")
    return found
