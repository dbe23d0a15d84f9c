"""Builds the stored form of one response of /v1/responses: the request, the response it continues, and the returned
object. Pure: takes a checked body and an engine's bytes, returns bytes for client and controller.

An engine stores nothing and knows no earlier response, so its objects contain neither field. This module sets both, in
a plain body and in the stream events that carry the whole object.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from appliance.gateway.core import errors

RESPONSE_ID_CHARS: Final = 256
_FINAL: Final = frozenset({b"completed", b"incomplete", b"failed"})
# Within JSON a line feed is always escaped, so this matches whole events of the engine and never a client's text.
_WHOLE_OBJECT: Final = re.compile(
    rb"event: response\.(created|queued|in_progress|completed|incomplete|failed)\ndata: (\{.*)\n\n"
)
# OpenAI keeps these on its servers, under ids that only it issues.
_NOT_HERE: Final = {
    "conversation": "It keeps no conversations: go on from a response with `previous_response_id`, or send the earlier "
    "items in `input`.",
    "prompt": "It keeps no prompts: send the text in `instructions` and `input`.",
}


class Transcript:
    """What one request continues and stores.

    input: its own `input` as JSON. previous_id: the response it continues, empty without one. stores: whether a copy
    goes to the controller, `store` in the object. tells_usage: what it cost is read here, by nobody else. held: bytes
    that it keeps of a stream until its end. has_previous: the body already has the earlier turns. counts: the
    request only counts input tokens, and the engine answers with all ids. final: the returned object, empty until then;
    prompt_tokens, completion_tokens: what the engine says there that it took. (Nothing but that object is asked: the
    events before it repeat the request, whose tools' schemas may say anything.)
    """

    has_previous: bool = False
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
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = None
        if self.counts and isinstance(answer, dict) and isinstance(answer.get("token_ids"), list):
            return orjson.dumps({"object": "response.input_tokens", "input_tokens": len(answer["token_ids"])})
        if not isinstance(answer, dict) or answer.get("object") != "response":
            self.stores = False
            return body
        self._end(self._said(answer))
        return self.final

    def take(self, data: bytes, max_bytes: int, *, last: bool = False) -> bytes:
        """Whole events for the client out of what the engine sent; the beginning of another one is kept back.

        max_bytes: of a buffered event; a longer one passes unchanged, and the response is not stored.
        """
        if self._partial:
            data = b"%b%b" % (self._partial, data)
            self._partial = b""
        end = len(data) if last else data.rfind(b"\n\n") + 2
        if end < 2:
            end = 0
        if len(data) - end > max_bytes:
            self.stores = False
            end = len(data)
        if end < len(data):
            self._partial = data[end:]
            data = data[:end]
        return _WHOLE_OBJECT.sub(self._event, data)

    def forgo(self) -> None:
        """From now on nothing of it is stored."""
        self.stores = False

    def copy(self, key_id: str) -> bytes:
        """What the controller gets: {"key", "previous", "input", "response"}."""
        previous = orjson.dumps(self.previous_id or None)
        return b'{"key":%b,"previous":%b,"input":%b,"response":%b}' % (
            orjson.dumps(key_id),
            previous,
            self.input,
            self.final,
        )

    def _event(self, found: re.Match[bytes]) -> bytes:
        kind, text = found.groups()
        try:
            event = orjson.loads(text)
        except orjson.JSONDecodeError:
            return found[0]
        if not isinstance(event, dict) or not isinstance(event.get("response"), dict):
            return found[0]
        response = self._said(event["response"])
        if kind in _FINAL:
            self._end(response)
        return b"event: response.%b\ndata: %b\n\n" % (kind, orjson.dumps(event))

    def _end(self, answer: dict[str, Any]) -> None:
        self.final, used = orjson.dumps(answer), answer.get("usage")
        if isinstance(used, dict):
            prompt, completion = used.get("input_tokens"), used.get("output_tokens")
            self.prompt_tokens = prompt if type(prompt) is int else 0
            self.completion_tokens = completion if type(completion) is int else 0

    def _said(self, answer: dict[str, Any]) -> dict[str, Any]:
        answer["previous_response_id"] = self.previous_id or None
        answer["store"] = self.stores
        answer.setdefault("error", None)
        return answer


def transcript_of(data: dict[str, Any], *, counts: bool = False) -> Transcript:
    """The transcript of a parsed body of /v1/responses whose `input` was checked. Raises HttpError 400."""
    if counts:
        for name in ("stream", "background"):
            if data.get(name):
                raise errors.bad_request(
                    f"The parameter `{name}` is not accepted where tokens are counted.",
                    param=name,
                    code="unsupported_parameter",
                )
    for name, why in _NOT_HERE.items():
        if data.get(name) is not None:
            raise errors.bad_request(
                f"The parameter `{name}` is not accepted by this server. {why}",
                param=name,
                code="unsupported_parameter",
            )
    store, background = flag(data, "store"), flag(data, "background")
    if background and store is False:
        raise errors.bad_request(
            "`background` is true and `store` is false: the answer of a response in background can only be retrieved, "
            "so it has to be stored.",
            param="background",
        )
    previous = data.get("previous_response_id")
    if previous is not None and not (isinstance(previous, str) and 0 < len(previous) <= RESPONSE_ID_CHARS):
        raise errors.bad_request(
            f"Invalid value for `previous_response_id`: expected the id of a response, 1 to {RESPONSE_ID_CHARS} "
            "characters.",
            param="previous_response_id",
        )
    made = Transcript(
        orjson.dumps(data["input"]),
        previous or "",
        stores=store is not False and not counts,
        background=background is True,
    )
    made.counts = counts
    return made


def joined(body: bytes, own_input: bytes, earlier: bytes) -> bytes:
    """A checked body with the whole conversation as input. own_input: its `input` as JSON; earlier: a JSON array of the
    items before it. It appends second keys: all parsers here and in engines take the last."""
    own = own_input
    if own.startswith(b'"'):
        own = b'[{"type":"message","role":"user","content":%b}]' % own
    before, after = earlier.strip()[1:-1].strip(), own[1:-1].strip()
    items = b"[%b%b%b]" % (before, b"," if before and after else b"", after)
    return b'%b,"input":%b,"previous_response_id":null}' % (body.rstrip()[:-1], items)


def flag(data: dict[str, Any], name: str) -> bool | None:
    """Raises HttpError 400."""
    value = data.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise errors.bad_request(f"Invalid value for `{name}`: expected true or false.", param=name)
