"""Builds the stored form of one answer, of /v1/responses or of a chat completion with `store`: what it was asked with,
and the object that its client got. Pure: takes a checked body and an engine's events, returns bytes.

An engine stores nothing and knows no earlier response, so its responses have neither `store` nor
`previous_response_id`: both are set here, in a plain body and in the events that carry the whole object.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from appliance.gateway.core import errors

_FINAL: Final = frozenset({b"completed", b"incomplete", b"failed"})
# Events `response.…` with the whole object.
_WHOLE: Final = _FINAL | {b"created", b"queued", b"in_progress"}
# What of a chat request is kept beside its messages: as OpenAI's stored objects have it.
OPTIONS: Final = tuple(
    "tools tool_choice parallel_tool_calls response_format temperature top_p presence_penalty frequency_penalty "
    "seed".split()
)
_ASKED: Final = ("messages", "metadata", *OPTIONS, "user", "service_tier")
_ENVELOPE: Final = ("id", "created", "model", "system_fingerprint", "service_tier", "usage", "choices")
# Texts of a delta that come in pieces; others are whole.
_IN_PIECES: Final = frozenset({"content", "reasoning", "reasoning_content", "refusal", "arguments"})


class Transcript:
    """One response.

    input: its own `input` as JSON. previous_id: the response it continues, empty without one. stores: whether a copy
    goes to the controller, `store` in the object. final: the object that the client got, empty until then. usage: the
    part of it that has the usage; events before the last repeat the request, whose tools' schemas may say anything.
    held: bytes of events that it has gathered.
    """

    final: bytes = b""
    usage: bytes = b""
    held: int = 0

    def __init__(self, input: bytes, previous_id: str = "", *, stores: bool = True, background: bool = False) -> None:
        self.input, self.previous_id = input, previous_id
        self.stores, self.background = stores, background

    def whole(self, body: bytes) -> bytes:
        """A plain answer, as the client gets it."""
        answer = object_in(body, "response")
        if answer is None:
            self.stores = False
            return body
        self._end(answer)
        return self.final

    def event(self, event: bytes) -> bytes:
        """An event, as the client gets it."""
        head, _, text = event.partition(b"\ndata: ")
        kind = head.removeprefix(b"event: response.")
        data = object_in(text) if kind in _WHOLE else None
        if data is None or not isinstance(data.get("response"), dict):
            return event
        if kind == b"completed" and data["response"].get("status") == "incomplete":  # engines end all streams alike
            kind, data["type"] = b"incomplete", "response.incomplete"
        if kind in _FINAL:
            self._end(data["response"])
        else:
            self._describe(data["response"])
        return b"event: response.%b\ndata: %b" % (kind, orjson.dumps(data))

    def copy(self, key_id: str) -> bytes:
        """What the controller gets: {"key", "previous", "input", "response"}."""
        parts = {"key": key_id, "previous": self.previous_id or None}
        bodies = {"input": orjson.Fragment(self.input), "response": orjson.Fragment(self.final)}
        return orjson.dumps(parts | bodies)

    def _end(self, answer: dict[str, Any]) -> None:
        self._describe(answer)
        self.final, self.usage = orjson.dumps(answer), orjson.dumps({"usage": answer.get("usage")})

    def _describe(self, answer: dict[str, Any]) -> None:
        answer["previous_response_id"] = self.previous_id or None
        answer["store"] = self.stores
        answer.setdefault("error", None)


class CompletionTranscript(Transcript):
    """One chat completion, of a stream put together from its events. input: what of the request is kept, an object."""

    def __init__(self, input: bytes) -> None:
        super().__init__(input)
        self._answer: dict[str, Any] = {"choices": []}

    def whole(self, body: bytes) -> bytes:
        self.stores = object_in(body, "chat.completion") is not None
        self.final = body
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
    """Adds a piece of a streamed object to what has come of it. Choices and calls have places, others grow."""
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
    """The JSON object in a body, None where there is none. kind: that its `object` must have."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and (not kind or found.get("object") == kind) else None


def token_count(body: bytes) -> bytes:
    """An engine's answer to a request that only counts its input: it has all ids."""
    counted = object_in(body) or {}
    ids = counted.get("token_ids")
    if not isinstance(ids, list):
        return body
    return orjson.dumps({"object": "response.input_tokens", "input_tokens": len(ids)})


def of_response(data: dict[str, Any], *, stores: bool = True) -> Transcript:
    """The transcript of a checked body of /v1/responses. Raises HttpError 400. stores: False where
    nothing is answered that could be."""
    stores, background = stores and data.get("store") is not False, data.get("background") is True
    if background and not stores:
        text = "`background` is true and `store` is false: the answer can only be retrieved, so it has to be stored."
        raise errors.bad_request(text, param="background", code="invalid_value")
    previous = data.get("previous_response_id") or ""
    return Transcript(orjson.dumps(data["input"]), previous, stores=stores, background=background)


def of_completion(data: dict[str, Any]) -> CompletionTranscript:
    """The transcript of a checked chat request that says `store`."""
    return CompletionTranscript(orjson.dumps({name: data[name] for name in _ASKED if data.get(name) is not None}))


def joined(data: dict[str, Any], earlier: bytes) -> dict[str, Any]:
    """A checked body with the whole conversation as input. earlier: a JSON array of the items before it."""
    own = data["input"]
    if isinstance(own, str):
        own = [{"type": "message", "role": "user", "content": own}]
    return {**data, "input": orjson.loads(earlier) + own, "previous_response_id": None}
