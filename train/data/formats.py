"""Recognises the shapes of fine-tuning data by their keys and converts them to OpenAI's chat format. Pure.

SHAPES is the table: which keys choose a shape, which are read of it, and which make a record unusable. A converter gets
the keys that its shape reads and no others; the rest is left out, and `left_out` names it for reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson

from train.shapes import preferences
from train.shapes.messages import (
    MEDIA_REFUSES,
    SYSTEM,
    Refusals,
    drop_padded_arguments,
    ends_with_user,
    has_value,
    is_off,
    last_role,
    left_out_of_turns,
    listed,
    read_messages,
    read_tools,
    refuse,
    untrained,
    with_system,
)
from train.shapes.preferences import OUTPUTS, SIDES, Pair
from train.shapes.records import BadRecord, NoAnswer, Record, is_empty, kind_of, one_of

_REQUEST = frozenset((*SYSTEM, "tools", "functions", "parallel_tool_calls"))
_MORE = ("input", "context")
_QUESTION = ("prompt", "question", "query", "instruction")
_CONVERSATION = ("conversations", "conversation")
_INPUT_READS = frozenset(("messages", "tools", "functions", "parallel_tool_calls"))
_ASKED = _REQUEST | {*_MORE, "history"}
MAX_ITEM_BYTES = 1 << 20
"""Of it as JSON: whoever grades has 64 samples at once, each with its item."""
_THOUGHT = ("reasoning_content", "thinking")
"""Columns with the thought before an answer; `reasoning` is one that says "on" or "off" in public data."""

_OF_THE_QUESTION = "choices options opa passage passages article paragraph document documents evidence premise".split()
"""Columns that public data has next to a question, which nobody can answer without them."""
_MARKS = frozenset(
    "good bad chosen rejected accept accepted reject desirable undesirable preferred like dislike true false yes no "
    "upvote downvote thumbs_up thumbs_down up down +1 -1 0 1".split()
)


def _is_mark(value: Any) -> bool:
    """Whether a label tells good answers from bad ones; others name a class of texts."""
    if isinstance(value, str):
        return value.strip().lower() in _MARKS
    return isinstance(value, (bool, int, float)) and value in (-1, 0, 1)


def _is_set(value: Any) -> bool:
    return has_value(value) and not (isinstance(value, dict) and all(map(is_empty, value.values())))


MARKS = ("label", "kto_tag")
"""Keys with the mark of an answer that the method kto reads; others are refused by name."""
_UNPAIRED = (
    "a mark of good and bad answers without pairs: for the method kto name it 'label', true or false; for supervised "
    "keep the good answers without the key; for dpo make pairs: prompt, chosen, rejected"
)
_ONE_SIDE = "an answer to avoid, which only pairs can train: prompt, chosen and rejected, with the method dpo"
REFUSES: Refusals = {
    **MEDIA_REFUSES,
    "chat_template_kwargs": (
        _is_set,
        "arguments of a row do not reach the chat template; write them into the system message",
    ),
    **{key: (has_value, "write them as 'tools'") for key in ("tool_defs", "available_tools")},
    **{key: (has_value, "write the weight 0 on messages that are not trained") for key in ("loss_mask", "masked")},
}
_CHAT_REFUSES: Refusals = {
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
_QUESTION_REFUSES: Refusals = {
    **_CHAT_REFUSES,
    **{
        key: (has_value, "it belongs to the question; write it into the question's text, or as 'context'")
        for key in _OF_THE_QUESTION
    },
}


@dataclass(frozen=True)
class Shape:
    """name: in reports and for methods; several rows of the table may share one. has: keys that have to be there,
    whatever is in them. needs: of each of these groups one key has to have a value. convert: the turns of a
    conversation, or a Pair of them. reads: further keys that `convert` and the checks get. refuses: keys that make a
    record unusable. marked: a mark of the answer has to be there. when: what else chooses the shape."""

    name: str
    needs: tuple[tuple[str, ...], ...]
    convert: Callable[[Record], Any]
    reads: frozenset[str] = _REQUEST
    refuses: Refusals = field(default_factory=lambda: _CHAT_REFUSES)
    has: tuple[str, ...] = ()
    marked: bool = False
    when: Callable[[Record], bool] = lambda record: True
    keys: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", self.reads.union(*self.needs))

    def fits(self, record: Record) -> bool:
        return self._has(record, lambda key: has_value(record.get(key))) and self.when(record)

    def is_meant(self, record: Record) -> bool:
        """Whether a record has the keys, whatever is in them."""
        return self._has(record, record.__contains__)

    def _has(self, record: Record, has: Callable[[str], bool]) -> bool:
        if self.marked and not any(_is_mark(record.get(key)) for key in MARKS):
            return False
        return all(key in record for key in self.has) and all(any(map(has, group)) for group in self.needs)


def shape_of(record: Any) -> str:
    """Name of a record's shape, from its keys. Raises BadRecord when it has none we know."""
    return _shape(record).name


