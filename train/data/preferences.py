"""Reads the shapes of preference data: two outputs for one prompt, the preferred one first."""

from __future__ import annotations

import os.path
import re
from typing import Any

from train.data.messages import read_messages, role_of, with_system
from train.data.records import BadRecord, Fields, NoAnswer, Record, is_empty, kind_of

SIDES = ("chosen", "rejected")
OUTPUTS = ("preferred_output", "non_preferred_output")
# As Anthropic's and OpenAssistant's texts have the turns of a conversation.
_DIALOGUE = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \n]?")
_MESSAGES_AS_TEXT = re.compile(r'\s*(?:\{\s*"(?:messages|conversations|role)"|\[\s*\{\s*"(?:role|from)")')

Pair = tuple[list[Record], list[list[Record]]]
"""Messages of the prompt, and of both outputs, the preferred one first."""


def of_openai(fields: Fields, request: Fields) -> Pair:
    """{"input": {"messages"}, "preferred_output": [...], "non_preferred_output": [...]}."""
    prompt = request.take("messages")
    if not isinstance(prompt, list):
        raise BadRecord("'input' must be an object with 'messages', a list")
    return _pair(fields, prompt, "input.messages", [_turns(fields.take(name), name) for name in OUTPUTS], OUTPUTS)


def of_prompt(fields: Fields, prompt: Any, name: str) -> Pair:
    """Two answers to the turns of a prompt: texts, turns or lists of messages. Raises BadRecord."""
    if not isinstance(prompt, list):
        raise BadRecord(f"the prompt is a {kind_of(prompt)}, expected a list of messages")
    return _pair(fields, prompt, name, _sides(fields), SIDES)


def of_conversations(fields: Fields) -> Pair:
    """Two whole conversations, of which the turns that both begin with are the prompt."""
    return _of_whole(fields, _sides(fields))


def of_texts(fields: Fields) -> Pair:
    """Two texts: whole conversations of "Human:" and "Assistant:", or what they both begin with is the prompt."""
    sides = [fields.take(name) for name in SIDES]
    dialogues = [_dialogue(side) for side in sides]
    if all(dialogues):
        return _of_whole(fields, dialogues)
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
    outputs = [[{"role": "assistant", "content": side[len(shared) :]}] for side in sides]
    return _pair(fields, prompt, "prompt", outputs, SIDES)


def is_conversations(record: Record) -> bool:
    """Whether both sides are whole conversations. A list of messages as the prompt is only a repeat if they begin with
    it."""
    sides, prompt = [record.get(name) for name in SIDES], record.get("prompt")
    if not all(isinstance(side, list) and any(map(_is_prompt, side)) for side in sides):
        return False
    return not isinstance(prompt, list) or all(side[: len(prompt)] == prompt for side in sides)


def _is_prompt(turn: Any) -> bool:
    return role_of(turn) in ("system", "user")


def _of_whole(fields: Fields, sides: list[list[Any]]) -> Pair:
    one, other = sides
    shared = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(map(len, sides)))
    for name, side in zip(SIDES, sides, strict=True):
        if any(map(_is_prompt, side[shared:])):
            raise BadRecord(f"the prompts differ: {name}[{shared}:] has more than what the assistant answers")
    return _pair(fields, sides[0][:shared], SIDES[0], [side[shared:] for side in sides], SIDES)


def _dialogue(text: Any) -> list[Record]:
    """The turns of a text that begins with "Human:"; none if it does not."""
    if not isinstance(text, str) or not text.lstrip().startswith("Human:"):
        return []
    parts = _DIALOGUE.split(text.strip())[1:]
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": "user" if who == "Human" else "assistant", "content": words.strip()} for who, words in turns]


def _sides(fields: Fields) -> list[list[Any]]:
    sides = [fields.take(name) for name in SIDES]
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


def _pair(fields: Fields, prompt: list[Any], name: str, outputs: list[list[Any]], names: tuple[str, ...]) -> Pair:
    if not prompt:
        raise BadRecord("has no prompt: nothing that both outputs answer")
    before = read_messages(with_system(prompt, fields), fields.left, name)
    if before[-1]["role"] == "assistant":
        raise BadRecord("the prompt ends with a message from 'assistant'; expected the turn that is answered")
    n_calls = sum(len(message.get("tool_calls", ())) for message in before)
    after = []
    for side, output in zip(names, outputs, strict=True):
        after.append(read_messages(output, fields.left, side, n_calls))
        for index, message in enumerate(after[-1]):
            if message["role"] not in ("assistant", "tool") or (index == 0 and message["role"] == "tool"):
                raise BadRecord(f"{side}[{index}] is from {message['role']!r}; expected 'assistant'")
    if after[0] == after[1]:
        raise BadRecord("both outputs are the same, so there is nothing to prefer")
    return before, after
