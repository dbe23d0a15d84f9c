"""Reads token usage from the bytes of answers and sums it for the controller. Pure.

Every engine answer ends with its usage. Chat and completion streams report it only on request, so the gateway requests
it, and removes the event for a client that did not.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

# Inside a JSON string a quote is always escaped, so these match the engine's own fields and never a client's text.
# Answers of /v1/responses have more of the request than its texts (the schemas of its tools): answers/transcript.py.
_USAGE: Final = b'"usage":'
# All counts in one pass: four searches took 1.8 times as long.
_COUNTS: Final = re.compile(
    rb'"(prompt|input|completion|output|cached|cache_read_input|cache_creation_input)_tokens": ?([0-9]{1,12})'
)
FINISHED: Final = b'"finish_reason":"'
_NO_CHOICES: Final = b'"choices":[],'
# Fields added to a checked body in place of its last brace.
ASK_FOR_USAGE: Final = b',"stream_options":{"include_usage":true}'


class Tokens:
    """Usage of one request. The newest number counts: Anthropic's streams report the prompt first and the completion
    last. found: tokens of the prompt that a cache of prefixes had."""

    prompt: int = 0
    found: int = 0
    completion: int = 0

    def read(self, body: bytes) -> None:
        """Take the usage from a piece of an answer, if it holds one."""
        at = body.rfind(_USAGE)
        while at >= 0 and not body.startswith((b"{", b" {"), at + len(_USAGE)):
            at = body.rfind(_USAGE, 0, at)
        if at < 0:
            return
        # The first of each is the engine's own; -1: not told.
        prompt, completion, found, cached = -1, -1, -1, 0
        for name, digits in _COUNTS.findall(body, at):
            number = int(digits)
            if name == b"prompt" or name == b"input":
                prompt = number if prompt < 0 else prompt
            elif name == b"completion" or name == b"output":
                completion = number if completion < 0 else completion
            elif name == b"cached":
                found = number if found < 0 else found
            else:
                cached += number  # Anthropic's `input_tokens` are those that no cache had
        if found >= 0:
            self.found = found
        if prompt >= 0:
            self.prompt = prompt + cached
        if completion >= 0:
            self.completion = completion

    @property
    def total(self) -> int:
        return self.prompt + self.completion


def without_usage_event(body: bytes) -> bytes:
    """Return whole events, without the usage-only one."""
    at = body.find(_NO_CHOICES)
    if at < 0:
        return body
    start, end = body.rfind(b"data: ", 0, at), body.find(b"\n\n", at) + 2
    return b"%b%b" % (body[:start], body[end:]) if start >= 0 and end >= 2 else body


def with_fingerprint(body: bytes, fingerprint: str) -> bytes:
    """Return whole events; add to those that end a choice the `system_fingerprint`, which an engine writes into a
    requested usage event instead."""
    at = body.find(FINISHED)
    while at >= 0:
        end = body.find(b"}\n\n", at)
        if end < 0:
            break
        body = b'%b,"system_fingerprint":%b%b' % (body[:end], orjson.dumps(fingerprint), body[end:])
        at = body.find(FINISHED, body.find(b"\n\n", end))
    return body


class TokenRequest:
    """Estimated prompt tokens of one request, its maximum completion tokens, and the number of sequences."""

    def __init__(self, prompt_tokens: int, completion_tokens: int, sequences: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens
        self.sequences = sequences


NO_TOKENS: Final = TokenRequest(0, 0, 1)


class _Sums:
    requests: int = 0
    refused: int = 0
    errors: int = 0
    prompt: int = 0
    completion: int = 0


class Meter:
    """Sums by key, model and version since the last `take`."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, str], _Sums] = {}

    def add(self, key: str, model: str, version: str, tokens: Tokens, failed: bool) -> None:
        sums = self._of(key, model, version)
        sums.requests += 1
        sums.errors += failed
        sums.prompt += tokens.prompt
        sums.completion += tokens.completion

    def refuse(self, key: str, model: str) -> None:
        """model: empty if not known to exist."""
        self._of(key, model, "").refused += 1

    def _of(self, key: str, model: str, version: str) -> _Sums:
        whose = (key, model, version)
        sums = self._sums.get(whose)
        if sums is None:
            sums = self._sums[whose] = _Sums()
        return sums

    def take(self) -> list[dict[str, Any]]:
        """The sums as rows of the bus's "usage" message; empty when nothing happened."""
        sums, self._sums = self._sums, {}
        return [
            {
                "key": key,
                "model": model,
                "version": version,
                "requests": row.requests,
                "errors": row.errors,
                "refused": row.refused,
                "prompt_tokens": row.prompt,
                "completion_tokens": row.completion,
            }
            for (key, model, version), row in sums.items()
        ]
