"""OpenAI's older form of tools and the newer one say the same, both ways."""

import pytest

from weights.format.legacy_functions import (
    LegacyRefused,
    answer_delta,
    answer_message,
    as_tools,
    finish_reason,
    with_tool_call,
)

F = {"name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ({}, "auto"),
        ({"function_call": "none"}, "none"),
        ({"function_call": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_a_request(given, choice):
    assert as_tools({"functions": [F]} | given) == {
        "tools": [{"type": "function", "function": F}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }


def test_a_call_and_its_result_in_the_messages_belong_together():
    call = with_tool_call(1, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}})
    result = with_tool_call(2, {"role": "function", "name": "f", "content": "42"})
    assert call["tool_calls"] == [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert "function_call" not in call
    assert result == {"role": "tool", "name": "f", "content": "42", "tool_call_id": "call_1"}
    with pytest.raises(LegacyRefused, match="both"):
        with_tool_call(0, call | {"function_call": {"name": "f", "arguments": "{}"}})


def test_an_answer():
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert answer_message({"role": "assistant", "content": None, "tool_calls": [call], "function_call": None}) == {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "f", "arguments": '{"a":1}'},
    }
    assert answer_message({"role": "assistant", "content": "hi", "function_call": None}) == {
        "role": "assistant",
        "content": "hi",
    }
    assert [finish_reason(reason) for reason in ("tool_calls", "stop", None)] == ["function_call", "stop", None]


def test_a_streamed_answer():
    first = {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert answer_delta({"tool_calls": [first]}) == {"function_call": {"name": "f", "arguments": ""}}
    assert answer_delta({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}) == {
        "function_call": {"arguments": "{"}
    }
    assert answer_delta({"tool_calls": [first | {"index": 1}]}) == {}, "the older form has room for one call"
    assert answer_delta({"content": "a"}) == {"content": "a"}