def to_chat(record: Record, shape: str = "chat") -> Record:
    """`record` of shape `shape` as {"messages": [...], "tools"?: [...]}, checked; a document as {"text": ...}. Raises
    BadRecord."""
    row, given = _read(record)
    if row.name == TEXT:
        return row.convert(given)
    if row.marked:
        refuse(record, _CHAT_REFUSES)
    if "preference" in (shape, row.name):
        raise BadRecord(f"has the shape {shape!r}, which is not a conversation")
    return _chat(row, given)


def to_pair(record: Record) -> list[Record]:
    """[with the preferred output, with the other] as checked chats, of which only the output is trained. Raises
    BadRecord."""
    row, given = _read(record)
    pair: Pair = row.convert(given)
    request = given["input"] if isinstance(given.get("input"), dict) else given
    prompt = with_system(pair.prompt, given)
    first = len(read_messages(prompt))
    chats = [_checked([*prompt, *output], request) for output in pair.outputs]
    if chats[0]["messages"] == chats[1]["messages"]:
        raise BadRecord("both outputs are the same, so there is nothing to prefer")
    for chat in chats:
        if (last := chat["messages"][first - 1])["role"] == "assistant":
            raise BadRecord(f"the prompt ends with a message from {last['role']!r}; expected the turn that is answered")
        for index, message in enumerate(chat["messages"]):
            if message["role"] == "assistant":
                message["weight"] = int(index >= first and message.get("weight") != 0)
    return chats


def to_marked(record: Record) -> tuple[Record, bool]:
    """A checked chat of which only the answer to its last question is trained, and whether that answer is a good one.
    Raises BadRecord."""
    row, given = _read(record)
    mark = one_of(given, MARKS)
    if not isinstance(mark, (bool, int, float)) or mark not in (0, 1):
        key = next(key for key in MARKS if record.get(key) is not None)
        raise BadRecord(f"{key!r} is {mark!r}; expected true for a good answer, false for a bad one")
    chat = _chat(row, given)
    messages = chat["messages"]
    asked = max((n for n, message in enumerate(messages) if message["role"] not in ("assistant", "tool")), default=-1)
    answers = [(n, message) for n, message in enumerate(messages) if message["role"] == "assistant"]
    for index, message in answers:
        message["weight"] = int(index > asked and message.get("weight") != 0)
    if not any(message["weight"] for _, message in answers):
        raise BadRecord("the answer to the last question has weight 0, so there is nothing to learn")
    return chat, bool(mark)


def to_prompt(record: Record) -> Record:
    """A record of reinforcement tuning as {"messages", "tools"?, "item"}: a checked conversation that ends with the
    user, and all further fields as `item`, which a grader sees with the messages. Raises BadRecord."""
    refuse(record, REFUSES)
    messages = read_messages(with_system(record.get("messages"), record))
    if messages[-1]["role"] != "user":
        raise BadRecord(
            f"the last message is from {messages[-1]['role']!r}; expected 'user': the model answers while it trains, "
            "and what its answer is compared with belongs in fields next to 'messages'"
        )
    if any("weight" in message for message in messages):
        raise BadRecord("has a message with a 'weight'; nothing of a prompt is trained")
    item = {name: value for name, value in record.items() if name not in _INPUT_READS}
    if (size := len(orjson.dumps({**item, "messages": messages}))) > MAX_ITEM_BYTES:
        raise BadRecord(f"is {size} bytes long; the limit for what a grader sees is {MAX_ITEM_BYTES}")
    return {"messages": messages, **read_tools(record), "item": item}


