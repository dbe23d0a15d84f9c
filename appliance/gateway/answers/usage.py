"""Reads token usage from the bytes of answers. Pure.

Every engine answer ends with its usage. Chat and completion streams report it only on request, so the gateway requests
it, and removes the event for a client that did not.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import orjson

# Inside a JSON string a quote is always escaped, so these match the engine's own fields and never a client's text.
# Answers of /v1/responses have more of the request than its texts (the schemas of its tools): answers/transcript.py.
_USAGE: Final = re.compile(rb'"usage": ?\{')
# All counts in one pass: four searches took 1.8 times as long.
_COUNTS: Final = re.compile(
    rb'"(prompt|input|completion|output|cached|cache_read_input|cache_creation_input)_tokens": ?([0-9]{1,12})'
)
_NAMES: Final = {b"input": b"prompt", b"output": b"completion"}
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
        starts = list(_USAGE.finditer(body))
        if not starts:
            return
        counts: dict[bytes, int] = {}
        for name, digits in _COUNTS.findall(body, starts[-1].end()):
            counts.setdefault(_NAMES.get(name, name), int(digits))  # the first of each is the engine's own
        self.found = counts.get(b"cached", self.found)
        if b"prompt" in counts:
            # Anthropic's `input_tokens` are those that no cache had.
            self.prompt = sum(counts.get(name, 0) for name in (b"prompt", b"cache_read_input", b"cache_creation_input"))
        self.completion = counts.get(b"completion", self.completion)

    @property
    def total(self) -> int:
        return self.prompt + self.completion


def without_usage(body: bytes, fingerprint: str) -> bytes:
    """Whole events for a client that did not ask for usage: without the event that has only usage. An engine writes its
    `system_fingerprint` there if it is asked for usage, else into the events that end a choice, as here."""
    kept = []
    for event in body.split(b"\n\n"):
        if FINISHED in event and event.endswith(b"}"):
            event = b'%b,"system_fingerprint":%b}' % (event[:-1], orjson.dumps(fingerprint))
        if _NO_CHOICES not in event:
            kept.append(event)
    return b"\n\n".join(kept)


class TokenRequest(NamedTuple):
    """Estimated prompt tokens of one request, its maximum completion tokens, and the number of sequences."""

    prompt_tokens: int
    completion_tokens: int
    sequences: int
