"""Recognises the shapes of fine-tuning data by their keys and converts them to OpenAI's chat format. Pure.

The table SHAPES has each shape's keys, the function that reads a row of it, and the keys that make a row unusable.
Other keys are ignored, and reports name these (train.data.records.Fields).
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import orjson

from train.data.messages import (
    MEDIA_REFUSES,
    drop_padded_arguments,
    is_off,
    last_role,
    read_messages,
    read_tools,
    role_of,
    untrained,
    with_system,
)
from train.data.records import BadRecord, Fields, NoAnswer, Record, Refuses, has_value, kind_of, listed

SIDES = ("chosen", "rejected")
OUTPUTS = ("preferred_output", "non_preferred_output")
# Texts that begin a turn in Anthropic's and OpenAssistant's data.
_DIALOGUE = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \n]?")
_MESSAGES_AS_TEXT = re.compile(r'\s*(?:\{\s*"(?:messages|conversations|role)"|\[\s*\{\s*"(?:role|from)")')
_MORE = ("input", "context")
_QUESTION = ("prompt", "question", "query", "instruction")
_CONVERSATION = ("conversations", "conversation")
MAX_ITEM_BYTES = 1 << 20
"""The largest item as JSON: a grading process holds 64 samples at once, each with its item."""
_THOUGHT = ("reasoning_content", "thinking")
"""Columns with the thought before an answer; in public data, `reasoning` is a switch, "on" or "off"."""

_OF_THE_QUESTION = "choices options opa passage passages article paragraph document documents evidence premise".split()
"""Columns of public data without which a question cannot be answered."""
_MARKS = frozenset(
    "good bad chosen rejected accept accepted reject desirable undesirable preferred like dislike true false yes no "
    "upvote downvote thumbs_up thumbs_down up down +1 -1 0 1".split()
)


def _is_mark(value: Any) -> bool:
    """Return whether a label marks an answer as good or bad; other labels name a class of texts."""
    if isinstance(value, str):
        return value.strip().lower() in _MARKS
    return isinstance(value, (bool, int, float)) and value in (-1, 0, 1)


def _is_set(value: Any) -> bool:
    return has_value(value) and (not isinstance(value, dict) or any(map(has_value, value.values())))


MARKS = ("label", "kto_tag")
"""Keys of the mark that the method kto reads; keys of other marks are refused by name."""
_UNPAIRED = (
    "a mark of good and bad answers without pairs: for the method kto name it 'label', true or false; for supervised "
    "keep the good answers without the key; for dpo make pairs: prompt, chosen, rejected"
)
_ONE_SIDE = "an answer to avoid, which only pairs can train: prompt, chosen and rejected, with the method dpo"
REFUSES: Refuses = {
    **MEDIA_REFUSES,
    "chat_template_kwargs": (
        _is_set,
        "arguments of a row do not reach the chat template; write them into the system message",
    ),
    **{key: (has_value, "write them as 'tools'") for key in ("tool_defs", "available_tools")},
    **{key: (has_value, "write the weight 0 on messages that are not trained") for key in ("loss_mask", "masked")},
}
_CHAT_REFUSES: Refuses = {
    **REFUSES,
    **{
        key: (_is_mark, _UNPAIRED)
        for key in "label kto_tag kto_label is_chosen is_preferred is_good desirable preference feedback chosen".split()
    },
    **{key: (_is_set, _ONE_SIDE) for key in ("rejected", "rejected_response", "rejected_messages", OUTPUTS[1])},
    **{
        key: (is_off, "nothing of the row would be trained; leave out the row")
        for key in ("weight", "train", "loss_weight", "sample_weight")
    },
}
_QUESTION_REFUSES: Refuses = {
    **_CHAT_REFUSES,
    **{
        key: (has_value, "it belongs to the question; write it into the question's text, or as 'context'")
        for key in _OF_THE_QUESTION
    },
}


class Example(NamedTuple):
    """A row ready for training.

    record: {"messages", "tools"?} of a chat, {"text"} of a document, {"sequences": [chat, chat]} of a pair,
    {"sequences": [chat], "label"} of a marked answer, or {"messages", "tools"?, "item"} of a prompt. left_out: names of
    ignored keys, also in turns and calls: `source`, `messages[].id`."""

    shape: str
    record: Record
    left_out: set[str]


@dataclass(frozen=True)
class Shape:
    """A shape in the table SHAPES.

    name: its name in reports and methods; several shapes may share one. needs: groups of keys; one key of each group
    must have a value. has: keys that must exist, even without a value. refuses: keys that make a row unusable if
    unread. marked: the row must mark the answer as good or bad. when: a further condition.
    """

    name: str
    needs: tuple[tuple[str, ...], ...]
    read: Callable[[Fields], Record]
    refuses: Refuses = field(default_factory=lambda: _CHAT_REFUSES)
    has: tuple[str, ...] = ()
    marked: bool = False
    when: Callable[[Record], bool] = lambda record: True

    def fits(self, record: Record, has: Callable[[str], bool]) -> bool:
        """Return whether a record has this shape. has: tells whether the record has a key."""
        if self.marked and not any(_is_mark(record.get(key)) for key in MARKS):
            return False
        has_all = all(key in record for key in self.has) and all(any(map(has, group)) for group in self.needs)
        return has_all and self.when(record)


def convert(record: Any) -> Example:
    """Convert a row of any shape in SHAPES to an Example. Raises BadRecord."""
    shape = shape_of(record)
    with Fields(record, set(), refuses=shape.refuses) as fields:
        example = Example(shape.name, shape.read(fields), fields.left_out)
    return example


def shape_of(record: Any) -> Shape:
    """Return a record's shape by its keys. Raises BadRecord if no shape fits the record."""
    if not isinstance(record, dict):
        raise BadRecord(f"is a {kind_of(record)}, expected a JSON object")
    # First match keys with a value, then also empty keys: then reading the row reports the empty key.
    for has in (lambda key: has_value(record.get(key)), record.__contains__):
        for shape in SHAPES:
            if shape.fits(record, has):
                return shape
    raise BadRecord(_no_shape(record))


