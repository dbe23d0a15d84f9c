"""Tracks the answer to one request: its usage, its stored form, and its continuation after an engine dies. Pure: takes
an engine's events, returns the client's events.

Engines do not store responses, so `store` and `previous_response_id` are set here.

Greedy decoding depends only on the tokens so far, so another engine that gets the prompt and the emitted tokens
generates the same next tokens. The gateway requests token ids and removes them from the client's stream. Sampled
streams cannot be continued, because the sampler's state is lost, nor can streams whose next token depends on more than
the tokens: grammars, tools, partly matched stop strings, counts of emitted tokens. A chat cannot be continued before
the first text of its answer: the rest is requested as a completion, which would return reasoning as the answer."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

CHAT, COMPLETIONS = "chat.completions", "completions"
RESUME_PATH = b"/v1/completions"

# JSON strings escape quotes, so these patterns match only the engine's own fields, never text inside a string.
USAGE: Final = b'"usage"'
_USAGE: Final = re.compile(rb'"usage": ?\{')
_COUNTS: Final = re.compile(
    rb'"(prompt|input|completion|output|cached|cache_read_input|cache_creation_input)_tokens": ?([0-9]{1,12})'
)
_NAMES: Final = {b"input": b"prompt", b"output": b"completion"}


class Tokens:
    """Usage of one request. A later number replaces an earlier one: Anthropic's streams report the prompt first, the
    completion last. cached: prompt tokens found in the prefix cache."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def read(self, body: bytes) -> None:
        """Read the usage from a piece of an answer, if it contains usage."""
        starts = list(_USAGE.finditer(body))
        if not starts:
            return
        counts: dict[bytes, int] = {}
        for name, digits in _COUNTS.findall(body, starts[-1].end()):
            counts.setdefault(_NAMES.get(name, name), int(digits))  # only the first of a name is the engine's own
        self.cached = counts.get(b"cached", self.cached)
        if b"prompt" in counts:
            # Anthropic's `input_tokens` leave out cached tokens.
            self.prompt = sum(counts.get(name, 0) for name in (b"prompt", b"cache_read_input", b"cache_creation_input"))
        self.completion = counts.get(b"completion", self.completion)


# -- stored answers

_FINAL: Final = frozenset({b"completed", b"incomplete", b"failed"})
# Names of `response.…` events that carry the whole response object.
_WHOLE: Final = _FINAL | {b"created", b"queued", b"in_progress"}
# Fields of a chat request that are stored with its messages, as OpenAI stores them.
OPTIONS: Final = tuple(
    "tools tool_choice parallel_tool_calls response_format temperature top_p presence_penalty frequency_penalty "
    "seed".split()
)
_REQUEST: Final = ("messages", "metadata", *OPTIONS, "user", "service_tier")
_ENVELOPE: Final = ("id", "created", "model", "system_fingerprint", "service_tier", "usage", "choices")
# Text fields of a delta that arrive in pieces; other fields arrive complete.
_IN_PIECES: Final = frozenset({"content", "reasoning", "reasoning_content", "refusal", "arguments"})


class Transcript:
    """One response of /v1/responses.

    input: the request's own `input` as JSON. previous_id: id of the response that it continues, or empty. stores:
    whether `store` requests a copy for the controller. final: the object that the client got, empty until then. usage:
    the usage of the final object; earlier events repeat the request, whose tool schemas may contain usage-like text.
    held: bytes of gathered events."""

    final: bytes = b""
    usage: bytes = b""
    held: int = 0

    def __init__(self, input: bytes, previous_id: str = "", *, stores: bool = True, background: bool = False) -> None:
        self.input, self.previous_id = input, previous_id
        self.stores, self.background = stores, background

    def whole(self, body: bytes) -> bytes:
        """Rewrite a non-streamed answer for the client."""
        answer = object_in(body, "response")
        if answer is None:
            self.stores = False
            return body
        self._describe(answer)
        return self.final

    def event(self, event: bytes) -> bytes:
        """Rewrite an event for the client."""
        head, _, text = event.partition(b"\ndata: ")
        kind = head.removeprefix(b"event: response.")
        data = object_in(text) if kind in _WHOLE else None
        if data is None or not isinstance(data.get("response"), dict):
            return event
        if kind == b"completed" and data["response"].get("status") == "incomplete":  # engines send `completed`
            kind, data["type"] = b"incomplete", "response.incomplete"
        self._describe(data["response"], is_final=kind in _FINAL)
        return b"event: response.%b\ndata: %b" % (kind, orjson.dumps(data))

    def copy(self, key_id: str) -> bytes:
        """Return the copy for the controller: {"key", "previous", "input", "response"}."""
        parts = {"key": key_id, "previous": self.previous_id or None}
        bodies = {"input": orjson.Fragment(self.input), "response": orjson.Fragment(self.final)}
        return orjson.dumps(parts | bodies)

    def _describe(self, answer: dict[str, Any], *, is_final: bool = True) -> None:
        answer |= {"previous_response_id": self.previous_id or None, "store": self.stores}
        answer.setdefault("error", None)
        if is_final:
            self.final, self.usage = orjson.dumps(answer), orjson.dumps({"usage": answer.get("usage")})


