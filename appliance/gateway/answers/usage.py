"""Reads token usage from the bytes of answers. Pure."""

from __future__ import annotations

import re
from typing import Final

# Inside a JSON string a quote is always escaped, so these match the engine's own fields and never a client's text.
# Answers of /v1/responses have more of the request than its texts (the schemas of its tools): answers/transcript.py.
USAGE: Final = b'"usage"'
_USAGE: Final = re.compile(rb'"usage": ?\{')
# All counts in one pass: four searches took 1.8 times as long.
_COUNTS: Final = re.compile(
    rb'"(prompt|input|completion|output|cached|cache_read_input|cache_creation_input)_tokens": ?([0-9]{1,12})'
)
_NAMES: Final = {b"input": b"prompt", b"output": b"completion"}


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