def _no_shape(record: Record) -> str:
    keys = sorted(map(str, record))
    for key in keys:
        first = record[key][0] if isinstance(record[key], list) and record[key] else None
        if isinstance(first, dict) and any(row.fits(first, first.get) for row in SHAPES):
            return f"is one object with the examples in {key!r}: jq -c '.{key}[]' FILE > train.jsonl"
    return (
        f"has the keys {keys[:8]}; expected 'messages' (OpenAI chat), 'conversations' (ShareGPT), 'instruction' and "
        "'output' (alpaca), 'prompt' and 'completion', 'question' and 'answer', 'text' (a document), or for pairs "
        "'chosen' and 'rejected'"
    )


# -- chats -------------------------------------------------------------------------------------------------------------


def _chat(fields: Fields, turns: Any, name: str = "messages") -> Record:
    messages = read_messages(with_system(turns, fields), fields.left_out, name)
    if messages[-1]["role"] != "assistant":
        raise BadRecord(f"the last message is from {messages[-1]['role']!r}; expected 'assistant'")
    return _checked(messages, fields)


def _checked(messages: list[Record], request: Fields) -> Record:
    """Return the chat record of checked messages, with the tools of their request. Raises BadRecord."""
    if all(message.get("weight") == 0 for message in messages if message["role"] == "assistant"):
        raise BadRecord("every assistant message has weight 0 (or train false), so there is nothing to learn")
    tools = read_tools(request)
    drop_padded_arguments(messages, tools.get("tools", []))
    return {"messages": messages, **tools}


def _conversation(fields: Fields, names: tuple[str, ...]) -> Record:
    return _chat(fields, fields.take(*names), fields.name(*names))