class CompletionTranscript(Transcript):
    """One chat completion; a stream is assembled from its events. request: its checked body."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(orjson.dumps({name: request[name] for name in _REQUEST if request.get(name) is not None}))
        self._answer: dict[str, Any] = {"choices": []}

    def whole(self, body: bytes) -> bytes:
        self.stores, self.final = object_in(body, "chat.completion") is not None, body
        return body

    def event(self, event: bytes) -> bytes:
        chunk = object_in(event[6:], "chat.completion.chunk") if self.stores and event.startswith(b"data: {") else None
        if event == b"data: [DONE]":
            for choice in self._answer["choices"]:
                choice["message"] = {"role": "assistant", "content": None, **choice.pop("delta", {})}
                for call in choice["message"].get("tool_calls") or ():
                    del call["index"]
            self.final = orjson.dumps(self._answer | {"object": "chat.completion"})
        elif chunk is not None:
            self.held += len(event) - event.find(b'"choices":')
            _merge(self._answer, {name: chunk[name] for name in _ENVELOPE if chunk.get(name) is not None})
        elif event.startswith(b'data: {"error"'):
            self.stores = False
        return event


def _merge(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Merge a piece of a streamed object into the earlier pieces; choices and tool calls are matched by their index."""
    for name, value in piece.items():
        known = whole.setdefault(name, None)
        if value is None or (value == "" and known is not None):
            continue
        if name in ("choices", "tool_calls"):
            whole[name] = items = known or []
            for item in value:
                items += [{} for _ in range(item.get("index", 0) + 1 - len(items))]
                _merge(items[item.get("index", 0)], item)
        elif isinstance(known, str) and name in _IN_PIECES:
            whole[name] = known + value
        elif isinstance(known, list):
            known.extend(value)
        elif isinstance(known, dict):
            _merge(known, value)
        else:
            whole[name] = value


def object_in(body: bytes, kind: str = "") -> dict[str, Any] | None:
    """Parse a JSON object; None if the body is not one. kind: required value of its `object` field."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) and (not kind or value.get("object") == kind) else None


def token_count(body: bytes) -> bytes:
    """Turn an engine's token ids into the answer to a request that only counts tokens."""
    ids = (object_in(body) or {}).get("token_ids")
    count = {"object": "response.input_tokens", "input_tokens": len(ids or ())}
    return body if ids is None else orjson.dumps(count)


# -- continued streams

# Fields that a continuable request may have. The continuation repeats the first set; the second does not affect tokens.
_SAMPLING = frozenset({"model", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "stop_token_ids"})
_NEUTRAL = frozenset(
    "messages prompt stream stream_options max_tokens max_completion_tokens n user metadata store service_tier "
    "safety_identifier prompt_cache_key chat_template_kwargs cache_salt".split()
)
# An engine's own fields (quotes as above). Each follows another field, so it is removed with the comma before it.
_TOKEN_IDS = re.compile(rb',"(?:prompt_token_ids|token_ids)":\[[0-9, ]*\]')


def continuation_of(route: str, data: dict[str, Any]) -> Continuation | None:
    """Return a continuation for a checked request body, None if its stream cannot be continued."""
    fields = {name: value for name, value in data.items() if value is not None}
    if fields.get("temperature") != 0 or not fields.get("stream") or route not in (CHAT, COMPLETIONS):
        return None
    prompt = fields.get("prompt")
    several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    if fields.keys() - _SAMPLING - _NEUTRAL or fields.get("n", 1) != 1 or several:
        return None
    if fields.get("stream_options", {}).get("continuous_usage_stats"):
        return None
    default = 16 if route == COMPLETIONS else None  # the API's default limit in tokens
    limit = fields.get("max_completion_tokens", fields.get("max_tokens", default))
    return Continuation(route, {name: fields[name] for name in _SAMPLING & fields.keys()}, limit)


class Continuation:
    """One greedy stream. Pass every event to `event`; after the engine's death call `resume_body`, then `event`
    again."""

    def __init__(self, route: str, sampling: dict[str, Any], max_tokens: int | None) -> None:
        self._route = route
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._prompt: list[int] = []
        self._tokens: list[int] = []
        self._unseen = 0  # number of last tokens without sent text, such as the first bytes of a character
        self._envelope: dict[str, Any] = {}
        self._resumed = self._finished = False
        self._answers = route != CHAT  # True: the last text that the client got is part of the answer, not of reasoning

    def resume_body(self, max_model_len: int | None) -> bytes | None:
        """Return the request to RESUME_PATH for the stream's rest; None if it cannot be continued or is empty.

        max_model_len: the model's context in tokens, the limit of a chat without a token limit."""
        # An engine that starts in the middle of a character could not send the character's first bytes.
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
        """Rewrite an event for the client, empty to drop it. Events of the continuation get the form and id of the
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
            rewritten = {"index": 0, **text, "logprobs": None, "finish_reason": choice.get("finish_reason")}
            return b"data: %b" % orjson.dumps({**self._envelope, "choices": [rewritten]})
        if not data.get("usage"):
            return b""
        prompt, emitted = len(self._prompt), len(self._tokens)
        # Fields in an engine's order. The dead engine's number of cached tokens is unknown.
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
