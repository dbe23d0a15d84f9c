"""Reads off a chat template's renderings of a few short conversations what it does with their parts.

Pure. The renderings are those of PROBES: text by the probe's name, None where the template raised an error.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

Rendered = Mapping[str, str | None]
SYSTEM, QUESTION, ANSWER, SECOND = (
    "Answer for the night shift.",
    "Which tray takes the seals?",
    "Blue seals go into tray four.",
    "And the belts?",
)
TOOL, RESULT = "read_gauge", "seventeen point two"
_SHOWN = 60
_ASKED: tuple[dict[str, Any], ...] = ({"role": "user", "content": QUESTION},)
_ANSWERED = (*_ASKED, {"role": "assistant", "content": ANSWER})
_GAUGE = {
    "type": "function",
    "function": {"name": TOOL, "description": "Reads a gauge.", "parameters": {"type": "object"}},
}


_CALL = {"id": "call00000", "type": "function", "function": {"name": TOOL, "arguments": {"line": 0}}}
_CALLED = (*_ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL]})

PROBES: Mapping[str, dict[str, Any]] = {
    "asked": {"messages": _ASKED},
    "unasked": {"messages": _ASKED, "add_generation_prompt": False},
    "answered": {"messages": _ANSWERED, "add_generation_prompt": False},
    "again": {"messages": (*_ANSWERED, {"role": "user", "content": SECOND})},
    "system": {"messages": ({"role": "system", "content": SYSTEM}, *_ASKED)},
    "tools": {"messages": _ASKED, "tools": [_GAUGE]},
    "called": {"messages": _CALLED, "tools": [_GAUGE], "add_generation_prompt": False},
    "result": {
        "messages": (*_CALLED, {"role": "tool", "content": RESULT, "tool_call_id": "call00000"}),
        "tools": [_GAUGE],
    },
}
"""Conversations whose renderings tell what a template does (`weights.checkpoint.turns`)."""


_PARTS = (
    ("system", SYSTEM, "system messages"),
    ("tools", TOOL, "tools"),
    ("called", TOOL, "earlier calls of tools"),
    ("result", RESULT, "results of tools"),
)
"""Parts of a conversation: the probe that has it, its mark in the rendering, its name for people."""


def new_ends(rendered: Rendered, added: Collection[str], known: Collection[str]) -> list[str]:
    """The token that ends an answer in these renderings, if no file names it as an end.

    Args:
        added: Tokens that the tokenizer reads whole.
        known: Tokens that end an answer anyway.
    """
    tokens = _longest_first(added)
    for probe in ("answered", "again"):
        # After an answer in the middle a token may end only a part of the turn (gpt-oss), so the last one comes first.
        if group := _group(_after(rendered.get(probe), ANSWER), tokens):
            end = next((token for token in group if token in known), group[0])
            return [end] if end not in known and end not in _before_answer(rendered) else []
    return []


def warnings_of(rendered: Rendered, added: Collection[str]) -> list[str]:
    """Warnings for the person who imports the model: parts that the template does not write, and the consequence."""
    notes, used = [], set[str]()
    for probe, mark, words in _PARTS:
        text, before = rendered[probe], (rendered["tools"] or "") if probe == "called" else ""
        if probe in ("called", "result") and "tools" not in used:
            continue
        if text is None:
            notes.append(f"the chat template refuses {words}: so are requests and training rows with them")
        elif text.count(mark) <= before.count(mark):
            notes.append(f"the chat template leaves {words} out: the model never sees them")
        else:
            used.add(probe)
    if header := _lost_header(rendered):
        notes.append(
            f"the chat template ignores add_generation_prompt: a prompt ends without {header!r}, with which the "
            "model's turns begin, so that the model has to write it itself; mend the template and import again"
        )
    tail = _after(rendered["answered"], ANSWER).strip()
    if tail and not _group(tail, _longest_first(added)):
        notes.append(
            f"the chat template ends a turn with {tail[:_SHOWN]!r}, which does not begin with a token of its own: no "
            "engine stops there. Answers end with the end of text alone, or where a request's `stop` says; add the "
            "token to tokenizer and embedding, or choose a template whose end is one"
        )
    return notes


def _longest_first(tokens: Collection[str]) -> list[str]:
    return sorted((token for token in tokens if token.strip()), key=len, reverse=True)


def _before_answer(rendered: Rendered) -> str:
    """The text of the model's turn before its answer: it has no end of a turn."""
    before = (rendered.get("answered") or "").partition(ANSWER)[0].rpartition(QUESTION)[2]
    opened = (rendered.get("asked") or "").rpartition(QUESTION)[2]
    return before.removeprefix(os.path.commonprefix([before, opened]))


def _after(text: str | None, mark: str) -> str:
    return (text or "").rpartition(mark)[2] if mark in (text or "") else ""


def _group(tail: str, tokens: list[str]) -> list[str]:
    """The tokens side by side with which the tail begins, after white space."""
    group, rest = [], tail.lstrip()
    while (token := next((token for token in tokens if rest.startswith(token)), None)) is not None:
        group.append(token)
        rest = rest.removeprefix(token)
    return group


def _lost_header(rendered: Rendered) -> str:
    asked, unasked, answered = (rendered.get(name) for name in ("asked", "unasked", "answered"))
    if not asked or asked != unasked or not answered or ANSWER not in answered:
        return ""
    before = answered.partition(ANSWER)[0]
    return before.removeprefix(asked).strip()[:_SHOWN] if before.startswith(asked) else ""