def _answered(fields: Fields, question: tuple[str, ...], answer: tuple[str, ...]) -> Record:
    value, name = fields.take(*answer), fields.name(*answer)
    if not has_value(value):
        raise NoAnswer(f"{name!r} is empty")
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(turn, dict) for turn in value)):
        raise BadRecord(f"{name!r} is a {kind_of(value)}, expected a string or a list of messages")
    turns = _question_turns(fields, question)
    if last_role(turns) == "assistant":
        raise BadRecord("the prompt ends with a message from 'assistant'; expected the turn to answer")
    if isinstance(value, str):
        value = [{"role": "assistant", "content": value, "reasoning_content": fields.text(*_THOUGHT)}]
    return _chat(fields, [*turns, *value])


def _called(fields: Fields, question: tuple[str, ...]) -> Record:
    """Read a row whose answers are calls, as a list or as JSON text."""
    answer = {"role": "assistant", "tool_calls": fields.take("answers")}
    return _chat(fields, [*_question_turns(fields, question), answer])


def _question_turns(fields: Fields, question: tuple[str, ...]) -> list[Record]:
    """Return the turns up to the question, from a list of messages or from a text that another field may continue."""
    prompt, history = fields.take(*question), list(_history(fields))
    further = tuple(key for key in _MORE if key not in question)
    more = fields.take(*further)
    if isinstance(more, list) and not has_value(prompt):
        prompt, more = more, None
    if isinstance(prompt, list):
        if has_value(more):
            raise BadRecord("has both a list of messages and a text as the prompt; expected one of the two")
        return [*history, *map(untrained, prompt)]
    for value, names in ((prompt, question), (more, further)):
        if has_value(value) and not isinstance(value, str):
            raise BadRecord(f"{fields.name(*names)!r} must be a text or a list of messages, and is a {kind_of(value)}")
    text = "\n".join(part for part in (prompt, more) if part)
    if not text.strip():
        keys = [key for key in (*question, *further) if key in fields.record]
        raise BadRecord(f"has no prompt: no value in {' and '.join(map(repr, keys))}")
    return [*history, {"role": "user", "content": text}]


def _history(fields: Fields) -> Iterator[Record]:
    for turn in listed(fields.take("history") or None):
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(side, str) for side in turn)):
            raise BadRecord("'history' must be a list of [question, answer] pairs")
        yield {"role": "user", "content": turn[0]}
        yield {"role": "assistant", "content": turn[1]}


# -- other shapes ------------------------------------------------------------------------------------------------------


def _document(fields: Fields) -> Record:
    if not isinstance(text := fields.take("text"), str):
        raise BadRecord(f"'text' is a {kind_of(text)}, expected the text of a document")
    if not text.strip():
        raise NoAnswer("'text' is empty")
    return {"text": text}


def _prompt(fields: Fields) -> Record:
    """Read a conversation that the model answers in training; all other fields form the item for graders."""
    messages = read_messages(with_system(fields.take("messages"), fields), fields.left_out)
    if any("weight" in message for message in messages):
        raise BadRecord("has a message with a 'weight'; no message of a prompt is trained")
    tools = read_tools(fields)
    fields.refuse()
    item = {name: value for name, value in fields.record.items() if name not in ("messages", "tools", "functions")}
    fields.unread.clear()
    if (size := len(orjson.dumps({**item, "messages": messages}))) > MAX_ITEM_BYTES:
        raise BadRecord(f"is {size} bytes long; the limit for an item that graders read is {MAX_ITEM_BYTES}")
    return {"messages": messages, **tools, "item": item}


def _marked(fields: Fields, read: Callable[[Fields], Record]) -> Record:
    """Read a chat with a mark for the answer to its last question, the only answer that is trained."""
    mark = fields.take(*MARKS)
    if not isinstance(mark, (bool, int, float)) or mark not in (0, 1):
        raise BadRecord(f"{fields.name(*MARKS)!r} is {mark!r}; expected true for a good answer, false for a bad one")
    chat = read(fields)
    messages = chat["messages"]
    index = max((n for n, message in enumerate(messages) if message["role"] not in ("assistant", "tool")), default=-1)
    if not _train_from(messages, index + 1):
        raise BadRecord("the answer to the last question has weight 0, so there is nothing to learn")
    return {"sequences": [chat], "label": bool(mark)}


