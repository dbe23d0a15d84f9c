"""Reads pairs of a preferred and a non-preferred output, in any of their shapes, as two conversations with one prompt.

train.data.formats chooses the shape; each function here reads the record of one, as it is left of all keys that the
shape does not have.
"""

from __future__ import annotations

import os.path
import re
from typing import Any, NamedTuple

from train.shapes.messages import read_messages, turn_role
from train.shapes.records import BadRecord, NoAnswer, Record, is_empty, kind_of

SIDES = ("chosen", "rejected")
OUTPUTS = ("preferred_output", "non_preferred_output")
# As Anthropic's and OpenAssistant's texts have the turns of a conversation.
_DIALOGUE = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \n]?")
_MESSAGES_AS_TEXT = re.compile(r'\s*(?:\{\s*"(?:messages|conversations|role)"|\[\s*\{\s*"(?:role|from)")')
_OF_A_PROMPT = ("system", "developer", "user", "human")


class Pair(NamedTuple):
    """Messages of the prompt, and of both outputs, the preferred one first."""

    prompt: list[Record]
    outputs: list[list[Record]]


def of_openai(record: Record) -> Pair:
    """{"input": {"messages"}, "preferred_output": [...], "non_preferred_output": [...]}."""
    given = record.get("input")
    if not isinstance(given, dict) or not isinstance(given.get("messages"), list):
        raise BadRecord("'input' must be an object with 'messages', a list")
    return _pair(given["messages"], [_turns(record.get(name), name) for name in OUTPUTS], OUTPUTS)


def of_prompt(prompt: Any, record: Record) -> Pair:
    """Two answers to the turns of a prompt: texts, turns or lists of messages. Raises BadRecord."""
    if not isinstance(prompt, list):
        raise BadRecord(f"the prompt is a {kind_of(prompt)}, expected a list of messages")
    return _pair(prompt, _sides(record), SIDES)


def of_conversations(record: Record) -> Pair:
    """Two whole conversations, of which the turns that both begin with are the prompt."""
    sides = _sides(record)
    shared = _shared(*sides)
    for name, side in zip(SIDES, sides, strict=True):
        if any(turn_role(turn) in _OF_A_PROMPT for turn in side[shared:]):
            raise BadRecord(f"the prompts differ: {name}[{shared}:] has more than what the assistant answers")
    return _pair(sides[0][:shared], [side[shared:] for side in sides], SIDES)


def of_texts(record: Record) -> Pair:
    """Two texts: whole conversations of "Human:" and "Assistant:", or what they both begin with is the prompt."""
    sides = [record.get(name) for name in SIDES]
    dialogues = [_dialogue(side) for side in sides]
    if all(dialogues):
        return of_conversations(dict(zip(SIDES, dialogues, strict=True)))
    for name, side in zip(SIDES, sides, strict=True):
        if is_empty(side):
            raise NoAnswer(f"{name!r} is empty")
        if not isinstance(side, str):
            raise BadRecord("has no prompt: nothing that both outputs answer")
        _refuse_messages_as_text(side, name)
    shared = os.path.commonprefix(sides)
    if any(side[len(shared) : len(shared) + 1].isalnum() for side in sides):
        shared = re.sub(r"\w+\Z", "", shared)  # no prompt ends within a word
    shared = shared.rstrip()
    prompt = [{"role": "user", "content": shared}] if shared else []
    return _pair(prompt, [[{"role": "assistant", "content": side[len(shared) :]}] for side in sides], SIDES)


def is_conversations(record: Record) -> bool:
    """Whether both sides are whole conversations. A list of messages as the prompt is only a repeat if they begin with
    it."""
    sides, prompt = [record.get(name) for name in SIDES], record.get("prompt")
    if not all(isinstance(side, list) and any(turn_role(one) in _OF_A_PROMPT for one in side) for side in sides):
        return False
    return not isinstance(prompt, list) or all(side[: len(prompt)] == prompt for side in sides)


def _shared(one: list[Any], other: list[Any]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _dialogue(text: Any) -> list[Record]:
    """The turns of a text that begins with "Human:"; none if it does not."""
    if not isinstance(text, str) or not text.lstrip().startswith("Human:"):
        return []
    parts = _DIALOGUE.split(text.strip())[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": roles[who], "content": said.strip()} for who, said in turns]


def _sides(record: Record) -> list[list[Any]]:
    sides = [record.get(name) for name in SIDES]
    if {isinstance(side, str) for side in sides if not is_empty(side)} == {True, False}:
        raise BadRecord("'chosen' and 'rejected' must be both texts or both lists of messages")
    return [_turns(side, name) for name, side in zip(SIDES, sides, strict=True)]


def _turns(output: Any, name: str) -> list[Any]:
    if is_empty(output):
        raise NoAnswer(f"{name!r} is empty")
    if isinstance(output, str):
        _refuse_messages_as_text(output, name)
        return [{"role": "assistant", "content": output}]
    if isinstance(output, dict):
        return [output]
    if not isinstance(output, list):
        raise BadRecord(f"{name!r} is a {kind_of(output)}, expected a text or a list of messages")
    return output


def _refuse_messages_as_text(side: str, name: str) -> None:
    """Raises BadRecord."""
    if _MESSAGES_AS_TEXT.match(side):
        raise BadRecord(
            f"{name!r} is the JSON text of messages, expected the list itself: jq -c '.{name} |= fromjson' FILE"
        )


def _pair(prompt: list[Record], outputs: list[list[Any]], names: tuple[str, ...]) -> Pair:
    if not prompt:
        raise BadRecord("has no prompt: nothing that both outputs answer")
    for name, output in zip(names, outputs, strict=True):
        for index, message in enumerate(read_messages(output, name)):
            if message["role"] not in ("assistant", "tool") or (index == 0 and message["role"] == "tool"):
                raise BadRecord(f"{name}[{index}] is from {message['role']!r}; expected 'assistant'")
    return Pair(prompt, outputs)
