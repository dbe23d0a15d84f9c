"""Compares the tokens of two tokenizers."""

from __future__ import annotations

from pathlib import Path

import orjson

_SHOWN = 60


def differ(student: Path, teacher: Path) -> str:
    """In what two files tokenizer.json differ, "" if every token means the same to both; also why that cannot be said.
    It may take half a second."""
    try:
        written = student.read_bytes(), teacher.read_bytes()
        ours, theirs = map(_tokens, written) if written[0] != written[1] else ({}, {})
    except OSError as error:  # without the path, which is the box's
        return f"their tokenizers could not be read: {error.strerror}"
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return "their tokenizers are not the same file, and one of them is not of a form that can be compared"
    number = min((n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)), default=None)
    if number is None:
        return ""
    here, there = (repr(texts[number][:_SHOWN]) if number in texts else "none" for texts in (ours, theirs))
    return f"it reads tokens, and their tokenizers differ: {number} is {here} to the student and {there} to it"


def _tokens(written: bytes) -> dict[int, str]:
    """Tokens by number."""
    tokenizer = orjson.loads(written)
    vocabulary = tokenizer["model"].get("vocab") or {}
    if isinstance(vocabulary, list):  # of unigrams, each with its score
        vocabulary = {token[0]: number for number, token in enumerate(vocabulary)}
    vocabulary = vocabulary | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    return {int(number): str(text) for text, number in vocabulary.items()}
