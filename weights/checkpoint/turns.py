"""Detects from renderings of a few short conversations how a chat template writes their parts.

Pure. Renderings of PROBES map a probe's name to the rendered text, or to None if the template raised an error.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Set
from typing import Any

Rendered = Mapping[str, str | None]
SYSTEM, QUESTION, ANSWER = "Answer for the night shift.", "Which tray takes the seals?", "Blue seals go into tray four."
TOOL, RESULT = "read_gauge", "seventeen point two"
_SHOWN = 60
_ASKED: tuple[dict[str, Any], ...] = ({"role": "user", "content": QUESTION},)
_ANSWERED = (*_ASKED, {"role": "assistant", "content": ANSWER})
_FUNCTION = {"name": TOOL, "description": "Reads a gauge.", "parameters": {"type": "object"}}
_GAUGE = {"type": "function", "function": _FUNCTION}
_CALL = {"id": "call00000", "type": "function", "function": {"name": TOOL, "arguments": {"line": 0}}}
_RESULT = {"role": "tool", "content": RESULT, "tool_call_id": _CALL["id"]}
_CALLED = (*_ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL]})

PROBES: Mapping[str, dict[str, Any]] = {
    "asked": {"messages": _ASKED},
    "unasked": {"messages": _ASKED, "add_generation_prompt": False},
    "answered": {"messages": _ANSWERED, "add_generation_prompt": False},
    "again": {"messages": (*_ANSWERED, {"role": "user", "content": "And the belts?"})},
    "system": {"messages": ({"role": "system", "content": SYSTEM}, *_ASKED)},
    "tools": {"messages": _ASKED, "tools": [_GAUGE]},
    "called": {"messages": _CALLED, "tools": [_GAUGE], "add_generation_prompt": False},
    "result": {"messages": (*_CALLED, _RESULT), "tools": [_GAUGE]},
}
"""The conversations to render, as arguments of `apply_chat_template`."""

_PARTS = (
    ("system", SYSTEM, "system messages"),
    ("tools", TOOL, "tools"),
    ("called", TOOL, "earlier tool calls"),
    ("result", RESULT, "tool results"),
)
"""Parts of a conversation: (probe that contains it, its mark in the rendering, its name for people)."""


def new_end(rendered: Rendered, added: Collection[str], known: Set[str]) -> str:
    """Return the token that ends an answer in these renderings, "" if there is none or a file lists the token already.

    Args:
        added: The tokenizer's added tokens, which it never splits.
        known: Tokens that end an answer according to a file.
    """
    # The token that ends a turn does not occur in the model's turn before the answer.
    before = (rendered["answered"] or "").partition(ANSWER)[0].rpartition(QUESTION)[2]
    before = before.removeprefix(os.path.commonprefix([before, (rendered["asked"] or "").rpartition(QUESTION)[2]]))
    for probe in ("answered", "again"):
        # A token after an earlier answer may end only a part of the turn (gpt-oss), so try the last answer first.
        if group := _group((rendered[probe] or "").partition(ANSWER)[2], added):
            return group[0] if known.isdisjoint(group) and group[0] not in before else ""
    return ""


def warnings_of(rendered: Rendered, added: Collection[str]) -> list[str]:
    """Return warnings for the importer: parts of a conversation that the template omits, and the consequences."""
    notes, used = [], set[str]()
    for probe, mark, words in _PARTS:
        text, before = rendered[probe], (rendered["tools"] or "") if probe == "called" else ""
        if probe in ("called", "result") and "tools" not in used:
            continue
        if text is None:
            notes.append(f"the chat template refuses {words}: requests and training rows with them fail")
        elif text.count(mark) <= before.count(mark):
            notes.append(f"the chat template leaves {words} out: the model never sees them")
        else:
            used.add(probe)
    asked, (opening, answer, tail) = rendered["asked"], (rendered["answered"] or "").partition(ANSWER)
    header = opening.removeprefix(asked).strip()[:_SHOWN] if asked and answer and opening.startswith(asked) else ""
    if header and asked == rendered["unasked"]:
        notes.append(
            f"the chat template ignores add_generation_prompt: a prompt ends without {header!r}, the "
            "beginning of the model's turns, so the model has to write it itself; fix the template and import again"
        )
    if (tail := tail.strip()) and not _group(tail, added):
        notes.append(
            f"the chat template ends a turn with {tail[:_SHOWN]!r}, which does not begin with one token: no engine "
            "stops there. Answers end only with the end-of-text token, or at a request's `stop`; add the token to "
            "tokenizer and embedding, or choose a template that ends turns with a token"
        )
    return notes


def _group(tail: str, added: Collection[str]) -> list[str]:
    """Return the adjacent tokens at the beginning of the tail, after white space."""
    tokens = sorted((token for token in added if token.strip()), key=len, reverse=True)
    group, rest = [], tail.lstrip()
    while (token := next((token for token in tokens if rest.startswith(token)), None)) is not None:
        group.append(token)
        rest = rest.removeprefix(token)
    return group
