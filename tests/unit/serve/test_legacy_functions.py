"""OpenAI's older form of tools and the newer one say the same, both ways."""

import pytest

from serve.core.legacy_functions import LegacyRefused, as_tools, with_tool_call

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
