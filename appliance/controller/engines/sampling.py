"""Asks an engine for answers in token ids, each with its log-probability when it was sampled: vLLM's route that
`--enable-scale-out` opens. Pure.

At temperature 1 and from the whole vocabulary: what vLLM records by default (`logprobs_mode` raw_logprobs) is then the
log-probability in the very distribution that the token was drawn from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

URL = "/inference/v1/generate"
INTERRUPT_URL = "/inference/v1/abort_requests"
"""Ends requests, each of which answers with what it has (`interrupt`, `Sampled.ended`)."""
MOST_ANSWERS = 8
"""As many as one request has at most; no engine of the box has fewer places unless it was told so."""
MOST_TOKENS = 8192
"""The tokens of the answers of one request together, where it has several. An engine makes and writes the
log-probabilities of a plain answer in one go, and the controller reads them so: eight answers of 4,096 tokens held its
loop for 0.2 s."""
LONGEST = 1 << 16
"""Tokens of one answer: as many log-probabilities as a client may ask for altogether."""

_NONE = -9999.0
"""What vLLM writes where it knows no log-probability of the token."""


class Sampled(NamedTuple):
    """One answer. ids end with the token that ended it, unless it was cut, or was interrupted before it had `ended`:
    then there may be none. log_probs: one for each."""

    ids: list[int]
    log_probs: list[float]
    ended: bool = True


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
        "token_ids": list(prompt),
        "sampling_params": {
            "n": n,
            "seed": seed,
            "max_tokens": max_tokens,
            "stop_token_ids": list(ends),
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
        },
    }


def interrupt(request_ids: Iterable[str]) -> dict[str, Any]:
    """The body for INTERRUPT_URL. request_ids: as their requests had them in the header x-request-id."""
    return {"request_ids": [f"generate-tokens-{one}" for one in request_ids]}


def read(body: Any, n: int) -> list[Sampled]:
    """The n answers of a response. Raises ValueError if they are not there as asked for."""
    try:
        found = [
            Sampled(
                list(choice["token_ids"] or ()),
                [float(one["logprob"]) for one in choice["logprobs"]["content"]],
                choice.get("finish_reason") != "abort",
            )
            for choice in sorted(body["choices"], key=lambda choice: choice["index"])
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"an engine's samples lack {error}") from error
    if len(found) != n or any((one.ended and not one.ids) or len(one.ids) != len(one.log_probs) for one in found):
        raise ValueError(f"{len(found)} of {n} samples, of {[(len(a), len(b)) for a, b in found]} tokens and numbers")
    if any(value <= _NONE for one in found for value in one.log_probs):
        raise ValueError("an engine's samples lack the log-probability of a token")
    return found
