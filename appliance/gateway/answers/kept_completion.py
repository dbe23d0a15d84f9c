"""Builds the stored form of one chat completion that is to be kept (`store: true`): what it was asked with, and the
object that its client got, of a stream put together from its events. Pure: bytes pass as they are.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from appliance.gateway.answers.transcript import Transcript, flag
from appliance.gateway.core import errors

METADATA_PAIRS: Final = 16
METADATA_KEY_CHARS: Final = 64
METADATA_CHARS: Final = 512
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
_EVENT: Final = b"data: {"
_DONE: Final = b"data: [DONE]"
# Pieces of a text are few bytes each, and a string of their own until the end.
_PIECE_BYTES: Final = 64


class _Choice:
    """One choice of a stream as far as it has come. texts: pieces of each text of its message, by name."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
        self.calls: dict[int, dict[str, Any]] = {}
        self.logprobs: list[bytes] = []
        self.finish_reason: Any = None

    def add(self, choice: dict[str, Any]) -> int:
        """Returns about how many bytes more it holds."""
        more = 0
        delta = choice.get("delta")
        if isinstance(delta, dict):
            for name in ("content", "reasoning", "reasoning_content", "refusal"):
                piece = delta.get(name)
                if isinstance(piece, str):
                    self.texts.setdefault(name, []).append(piece)
                    more += len(piece) + _PIECE_BYTES
            for call in delta.get("tool_calls") or ():
                more += self._call(call)
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and logprobs.get("content"):
            # As bytes: an object for each token takes six times as much.
            self.logprobs.append(orjson.dumps(logprobs["content"])[1:-1])
            more += len(self.logprobs[-1])
        if choice.get("finish_reason") is not None:
            self.finish_reason = choice["finish_reason"]
        return more

    def _call(self, piece: dict[str, Any]) -> int:
        call = self.calls.setdefault(
            piece.get("index") or 0, {"id": None, "type": "function", "name": "", "arguments": []}
        )
        function = piece.get("function") or {}
        call["id"] = piece.get("id") or call["id"]
        call["name"] = function.get("name") or call["name"]
        arguments = function.get("arguments") or ""
        call["arguments"].append(arguments)
        return len(arguments) + len(function.get("name") or "") + _PIECE_BYTES

    def whole(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        message |= {name: "".join(pieces) for name, pieces in self.texts.items()}
        if self.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": call["type"],
                    "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
                }
                for _, call in sorted(self.calls.items())
            ]
        logprobs = {"content": orjson.Fragment(b"[%b]" % b",".join(self.logprobs))} if self.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self.finish_reason}


class CompletionTranscript(Transcript):
    """input: what of the request is kept, an object. held: about how many bytes a stream has been gathered to."""

    tells_usage = False

    def __init__(self, asked: bytes) -> None:
        super().__init__(asked, "", stores=True, background=False)
        self._envelope: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}

    def whole(self, body: bytes) -> bytes:
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = None
        if isinstance(answer, dict) and answer.get("object") == "chat.completion":
            self.final = body
        else:
            self.stores = False
        return body

    def take(self, data: bytes, max_bytes: int, *, last: bool = False) -> bytes:
        """Notes the events among these bytes, and returns them all: a client waits for nothing that is noted.

        max_bytes: of all that is gathered; a longer answer is not stored.
        """
        if not self.stores:
            return data
        seen = b"%b%b" % (self._partial, data) if self._partial else data
        end = seen.rfind(b"\n\n") + 2
        if end < 2:
            end = 0
        self._partial = seen[end:]
        if end:
            for event in seen[:end].split(b"\n\n"):
                if event.startswith(_EVENT):
                    self._note(event)
                elif event.startswith(_DONE):
                    self._end_stream()
        if self.held + len(self._partial) > max_bytes:
            self.forgo()
        return data

    def forgo(self) -> None:
        self.stores = False
        self._choices, self._partial, self.held = {}, b"", 0

    def _note(self, event: bytes) -> None:
        try:
            chunk = orjson.loads(event[6:])
        except orjson.JSONDecodeError:
            self.forgo()
            return
        if not isinstance(chunk, dict) or "error" in chunk:
            self.forgo()
            return
        for name in _ENVELOPE:
            if chunk.get(name) is not None:
                self._envelope[name] = chunk[name]
        for choice in chunk.get("choices") or ():
            index = choice.get("index") or 0
            known = self._choices.get(index)
            if known is None:
                known = self._choices[index] = _Choice()
            self.held += known.add(choice)

    def _end_stream(self) -> None:
        if self.stores:
            choices = [choice.whole(index) for index, choice in sorted(self._choices.items())]
            self.final = orjson.dumps({**self._envelope, "object": "chat.completion", "choices": choices})
            self._choices = {}


def kept_completion(data: dict[str, Any]) -> CompletionTranscript | None:
    """The transcript of a checked chat request that says `store`; None for one that is not to be kept. Raises HttpError
    400."""
    metadata = data.get("metadata")
    if not flag(data, "store"):
        if metadata is not None:
            raise errors.bad_request(
                "The 'metadata' parameter is only allowed when 'store' is enabled.", param="metadata"
            )
        return None
    if metadata is not None:
        check_metadata(metadata)
    return CompletionTranscript(orjson.dumps({name: data[name] for name in _ASKED if data.get(name) is not None}))


def check_metadata(metadata: Any) -> None:
    """OpenAI's bounds in OpenAI's words."""
    if not isinstance(metadata, dict):
        raise _not("metadata", "an object", metadata)
    if len(metadata) > METADATA_PAIRS:
        raise errors.bad_request(
            f"Invalid 'metadata': too many properties. Expected an object with at most {METADATA_PAIRS} properties, "
            f"but got an object with {len(metadata)} properties instead.",
            param="metadata",
            code="object_above_max_properties",
        )
    for name, value in metadata.items():
        if len(name) > METADATA_KEY_CHARS:
            raise errors.bad_request(
                f"Invalid property name in 'metadata': {name[:METADATA_KEY_CHARS]!r}… is too long. Expected a name "
                f"with maximum length {METADATA_KEY_CHARS}, but got a name with length {len(name)} instead.",
                param="metadata",
                code="string_above_max_length",
            )
        if not isinstance(value, str):
            raise _not(f"metadata.{name}", "a string", value)
        if len(value) > METADATA_CHARS:
            raise errors.bad_request(
                f"Invalid 'metadata.{name}': string too long. Expected a string with maximum length {METADATA_CHARS}, "
                f"but got a string with length {len(value)} instead.",
                param=f"metadata.{name}",
                code="string_above_max_length",
            )


def _not(param: str, wanted: str, given: Any) -> errors.HttpError:
    return errors.bad_request(errors.not_of_type(param, wanted, given), param=param, code="invalid_type")
