"""Builds the stored form of one response of /v1/responses: the request, the response it continues, and the returned
object. Pure: takes a checked body and an engine's bytes, returns bytes for client and controller.

An engine stores nothing and knows no earlier response, so its objects contain neither field. This module sets both, in
a plain body and in the stream events that carry the whole object.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from appliance.gateway.core import errors

_FINAL: Final = frozenset({b"completed", b"incomplete", b"failed"})
# Events `response.…` with the whole object.
_WHOLE: Final = _FINAL | {b"created", b"queued", b"in_progress"}


class Transcript:
    """What one request continues and stores.

    input: its own `input` as JSON. previous_id: the response it continues, empty without one. stores: whether a copy
    goes to the controller, `store` in the object. tells_usage: its usage is read here, by nobody else: events before
    the last repeat the request, whose tools' schemas may say anything. held: bytes that it keeps of a stream until its
    end. counts: the request only counts input tokens, and the engine answers with all ids. final: the returned object,
    empty until then; prompt_tokens, completion_tokens: its usage.
    """

    counts: bool = False
    tells_usage: bool = True
    held: int = 0
    final: bytes = b""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    _partial: bytes = b""

    def __init__(self, input: bytes, previous_id: str, *, stores: bool, background: bool) -> None:
        self.input = input
        self.previous_id = previous_id
        self.stores = stores
        self.background = background

    def whole(self, body: bytes) -> bytes:
        """A plain answer, as the client gets it."""
        if self.counts and (counted := object_in(body)) is not None and isinstance(counted.get("token_ids"), list):
            return orjson.dumps({"object": "response.input_tokens", "input_tokens": len(counted["token_ids"])})
        answer = object_in(body, "response")
        if answer is None:
            self.stores = False
            return body
        self._end(self._with_store(answer))
        return self.final

    def take(self, data: bytes, max_bytes: int, *, last: bool = False) -> bytes:
        """Whole events for the client out of an engine's bytes; keep the beginning of another one back.

        max_bytes: of what is kept; beyond it all passes unchanged, and the answer is not stored.
        """
        *events, self._partial = (self._partial + data).split(b"\n\n")
        passed = b"".join(self._event(event) + b"\n\n" for event in events)
        if self.held + len(self._partial) > max_bytes:
            self.forgo()
        elif not last:
            return passed
        rest, self._partial = self._partial, b""
        return passed + rest

    def forgo(self) -> None:
        """From now on nothing of it is stored."""
        self.stores = False

    def copy(self, key_id: str) -> bytes:
        """What the controller gets: {"key", "previous", "input", "response"}."""
        parts = {"key": key_id, "previous": self.previous_id or None}
        bodies = {"input": orjson.Fragment(self.input), "response": orjson.Fragment(self.final)}
        return orjson.dumps(parts | bodies)

    def _event(self, event: bytes) -> bytes:
        """An event as the client gets it."""
        head, _, text = event.partition(b"\ndata: ")
        kind = head.removeprefix(b"event: response.")
        data = object_in(text) if kind in _WHOLE else None
        if data is None or not isinstance(data.get("response"), dict):
            return event
        response = self._with_store(data["response"])
        if kind in _FINAL:
            self._end(response)
        return b"%b\ndata: %b" % (head, orjson.dumps(data))

    def _end(self, answer: dict[str, Any]) -> None:
        self.final, usage = orjson.dumps(answer), answer.get("usage") or {}
        self.prompt_tokens, self.completion_tokens = usage.get("input_tokens", 0), usage.get("output_tokens", 0)

    def _with_store(self, answer: dict[str, Any]) -> dict[str, Any]:
        answer["previous_response_id"] = self.previous_id or None
        answer["store"] = self.stores
        answer.setdefault("error", None)
        return answer


def object_in(body: bytes, kind: str = "") -> dict[str, Any] | None:
    """The JSON object in a body, None where there is none. kind: that its `object` must have."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and (not kind or found.get("object") == kind) else None


def transcript_of(data: dict[str, Any], *, counts: bool = False) -> Transcript:
    """The transcript of a checked body of /v1/responses. Raises HttpError 400."""
    stores, background = data.get("store") is not False, data.get("background") is True
    if background and not stores:
        raise errors.bad_request(
            "`background` is true and `store` is false: the answer of a response in background can only be retrieved, "
            "so it has to be stored.",
            param="background",
            code="invalid_value",
        )
    previous = data.get("previous_response_id") or ""
    made = Transcript(orjson.dumps(data["input"]), previous, stores=stores and not counts, background=background)
    made.counts = counts
    return made


def joined(body: bytes, earlier: bytes) -> bytes:
    """A checked body with the whole conversation as input. earlier: a JSON array of the items before it."""
    data = orjson.loads(body)
    own = data["input"]
    if isinstance(own, str):
        own = [{"type": "message", "role": "user", "content": own}]
    return orjson.dumps({**data, "input": orjson.loads(earlier) + own, "previous_response_id": None})
