"""Finds tokens in a tokenizer's files. They are searched, not parsed: that would take seconds.

A token of a JSON file is a string of its own there; `tokenizer.model` has its pieces as plain bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from weights.checkpoint.folder import SPECIAL_TOKENS, TOKENIZER_CONFIG

_JSON = ("tokenizer.json", "vocab.json", "added_tokens.json", TOKENIZER_CONFIG, SPECIAL_TOKENS)
_PIECES = "tokenizer.model"
# A part of Mistral's format that not every file spells out.
_TEKKEN, _OF_TEKKEN = "tekken.json", "[TOOL_CALLS]"


def tokens_of(directory: Path, wanted: Iterable[str]) -> frozenset[str]:
    """Return those of the `wanted` tokens that the tokenizer in `directory` has."""
    missing, found = set(wanted), set()
    names = [name for name in (*_JSON, _PIECES) if (directory / name).is_file()]
    if not {"tokenizer.json", _PIECES} & set(names) and (directory / _TEKKEN).is_file():
        found.add(_OF_TEKKEN)
    for name in names:
        written = (directory / name).read_bytes()
        found |= {token for token in missing - found if any(form in written for form in _forms(token, name))}
    return frozenset(found & missing)


def _forms(token: str, name: str) -> tuple[bytes, ...]:
    if name == _PIECES:
        return (token.encode(),)
    return json.dumps(token, ensure_ascii=False).encode(), json.dumps(token).encode()
