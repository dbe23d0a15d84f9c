"""Continues a greedy stream after its engine's death: tracks what the client received and builds the next request.

Greedy decoding is a function of the tokens so far, so an engine that gets prompt and emitted tokens continues with the
tokens that the dead one would have generated. The gateway requests token ids from the engine and removes them before
the bytes go to the client, whose stream stays the same. Pure: bytes in, bytes out.

Sampled streams cannot be continued (the sampler's state died with the engine), nor can those whose next token
depends on more than the tokens: grammars, tools, stop strings half matched, counts of emitted tokens. Nor can a chat
before the first text of its answer: the rest is asked for as a completion, whose text would bring a thought, and the
mark of its end, as the answer.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import orjson

CHAT, COMPLETIONS = "chat.completions", "completions"
RESUME_PATH = b"/v1/completions"
# Added to a checked body in place of its last brace.
ASK_FOR_TOKEN_IDS = b',"return_token_ids":true'

# Fields that a continuable request may have. The continuation repeats the first set; the second changes no token.
_SAMPLING = frozenset({"model", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "stop_token_ids"})
_NEUTRAL = frozenset(
    (
        "messages prompt stream stream_options max_tokens max_completion_tokens n user metadata store service_tier "
        "safety_identifier prompt_cache_key chat_template_kwargs cache_salt"
    ).split()
)
_CONTINUABLE = _SAMPLING | _NEUTRAL
_ONE_SEQUENCE = (None, 1)

# Inside a JSON string a quote is always escaped, so this matches the engine's own fields and never a client's text.
# They never come first in their object, so removing the comma before such a field removes it completely.
_TOKEN_IDS = re.compile(rb',"(prompt_token_ids|token_ids)":\[([0-9, ]*)\]')
_FINISHED = b'"finish_reason":"'
_SHOWN = re.compile(rb'"(content|reasoning|reasoning_content)":"(?!")')
# Tokens with withheld text (the first bytes of a character) are at most four, the bytes of one character.
_HELD_BACK_BUFFERS = 8


def continuation_of(route: str, data: dict[str, Any]) -> Continuation | None:
    """The continuation of a request body, None for one that cannot be continued."""
    if data.get("temperature") != 0 or not data.get("stream") or route not in (CHAT, COMPLETIONS):
        return None
    for key, value in data.items():
        if value is not None and key not in _CONTINUABLE:
            return None
    options = data.get("stream_options")
    if options is None:
        options = {}
    if not isinstance(options, dict) or options.get("continuous_usage_stats") or data.get("n") not in _ONE_SEQUENCE:
        return None
    prompt = data.get("prompt")
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        return None
    limit = data.get("max_completion_tokens")
    if limit is None:
        limit = data.get("max_tokens")
    if limit is None and route == COMPLETIONS:
        limit = 16  # the API's own default
    return Continuation(
        route,
        {key: data[key] for key in _SAMPLING if data.get(key) is not None},
        limit,
    )


class Continuation:
    """One greedy stream. `take` every piece of its body; after the engine's death `resume_body`, then `take` again."""

    __slots__ = (
        "_route",
        "_sampling",
        "_max_tokens",
        "_prompt",
        "_tokens",
        "_recent",
        "_partial",
        "_first",
        "_resumed",
        "_finished",
        "_answers",
    )

    def __init__(self, route: str, sampling: dict[str, Any], max_tokens: int | None) -> None:
        self._route = route
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._prompt = b""
        self._tokens: list[bytes] = []  # comma-separated ids, as the engine wrote them
        self._recent: deque[bytes] = deque(maxlen=_HELD_BACK_BUFFERS)
        self._partial = b""
        self._first = b""
        self._resumed = False
        self._finished = False
        self._answers = route != CHAT  # the text that the client saw last is of the answer, not of a thought

    # -- the request

    def can_resume(self, max_model_len: int | None) -> bool:
        return self._answers and bool(self._prompt) and (self._max_tokens is not None or max_model_len is not None)

    def resume_body(self, max_model_len: int | None) -> bytes | None:
        """The request for the rest, for RESUME_PATH; None if all tokens were sent and only the ending is missing.

        max_model_len: the model's context in tokens, which bounds a chat without a token limit.
        """
        self._partial = b""
        self._drop_held_back()
        prompt, emitted = _ids(self._prompt), self._emitted()
        room = self._max_tokens
        if room is None:
            assert max_model_len is not None
            room = max_model_len - len(prompt)
        if self._finished or len(emitted) >= room:
            return None
        self._resumed = True
        return orjson.dumps(
            {
                **self._sampling,
                "prompt": prompt + emitted,
                "max_tokens": room - len(emitted),
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        )

    def ending(self) -> bytes:
        """The missing end of a stream whose tokens were all sent: usage and ending."""
        return self._usage_event() + b"data: [DONE]\n\n"

    # -- the answer

    def take(self, data: bytes) -> bytes:
        """Return whole events for the client from the engine's bytes; keep back a partial one."""
        if self._partial:
            data = self._partial + data
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._partial = data
            return b""
        self._partial = data[end:]
        if self._partial:
            data = data[:end]
        if self._resumed:
            return b"".join(self._converted(event) for event in data.split(b"\n\n") if event)
        if not self._first:
            self._first = data
        if data.find(_FINISHED) >= 0:
            self._finished = True
        if self._route == CHAT:
            for shown in _SHOWN.finditer(data):
                self._answers = shown[1] == b"content"
        self._recent.append(data)
        return _TOKEN_IDS.sub(self._note, data)

    def _note(self, found: re.Match[bytes]) -> bytes:
        name, ids = found.groups()
        if name == b"token_ids":
            if ids:
                self._tokens.append(ids)
        else:
            self._prompt = ids
        return b""

    def _converted(self, event: bytes) -> bytes:
        """Convert an event of the continuing request to the format and id of the original stream."""
        if not event.startswith(b"data: {"):
            return event + b"\n\n"
        data = orjson.loads(event[6:])
        if not data.get("choices"):
            return self._usage_event() if data.get("usage") else b""
        choice = data["choices"][0]
        ids = choice.get("token_ids")
        if ids:
            self._tokens.append(b",".join(b"%d" % token for token in ids))
        if choice.get("finish_reason"):
            self._finished = True
        text: dict[str, Any] = {"text": choice["text"]}
        if self._route == CHAT:
            text = {"delta": {"content": choice["text"]}}
        shown = {"index": 0, **text, "logprobs": None, "finish_reason": choice.get("finish_reason")}
        self._recent.append(event + b"\n\n")
        return b"data: %b\n\n" % orjson.dumps({**self._envelope(), "choices": [shown]})

    def _usage_event(self) -> bytes:
        prompt, emitted = len(_ids(self._prompt)), len(self._emitted())
        # What the engine that died had in its cache is not known: nothing is claimed.
        usage = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + emitted,
            "completion_tokens": emitted,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        # In an engine's field order; usage.py removes the event if the client did not request it.
        return b"data: %b\n\n" % orjson.dumps({**self._envelope(), "choices": [], "usage": usage})

    def _envelope(self) -> dict[str, Any]:
        first = orjson.loads(self._first.split(b"\n\n", 1)[0][6:])
        return {name: first.get(name) for name in ("id", "object", "created", "model")}

    def _emitted(self) -> list[int]:
        return [token for ids in self._tokens for token in _ids(ids)]

    def _drop_held_back(self) -> None:
        """Drop trailing tokens whose text the client has not seen: the next engine generates them again.

        An engine sends the text of a character only with its last token; an engine that starts in the middle of a
        character could not send its first bytes.
        """
        for data in reversed(self._recent):
            for event in reversed([event for event in data.split(b"\n\n") if event.startswith(b"data: {")]):
                choices = orjson.loads(event[6:]).get("choices")
                if not choices or not choices[0].get("token_ids"):
                    continue
                shown = choices[0].get("text") or (choices[0].get("delta") or {}).get("content")
                if shown or choices[0].get("finish_reason"):
                    self._recent.clear()
                    return
                self._tokens.pop()
        self._recent.clear()


def _ids(text: bytes) -> list[int]:
    return [int(part) for part in text.split(b",")] if text else []
