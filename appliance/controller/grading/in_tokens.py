"""Completions in token ids, which need no chat template: answers that an engine samples, and how likely it finds the
last tokens of a text. Pure.

Samples are drawn at temperature 1 from the whole vocabulary: what vLLM records by default (`logprobs_mode`
raw_logprobs) is then the log-probability in the very distribution that the token was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

URL = "/v1/completions"
MOST_ANSWERS = 8
"""As many as one request has at most; no engine of the box has fewer places unless it was told so."""
MOST_TOKENS = 8192
"""The tokens of the answers of one request together, where it has several: the controller reads them in one go."""
LONGEST = 1 << 16
"""Tokens of a text at most, if a client asks for its log-probabilities."""
MADE = 1
"""Tokens beside a scored text that have to fit an engine's context: it makes no fewer."""
_NONE = -9999.0
"""What vLLM writes for minus infinity, and where it knows no log-probability of the token."""


class Sampled(NamedTuple):
    """One answer. ids end with the token that ended it, unless it was cut; log_probs: one for each; text: without that
    token and other special ones."""

    ids: list[int]
    log_probs: list[float]
    text: str


def answers_at_once(max_tokens: int) -> int:
    """How many answers of up to this many tokens one request has."""
    return max(1, min(MOST_ANSWERS, MOST_TOKENS // max_tokens))


def sampling_request(
    model: str,
    prompt: Sequence[int],
    *,
    n: int,
    seed: int,
    max_tokens: int,
    ends: Sequence[int],
    form: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The body. n: answers, up to `answers_at_once`. seed: answer i has the random numbers of seed + i. ends: tokens
    that end an answer. form: the `response_format` that answers are held to."""
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
        **({"response_format": form} if form else {}),
    }


def samples_of(body: Any, n: int) -> list[Sampled]:
    """The n answers of a response. Raises ValueError, in words, if one is missing or incomplete."""
    found = [
        Sampled(list(choice["token_ids"] or ()), list(choice["logprobs"]["token_logprobs"]), choice["text"])
        for choice in sorted(body["choices"], key=lambda choice: choice["index"])
    ]
    if len(found) != n or any(not one.ids or len(one.ids) != len(one.log_probs) for one in found):
        raise ValueError(f"{len(found)} of {n} samples, or one without tokens or log-probabilities")
    if any(value is None or value <= _NONE for one in found for value in one.log_probs):
        raise ValueError("an engine's samples lack the log-probability of a token")
    return found


def scoring_request(model: str, tokens: Sequence[int]) -> dict[str, Any]:
    """The body; `prompt_logprobs` 0: of the token itself alone."""
    return {"model": model, "prompt": list(tokens), "max_tokens": MADE, "temperature": 0.0, "prompt_logprobs": 0}


def scores_of(body: Any, tokens: Sequence[int], last: int) -> list[float]:
    """The log-probability of each of the last tokens, given those before it. Raises ValueError, in words."""
    places = (body["choices"][0].get("prompt_logprobs") or ())[-last:]
    if len(places) != last:
        raise ValueError(f"log-probabilities of {len(places)} of {last} tokens")
    found = []
    for token, place in zip(tokens[-last:], places, strict=True):
        value = (place.get(str(token)) or {}).get("logprob")
        if value is None or not value > _NONE:
            raise ValueError(f"{value} as the log-probability of token {token}")
        found.append(float(value))
    return found
