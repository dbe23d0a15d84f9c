"""Asks an engine how likely a model finds the last tokens of a text in token ids: OpenAI's completions with vLLM's
`prompt_logprobs`, which needs no chat template. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

URL = "/v1/completions"
LONGEST = 1 << 16
"""Tokens of a text at most, if a client asks for its log-probabilities."""
MADE = 1
"""Tokens beside the text that have to fit an engine's context: it makes no fewer."""

_NONE = -9999.0
"""What vLLM writes for minus infinity."""


def request(model: str, tokens: Sequence[int]) -> dict[str, Any]:
    """The body."""
    return {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": MADE,
        "temperature": 0.0,
        "prompt_logprobs": 0,  # of the token itself alone
    }


def read(body: Any, tokens: Sequence[int], last: int) -> list[float]:
    """The log-probability of each of the last tokens, given those before it. Raises ValueError, in words."""
    try:
        (choice,) = body["choices"]
        places = choice["prompt_logprobs"]
        if len(places) != len(tokens):
            raise ValueError(f"log-probabilities of {len(places)} of {len(tokens)} tokens")
        found = [place[str(token)]["logprob"] for place, token in zip(places[-last:], tokens[-last:], strict=True)]
    except (KeyError, TypeError) as error:
        raise ValueError(f"an answer without {error}") from error
    for token, value in zip(tokens[-last:], found, strict=True):
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= _NONE:
            raise ValueError(f"{value} as the log-probability of token {token}")
    return [float(value) for value in found]
