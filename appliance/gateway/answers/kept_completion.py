"""Builds the stored form of one chat completion that is to be kept (`store: true`): what it was asked with, and the
object that its client got, of a stream put together from its events. Pure: bytes pass as they are.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from appliance.gateway.answers.transcript import Transcript, object_in
from appliance.gateway.core import errors

# What of a request is kept beside its messages: as OpenAI's stored objects have it.
OPTIONS: Final = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
_ASKED: Final = ("messages", "metadata", *OPTIONS, "user", "service_tier")
_ENVELOPE: Final = ("id", "created", "model", "system_fingerprint", "service_tier", "usage")
# Texts of a delta that come in pieces; others are whole.
_IN_PIECES: Final = frozenset({"content", "reasoning", "reasoning_content", "refusal", "arguments"})


class CompletionTranscript(Transcript):
    """input: what of the request is kept, an object. held: bytes of events that were gathered."""

    tells_usage = False

    def __init__(self, asked: bytes) -> None:
        super().__init__(asked, "", stores=True, background=False)
        self._answer: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def whole(self, body: bytes) -> bytes:
        self.stores = object_in(body, "chat.completion") is not None
        self.final = body if self.stores else b""
        return body

    def forgo(self) -> None:
        self.stores = False
        self._choices, self.held = {}, 0

    def _event(self, event: bytes) -> bytes:
        chunk = object_in(event[6:], "chat.completion.chunk") if self.stores and event.startswith(b"data: {") else None
        if event == b"data: [DONE]" and self.stores:
            choices = [choice for _, choice in sorted(self._choices.items())]
            self.final = orjson.dumps({**self._answer, "object": "chat.completion", "choices": choices})
        elif chunk is not None:
            self.held += len(event) - event.find(b'"choices":')
            self._answer |= {name: chunk[name] for name in _ENVELOPE if chunk.get(name) is not None}
            for choice in chunk.get("choices") or ():
                self._add(choice)
        elif event.startswith(b'data: {"error"'):
            self.forgo()
        return event

    def _add(self, piece: dict[str, Any]) -> None:
        index = piece.get("index") or 0
        message = {"role": "assistant", "content": None}
        choice = self._choices.setdefault(
            index, {"index": index, "message": message, "logprobs": None, "finish_reason": None}
        )
        _merge(choice["message"], piece.get("delta") or {})
        if piece.get("logprobs"):
            _merge(choice, {"logprobs": piece["logprobs"]})
        choice["finish_reason"] = piece.get("finish_reason") or choice["finish_reason"]


def _merge(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Adds a piece of a streamed object to what has come of it. Lists of calls have places, others grow."""
    for name, value in piece.items():
        known = whole.get(name)
        if value is None or (value == "" and known is not None):
            continue
        if name == "tool_calls":
            calls = whole.setdefault(name, [])
            for call in value:
                calls += [{} for _ in range(call.get("index", 0) + 1 - len(calls))]
                _merge(calls[call.get("index", 0)], {key: part for key, part in call.items() if key != "index"})
        elif isinstance(known, str) and name in _IN_PIECES:
            whole[name] = known + value
        elif isinstance(known, list):
            known.extend(value)
        elif isinstance(known, dict):
            _merge(known, value)
        else:
            whole[name] = value


def kept_completion(data: dict[str, Any]) -> CompletionTranscript | None:
    """The transcript of a checked chat request that says `store`; None for one that is not to be kept. Raises HttpError
    400."""
    if data.get("store"):
        return CompletionTranscript(orjson.dumps({name: data[name] for name in _ASKED if data.get(name) is not None}))
    if data.get("metadata") is not None:
        raise errors.bad_request(
            "The 'metadata' parameter is only allowed when 'store' is enabled.", param="metadata", code="invalid_value"
        )
    return None