def _train_from(messages: list[Record], first: int) -> bool:
    """Train only answers from this message on whose weight is not 0; return whether any answer is trained."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            message["weight"] = int(index >= first and message.get("weight") != 0)
    return any(message.get("weight") for message in messages)


# -- pairs -------------------------------------------------------------------------------------------------------------


def _openai_preference(fields: Fields) -> Record:
    """{"input": {"messages"}, "preferred_output": [...], "non_preferred_output": [...]}."""
    inputs = fields.take("input")
    if not isinstance(inputs, dict):
        raise BadRecord(f"'input' is a {kind_of(inputs)}, expected an object with 'messages'")
    with Fields(inputs, fields.left_out, "input") as request:
        prompt = request.take("messages")
        return _preference(fields, prompt, "input.messages", [_output(fields, name) for name in OUTPUTS], request)


def _whole(fields: Fields, sides: list[list[Any]]) -> Record:
    """Read two whole conversations; the turns that both share at the beginning are the prompt."""
    pairs = enumerate(zip(*sides, strict=False))
    shared = next((n for n, (a, b) in pairs if a != b), min(map(len, sides)))
    for name, side in zip(SIDES, sides, strict=True):
        if any(map(_is_prompt, side[shared:])):
            raise BadRecord(f"the prompts differ: {name}[{shared}:] has turns of the system or the user")
    return _preference(fields, sides[0][:shared], SIDES[0], [side[shared:] for side in sides])


def _two_texts(fields: Fields) -> Record:
    """Read two texts; the text that both share at the beginning is the prompt."""
    _sides(fields)
    sides = [fields.record[name] for name in SIDES]
    if not all(isinstance(side, str) for side in sides):
        raise BadRecord("has no prompt: nothing that both outputs answer")
    shared = os.path.commonprefix(sides)
    if any(side[len(shared) : len(shared) + 1].isalnum() for side in sides):
        shared = re.sub(r"\w+\Z", "", shared)  # cut the prompt at a word boundary
    shared = shared.rstrip()
    prompt = [{"role": "user", "content": shared}] if shared else []
    answers = [[{"role": "assistant", "content": side[len(shared) :]}] for side in sides]
    return _preference(fields, prompt, "prompt", answers)


def _are_conversations(record: Record) -> bool:
    """Whether both sides are whole conversations, and begin with the prompt if the prompt is a list of messages."""
    sides, prompt = [_turns_of(record.get(name)) for name in SIDES], record.get("prompt")
    if not all(any(map(_is_prompt, side)) for side in sides):
        return False
    return not isinstance(prompt, list) or all(side[: len(prompt)] == prompt for side in sides)


def _is_prompt(turn: Any) -> bool:
    return role_of(turn) in ("system", "user")


def _turns_of(side: Any) -> list[Any]:
    """Return the turns of an output. A text is the answer, or contains all turns if it begins with "Human:"."""
    if not isinstance(side, str):
        return listed(side)
    if not side.lstrip().startswith("Human:"):
        return [{"role": "assistant", "content": side}]
    parts = _DIALOGUE.split(side.strip())[1:]
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": "user" if who == "Human" else "assistant", "content": words.strip()} for who, words in turns]


def _sides(fields: Fields) -> list[list[Any]]:
    return [_output(fields, name) for name in SIDES]


def _output(fields: Fields, name: str) -> list[Any]:
    """Return the turns of one side of a pair."""
    output = fields.take(name)
    if not has_value(output):
        raise NoAnswer(f"{name!r} is empty")
    if isinstance(output, str):
        if _MESSAGES_AS_TEXT.match(output):
            raise BadRecord(
                f"{name!r} is the JSON text of messages, expected the list itself: jq -c '.{name} |= fromjson' FILE"
            )
    elif not isinstance(output, (dict, list)):
        raise BadRecord(f"{name!r} is a {kind_of(output)}, expected a text or a list of messages")
    return _turns_of(output)


def _preference(
    fields: Fields, prompt: Any, name: str, outputs: list[list[Any]], request: Fields | None = None
) -> Record:
    """Return two chats that train only their outputs, the preferred chat first. request: the object with the tools;
    None: the row."""
    if not prompt:
        raise BadRecord("has no prompt: nothing that both outputs answer")
    before = read_messages(with_system(prompt, fields), fields.left_out, name)
    if before[-1]["role"] == "assistant":
        raise BadRecord("the prompt ends with a message from 'assistant'; expected the turn to answer")
    n_calls = sum(len(message.get("tool_calls", ())) for message in before)
    after = []
    for side, output in zip(SIDES if request is None else OUTPUTS, outputs, strict=True):
        after.append(read_messages(output, fields.left_out, side, n_calls))
        for index, message in enumerate(after[-1]):
            if message["role"] not in ("assistant", "tool") or (index == 0 and message["role"] == "tool"):
                raise BadRecord(f"{side}[{index}] is from {message['role']!r}; expected 'assistant'")
    if after[0] == after[1]:
        raise BadRecord("both outputs are the same, so there is nothing to prefer")
    chats = [[*map(dict, before), *output] for output in after]
    for chat in chats:
        _train_from(chat, len(before))
    return {"sequences": [_checked(chat, request or fields) for chat in chats]}


# -- the table ---------------------------------------------------------------------------------------------------------


def _single(name: str, question: tuple[str, ...], answer: tuple[str, ...], **more: Any) -> Shape:
    read = partial(_answered, question=question, answer=answer)
    return Shape(name, (question, answer), read, _QUESTION_REFUSES, **more)


def _pair(read: Callable[[Fields], Record], *needs: tuple[str, ...], **more: Any) -> Shape:
    return Shape("preference", (SIDES, *needs), read, REFUSES, has=SIDES, **more)


TEXT = "text"
"""Shape of a document, all of which is trained, without a chat template."""
_CALLED = ("query", "question", "instruction")
_IN_TURNS = (*_CONVERSATION, "messages")
_ASKED = (*_QUESTION, "input")
_CONVERSATIONS = (
    Shape("chat", (("messages",),), partial(_conversation, names=("messages",))),
    Shape("sharegpt", (_CONVERSATION,), partial(_conversation, names=_CONVERSATION)),
    Shape("query_calls", (_CALLED, ("answers",), ("tools",)), partial(_called, question=_CALLED)),
    _single("alpaca", ("instruction",), ("output", "response")),
    _single("prompt_completion", ("prompt",), ("completion", "response")),
    _single("question_answer", ("question", "query"), ("answer", "response")),
    _single("input_output", ("input",), ("output",), when=lambda record: "instruction" not in record),
)
SHAPES: tuple[Shape, ...] = (
    Shape("preference", (("input",), OUTPUTS), _openai_preference, REFUSES, has=OUTPUTS),
    # These are TRL's implicit prompts and Anthropic's dialogues; answers to a prompt (TRL, orca, alpaca) or to a
    # conversation (ShareGPT); and texts with a common beginning.
    _pair(lambda fields: _whole(fields, _sides(fields)), when=_are_conversations),
    _pair(lambda fields: _preference(fields, _question_turns(fields, _QUESTION), "prompt", _sides(fields)), _ASKED),
    _pair(
        lambda fields: _preference(fields, fields.take(*_IN_TURNS), fields.name(*_IN_TURNS), _sides(fields)), _IN_TURNS
    ),
    _pair(_two_texts),
    Shape(
        "prompt", (("messages",),), _prompt, REFUSES, when=lambda record: last_role(record.get("messages")) == "user"
    ),
    *(
        Shape("unpaired", row.needs, partial(_marked, read=row.read), row.refuses, marked=True, when=row.when)
        for row in _CONVERSATIONS
    ),
    *_CONVERSATIONS,
    Shape(TEXT, (("text",),), _document),
)
