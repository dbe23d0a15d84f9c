"""Every key of a row is converted, refused by name, or reported as left out."""

import json
import re
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data import formats, messages
from train.data.formats import MARKS, OUTPUTS, SHAPES, SIDES, Shape, convert
from train.data.records import BadRecord, parse
from train.data_checks.check import MAX_REASON_CHARACTERS
from train.methods.methods import METHODS

NAMES = (
    "messages conversations conversation prompt question query instruction input context completion response output "
    "answer answers history system system_prompt tools functions parallel_tool_calls reasoning_content thinking text "
    "chosen rejected preferred_output non_preferred_output id source label kto_tag images image_url audio_path score "
    "category prompt_id metadata weight train rejected_response chat_template_kwargs completions responses data "
    "system_message documents split tool"
).split()
PLACES = range(len(SHAPES))
MARK = re.compile(r"mark\w+?end")


def turns(*said: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": text} for role, text in said]


def value_of(key: str, shape: Shape):
    """A value like those of the key in public data, with recognisable marks."""
    mark = f"mark_{key}_end"
    answers = {"prompt": (), "preference": ()}.get(shape.name, (("assistant", f"mark_{key}_answer_end"),))
    if key in ("messages", "conversations", "conversation"):
        return turns(("user", mark), *answers)
    if shape.marked and key in MARKS:
        return True
    if key in ("tools", "functions"):
        function = {"name": mark, "parameters": {"type": "object"}}
        return [function if key == "functions" else {"type": "function", "function": function}]
    if key == "history":
        return [[mark, "mark_history_answer_end"]]
    if key == "answers":
        return json.dumps([{"name": mark, "arguments": {}}])
    if key == "parallel_tool_calls":
        return "mark_parallel_end"
    if key == "input" and OUTPUTS[0] in shape.has:
        return {"messages": turns(("user", mark)), "temperature": "mark_temperature_end"}
    if key in OUTPUTS:
        return turns(("assistant", mark))
    if key in SIDES and shape.when is formats._are_conversations:
        return turns(("user", "mark_shared_end"), ("assistant", mark))
    return f"mark_shared_end, then {mark}" if key in SIDES else mark


def row_of(shape: Shape, keys: Iterable[str]) -> dict:
    return {key: value_of(key, shape) for key in (*keys, *MARKS[: int(shape.marked)])}


@pytest.mark.parametrize("place", PLACES)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_convert_row_key_is_used_refused_or_reported(place, data):
    shape = SHAPES[place]
    needed = [data.draw(st.sampled_from(group)) for group in shape.needs]
    further = data.draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
    record = parse(json.dumps(row_of(shape, [*needed, *shape.has, *further])).encode())
    try:
        made = convert(record)
    except BadRecord as bad:
        assert any(key in str(bad)[:MAX_REASON_CHARACTERS] for key in (*record, "prompt")), f"names no key: {bad}"
        return
    read = json.dumps({key: value for key, value in record.items() if key not in made.left_out})
    reported = {f"mark_{name[6:]}_end" for name in made.left_out}
    assert set(MARK.findall(read)) - set(MARK.findall(json.dumps(made.record))) <= reported


TURN_KEYS = sorted(
    {*messages.WEIGHT, *messages.CALLS, *messages.TURN_REFUSES, "name", "refusal", "tool_call_id", "reasoning"}
    | {"reasoning_content", "thinking", "role", "from", "content", "value"}
)
VALUES = {
    **{key: 0 for key in messages.WEIGHT},
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "markcall", "arguments": {"a": "markargument"}}}
    ],
    "function_call": {"name": "markcall", "arguments": '{"a": "markargument"}'},
    "eot": False,
}


@pytest.mark.parametrize("place", ["messages", "conversations", "conversation"])
@given(
    role=st.sampled_from(["system", "user", "assistant", "tool", "function_call"]),
    keys=st.lists(st.sampled_from([*TURN_KEYS, *NAMES]), max_size=3, unique=True),
    answered=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_convert_turn_key_is_used_refused_or_reported(place, role, keys, answered):
    keys = [key for key in keys if key not in ("role", "from", "content", "value")]
    text = '{"name": "f", "arguments": {}}' if role == "function_call" else "hello"
    turn = {"role": role, "content": text, **{key: VALUES.get(key, f"mark{key}end") for key in keys}}
    before = turns(("user", "a"), *([("assistant", "b")] if answered else []))
    try:
        made = convert({place: [*before, turn, *turns(("user", "c"), ("assistant", "d"))]})
    except BadRecord as bad:
        assert any(key in str(bad) for key in keys), str(bad)
        return
    text = json.dumps(made.record)
    for key in keys:
        if key in messages.WEIGHT:
            used = '"weight": 0' in text or role in ("system", "user", "tool")
        elif key in messages.CALLS:
            used = all(part in text for part in ("markcall", "markargument"))
        else:
            used = f"mark{key}end" in text
        assert used or f"{place}[].{key}" in made.left_out, key


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_method_accepts_or_explains_refusal_of_shapes(method):
    for shape in SHAPES:
        assert method.refuses(shape.name) is None or "wants" in method.refuses(shape.name)


TEXTS = st.text(max_size=4) | st.sampled_from(["user", "tool", "text", '{"name": "f"}', "[1]", "\n\nHuman: a"])
ANY_KEY = st.sampled_from([*TURN_KEYS, "function", "arguments", "id", "type", "text", "messages"])
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-1, 1) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_KEY, inner, max_size=5),
    max_leaves=12,
)


@pytest.mark.parametrize("place", PLACES)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_convert_any_row_returns_example_or_reason(place, data):
    shape = SHAPES[place]
    record = row_of(shape, [*(group[0] for group in shape.needs), *shape.has])
    record |= data.draw(st.dictionaries(st.sampled_from(NAMES), ANY_VALUE, max_size=2))
    for key in ("messages", "conversations"):
        if isinstance(record.get(key), list) and record[key] and isinstance(record[key][0], dict):
            changed = data.draw(st.dictionaries(st.sampled_from(TURN_KEYS), ANY_VALUE, max_size=2))
            record[key] = [{**record[key][0], **changed}, *record[key][1:]]
    try:
        convert(parse(json.dumps(record).encode()))
    except BadRecord as bad:
        assert str(bad)