def left_out(record: Record, shape: str) -> set[str]:
    """Names of the keys of a record that are not read, of its turns and calls too: `source`, `messages[].id`. All
    further fields of a prompt are its item."""
    row, names = _shape(record), set[str]()
    unread = ("parallel_tool_calls",) if shape == "prompt" else record.keys() - row.keys
    names |= {key for key in unread if has_value(record.get(key))}
    for key in row.keys & record.keys():
        value = record[key]
        if key == "input" and isinstance(value, dict):
            names |= {f"input.{inner}" for inner in value.keys() - _INPUT_READS if has_value(value[inner])}
            names.update(left_out_of_turns(value.get("messages"), "input.messages"))
        elif key not in _REQUEST:
            names.update(left_out_of_turns(listed(value), key))
    return names


def _read(record: Record) -> tuple[Shape, Record]:
    """The shape of a record, and what the shape reads of it. Raises BadRecord for what it refuses."""
    row = _shape(record)
    refuse(record, row.refuses)
    return row, {key: value for key, value in record.items() if key in row.keys}


def _shape(record: Any) -> Shape:
    if not isinstance(record, dict):
        raise BadRecord(f"is a {kind_of(record)}, expected a JSON object")
    for chosen in (Shape.fits, Shape.is_meant):
        for row in SHAPES:
            if chosen(row, record):
                return row
    raise BadRecord(_no_shape(record))


def _no_shape(record: Record) -> str:
    keys = sorted(map(str, record))
    for key in keys:
        first = record[key][0] if isinstance(record[key], list) and record[key] else None
        if isinstance(first, dict) and any(row.fits(first) for row in SHAPES):
            return f"is one object with the examples in {key!r}: jq -c '.{key}[]' FILE > train.jsonl"
    return (
        f"has the keys {keys[:8]}; expected 'messages' (OpenAI chat), 'conversations' (ShareGPT), 'instruction' and "
        "'output' (alpaca), 'prompt' and 'completion', 'question' and 'answer', 'text' (a document), or for pairs "
        "'chosen' and 'rejected'"
    )


def _chat(row: Shape, given: Record) -> Record:
    name = next((name for name in _CONVERSATION if given.get(name) is not None), "messages")
    return _checked(with_system(row.convert(given), given), given, name)


def _checked(turns: Any, record: Record, name: str = "messages") -> Record:
    """The chat record of turns and of the tools in `record`. Raises BadRecord."""
    messages = read_messages(turns, name)
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise BadRecord("has no assistant message, so there is nothing to learn")
    if messages[-1]["role"] != "assistant":
        raise BadRecord(f"the last message is from {messages[-1]['role']!r}; expected 'assistant'")
    if all(message.get("weight") == 0 for message in answers):
        raise BadRecord("every assistant message has weight 0 (or train false), so there is nothing to learn")
    _check_parallel_calls(record, messages)
    tools = read_tools(record)
    drop_padded_arguments(messages, tools.get("tools", []))
    return {"messages": messages, **tools}


def _check_parallel_calls(record: Record, messages: list[Record]) -> None:
    """Raises BadRecord: templates do not know of it, so that it is only kept by what is trained."""
    allowed = record.get("parallel_tool_calls")
    if allowed is not None and not isinstance(allowed, bool):
        raise BadRecord(f"'parallel_tool_calls' is a {kind_of(allowed)}, expected true or false")
    for index, message in enumerate(messages):
        if allowed is False and message.get("weight") != 0 and len(calls := message.get("tool_calls", ())) > 1:
            raise BadRecord(f"messages[{index}] has {len(calls)} tool calls, and 'parallel_tool_calls' is false")


# -- converters --------------------------------------------------------------------------------------------------------


def _question_turns(record: Record) -> list[Record]:
    """The turns up to the question, of a text with more of it in another field, or a list of messages."""
    asked, more = one_of(record, _QUESTION), one_of(record, _MORE)
    if isinstance(more, list) and is_empty(asked):
        asked, more = more, None
    if isinstance(asked, list):
        if has_value(more):
            raise BadRecord("has a list of messages as the prompt and a text besides; expected one of the two")
        return [*_history(record), *map(untrained, asked)]
    for value in (asked, more):
        if value is not None and not isinstance(value, str):
            key = next(key for key in record if record[key] is value)
            raise BadRecord(f"{key!r} must be a text or a list of messages, and is a {kind_of(value)}")
    text = "\n".join(part for part in (asked, more) if part)
    if not text.strip():
        keys = [key for key in (*_QUESTION, *_MORE) if key in record]
        raise BadRecord(f"has no prompt: nothing in {' and '.join(map(repr, keys))}")
    return [*_history(record), {"role": "user", "content": text}]


