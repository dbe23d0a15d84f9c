"""Continues a greedy stream after its engine's death: tracks what the client received and builds the next request.

Greedy decoding is a function of the tokens so far, so an engine that gets prompt and emitted tokens continues with the
tokens that the dead one would have generated. The gateway requests token ids from the engine and removes them before
the bytes go to the client, whose stream stays the same. Pure: events in, events out.

Sampled streams cannot be continued (the sampler's state died with the engine), nor can those whose next token
depends on more than the tokens: grammars, tools, stop strings half matched, counts of emitted tokens. Nor can a chat
before the first text of its answer: the rest is asked for as a completion, whose text would bring a thought, and the
mark of its end, as the answer.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

CHAT, COMPLETIONS = "chat.completions", "completions"
RESUME_PATH = b"/v1/completions"

# Fields that a continuable request may have. The continuation repeats the first set; the second changes no token.
_SAMPLING = frozenset({"model", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "stop_token_ids"})
_NEUTRAL = frozenset(
    (
        "messages prompt stream stream_options max_tokens max_completion_tokens n user metadata store service_tier "
        "safety_identifier prompt_cache_key chat_template_kwargs cache_salt"
    ).split()
)
# Inside a JSON string a quote is always escaped, so this matches the engine's own fields and never a client's text.
# They never come first in their object, so removing the comma before such a field removes it completely.
_TOKEN_IDS = re.compile(rb',"(?:prompt_token_ids|token_ids)":\[[0-9, ]*\]')


def continuation_of(route: str, data: dict[str, Any]) -> Continuation | None:
    """The continuation of a checked request body, None for one that cannot be continued."""
    given = {name: value for name, value in data.items() if value is not None}
    if given.get("temperature") != 0 or not given.get("stream") or route not in (CHAT, COMPLETIONS):
        return None
    prompt = given.get("prompt")
    several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    if given.keys() - _SAMPLING - _NEUTRAL or given.get("n", 1) != 1 or several:
        return None
    if given.get("stream_options", {}).get("continuous_usage_stats"):
        return None
    default = 16 if route == COMPLETIONS else None  # the API's own
    limit = given.get("max_completion_tokens", given.get("max_tokens", default))
    return Continuation(route, {name: given[name] for name in _SAMPLING & given.keys()}, limit)


class Continuation:
    """One greedy stream. `event` gets every event of its body; after the engine's death `resume_body`, then `event`
    again."""

    def __init__(self, route: str, sampling: dict[str, Any], max_tokens: int | None) -> None:
        self._route = route
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._prompt: list[int] = []
        self._tokens: list[int] = []
        self._unseen = 0  # the last of these, whose text the client has not got: the first bytes of a character
        self._envelope: dict[str, Any] = {}
        self._resumed = self._finished = False
        self._answers = route != CHAT  # the text that the client saw last is of the answer, not of a thought

    def resume_body(self, max_model_len: int | None) -> bytes | None:
        """The request for the rest, for RESUME_PATH; None where it cannot be asked for, or only an ending is missing.

        max_model_len: the model's context in tokens, which bounds a chat without a token limit.
        """
        # An engine that starts in the middle of a character could not send its first bytes.
        del self._tokens[len(self._tokens) - self._unseen :]
        self._unseen = 0
        room = (max_model_len or 0) - len(self._prompt) if self._max_tokens is None else self._max_tokens
        if self._finished or not self._answers or not self._prompt or len(self._tokens) >= room:
            return None
        self._resumed = True
        return orjson.dumps(
            {
                **self._sampling,
                "prompt": self._prompt + self._tokens,
                "max_tokens": room - len(self._tokens),
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        )

    def event(self, event: bytes) -> bytes:
        """An event as the client gets it, empty for none; of the continuing request with the form and id of the
        original stream."""
        if not event.startswith(b"data: {"):
            return event
        data = orjson.loads(event[6:])
        choice = next(iter(data.get("choices") or ()), None)
        if choice is not None:
            self._note(choice)
        if not self._resumed:
            self._prompt = self._prompt or data.get("prompt_token_ids") or (choice or {}).get("prompt_token_ids") or []
            self._envelope = self._envelope or {name: data.get(name) for name in ("id", "object", "created", "model")}
        if not self._resumed or "error" in data:
            return _TOKEN_IDS.sub(b"", event)
        if choice is not None:
            text = {"delta": {"content": choice["text"]}} if self._route == CHAT else {"text": choice["text"]}
            shown = {"index": 0, **text, "logprobs": None, "finish_reason": choice.get("finish_reason")}
            return b"data: %b" % orjson.dumps({**self._envelope, "choices": [shown]})
        if not data.get("usage"):
            return b""
        prompt, emitted = len(self._prompt), len(self._tokens)
        # In an engine's order of fields. Nobody knows what the dead one had in its cache.
        counts = {"prompt_tokens": prompt, "total_tokens": prompt + emitted, "completion_tokens": emitted}
        usage = {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
        return b"data: %b" % orjson.dumps({**self._envelope, "choices": [], "usage": usage})

    def _note(self, choice: dict[str, Any]) -> None:
        ids, delta = choice.get("token_ids") or [], choice.get("delta") or {}
        thought = delta.get("reasoning") or delta.get("reasoning_content")
        text = choice.get("text") or delta.get("content")
        if thought or text:
            self._answers = not thought
        self._tokens += ids
        self._finished = self._finished or bool(choice.get("finish_reason"))
        self._unseen = 0 if thought or text or self._finished else self._unseen + len(ids)