def _history(record: Record) -> Iterator[Record]:
    for turn in listed(record.get("history") or None):
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(side, str) for side in turn)):
            raise BadRecord("'history' must be a list of [question, answer] pairs")
        yield {"role": "user", "content": turn[0]}
        yield {"role": "assistant", "content": turn[1]}


def _with_answer(record: Record, answer: tuple[str, ...]) -> list[Record]:
    value = one_of(record, answer)
    if is_empty(value):
        raise NoAnswer(f"{next(key for key in answer if key in record)!r} is empty")
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        key = next(key for key in answer if record.get(key) is value)
        raise BadRecord(f"{key!r} is a {kind_of(value)}, expected a string or a list of messages")
    turns = _question_turns(record)
    if last_role(turns) == "assistant":
        raise BadRecord("the prompt ends with a message from 'assistant'; expected the turn that is answered")
    thought = {key: record[key] for key in _THOUGHT if isinstance(record.get(key), str)}
    return [*turns, *(value if isinstance(value, list) else [{"role": "assistant", "content": value, **thought}])]


def _with_calls(record: Record) -> list[Record]:
    """The answers are calls, as a list or as JSON text."""
    return [*_question_turns(record), {"role": "assistant", "tool_calls": record["answers"]}]


def _document(record: Record) -> Record:
    if not isinstance(text := record["text"], str):
        raise BadRecord(f"'text' is a {kind_of(text)}, expected the text of a document")
    if not text.strip():
        raise NoAnswer("'text' is empty")
    return {"text": text}


def _conversation(record: Record) -> Any:
    return one_of(record, ("messages", *_CONVERSATION))


def _single(name: str, question: tuple[str, ...], answer: tuple[str, ...], **more: Any) -> Shape:
    convert = partial(_with_answer, answer=answer)
    return Shape(name, (question, answer), convert, _ASKED | {*_THOUGHT}, _QUESTION_REFUSES, **more)


def _pair(convert: Callable[[Record], Pair], *needs: tuple[str, ...], **more: Any) -> Shape:
    return Shape("preference", (SIDES, *needs), convert, refuses=REFUSES, has=SIDES, **more)


def _marked(row: Shape) -> Shape:
    """The same conversations, each with a mark of its answer."""
    refuses = {key: refusal for key, refusal in row.refuses.items() if key not in MARKS}
    return replace(row, name="unpaired", reads=row.reads.union(MARKS), refuses=refuses, marked=True)


TEXT = "text"
"""Shape of a document, all of which is trained, without a chat template."""
_CONVERSATIONS = (
    Shape("chat", (("messages",),), _conversation),
    Shape("sharegpt", (_CONVERSATION,), _conversation),
    Shape("query_calls", (("query", "question", "instruction"), ("answers",), ("tools",)), _with_calls, _ASKED),
    _single("alpaca", ("instruction",), ("output", "response")),
    _single("prompt_completion", ("prompt",), ("completion", "response")),
    _single("question_answer", ("question", "query"), ("answer", "response")),
    _single("input_output", ("input",), ("output",), when=lambda record: "instruction" not in record),
)
SHAPES: tuple[Shape, ...] = (
    Shape("preference", (("input",), OUTPUTS), preferences.of_openai, frozenset(), REFUSES, has=OUTPUTS),
    # TRL's implicit prompts; answers to a prompt (TRL, orca, alpaca) or to a conversation (ShareGPT); texts that begin
    # alike.
    _pair(preferences.of_conversations, when=preferences.is_conversations),
    _pair(lambda record: preferences.of_prompt(_question_turns(record), record), (*_QUESTION, "input"), reads=_ASKED),
    _pair(lambda record: preferences.of_prompt(_conversation(record), record), (*_CONVERSATION, "messages")),
    _pair(preferences.of_texts),
    # The method decides what a conversation that ends with the user is: `to_prompt`.
    Shape(
        "prompt",
        (("messages",),),
        _conversation,
        refuses=REFUSES,
        when=lambda record: ends_with_user(record["messages"]),
    ),
    *map(_marked, _CONVERSATIONS),
    *_CONVERSATIONS,
    Shape(TEXT, (("text",),), _document, frozenset(), _CHAT_REFUSES),
)
