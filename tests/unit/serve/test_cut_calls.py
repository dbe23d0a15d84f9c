"""Calls of tools that a limit of tokens cuts, read by vLLM's own parsers without an engine."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from openai.types.responses import ResponseFunctionToolCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.abstract_parser import DelegatingParser
from vllm.parser.parser_manager import ParserManager

from serve.api import forced_calls

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
NAMED = {"type": "function", "function": {"name": "f"}}
FIRST = '<tool_call>\n{"name": "f", "arguments": {"city": "A"}}\n</tool_call>\n'
BEGUN = '<tool_call>\n{"name": "f", "arguments": {"city": "Par'
CUT_LIST = '[{"name": "f", "parameters": {"city": "A"}}, {"name": "f", "parameters": {"city": "Par'


class Bytes:
    """A tokenizer."""

    def encode(self, text, add_special_tokens=False):
        return list(text.encode())

    def get_vocab(self):
        return {"<tool_call>": 256, "</tool_call>": 257}


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    for name in ("parse", "_extract_tool_calls"):
        monkeypatch.setattr(DelegatingParser, name, getattr(DelegatingParser, name))
    forced_calls.read_cut_calls()


def read(text, tool_choice, *, parser="hermes", cut=True):
    asked = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "tool_choice": tool_choice}
    )
    made = ParserManager.get_parser(tool_parser_name=parser, reasoning_parser_name=None, enable_auto_tools=True)
    token = forced_calls._cut_texts.set(frozenset((text,) if cut else ()))
    try:
        _, content, calls = made(Bytes(), asked.tools).parse(text, asked, enable_auto_tools=True)
    finally:
        forced_calls._cut_texts.reset(token)
    return content, [(call.name, call.arguments) for call in calls or []]


@pytest.mark.parametrize("choice", ["required", NAMED, "auto"])
def test_a_cut_call_has_its_arguments_as_far_as_they_go(choice):
    assert read(BEGUN, choice) == (None, [("f", '{"city": "Par')])
    assert read(FIRST + BEGUN, choice) == (None, [("f", '{"city": "A"}'), ("f", '{"city": "Par')])
    assert read(FIRST + '<tool_call>\n{"name": "f"', choice)[1][1:] == [("f", "")]
    assert read(FIRST, choice) == (None, [("f", '{"city": "A"}')])


def test_parsers_that_hold_a_forced_call_to_json_lose_no_cut_call():
    calls = [("f", '{"city": "A"}'), ("f", '{"city": "Par')]
    assert read(CUT_LIST, "required", parser="phi4_mini_json") == (None, calls)


def test_what_is_forced_is_no_content_and_what_is_not_cut_stays_it():
    assert read('<tool_call>\n{"na', "required") == (None, [])
    assert read(BEGUN, "required", cut=False) == (BEGUN, []), "a stop sequence cuts too: it must not run"
    assert read(BEGUN, "auto", cut=False) == (BEGUN, []), "the model may have meant it"
    assert read(BEGUN, "none") == (BEGUN, [])
    assert read("Hello", "auto") == ("Hello", [])


def test_a_call_that_is_cut_before_its_name_is_no_content_as_in_a_stream():
    """Clients showed `<tool_call>` and half a name as what the model had said."""
    assert read('<tool_call>\n{"na', "auto") == (None, [])
    assert read('Let me look.<tool_call>\n{"na', "auto") == ("Let me look.", [])
    assert read("2 <tool", "auto") == ("2 <tool", []), "it may be text"
    assert read('<tool_call>\n{"na', "auto", cut=False)[0] == '<tool_call>\n{"na'


def test_a_word_that_begins_calls_is_text_where_no_call_follows_it():
    """Of a cut answer about Python's `functools` nothing was left."""
    assert read("use functools.cache", "auto", parser="phi4_mini_json") == ("use functools.cache", [])
    assert read('functools[{"na', "auto", parser="phi4_mini_json") == (None, [])


async def test_a_cut_answer_ends_by_its_limit_whatever_it_called():
    ends = ("length", "cut"), ("length", "both"), ("stop", "both")
    outputs = [SimpleNamespace(index=n, finish_reason=why, text=text) for n, (why, text) in enumerate(ends)]

    async def results():
        yield SimpleNamespace(outputs=outputs)

    async def answer(self, request, results):
        async for _ in results:
            pass
        assert forced_calls._cut_texts.get() == {"cut"}, "and none that another choice ended with of itself"
        return SimpleNamespace(choices=[SimpleNamespace(index=n, finish_reason="tool_calls") for n in range(3)])

    made = await forced_calls._says_cut(answer)(None, None, results())
    assert [choice.finish_reason for choice in made.choices] == ["length", "length", "tool_calls"]


async def test_the_last_item_of_a_cut_response_is_incomplete():
    def items():
        common = {"type": "function_call", "name": "f", "status": "completed", "arguments": "{"}
        return [ResponseFunctionToolCall(call_id=f"call_{n}", **common) for n in range(2)]

    make = forced_calls._incomplete_items(lambda self, request, final_output: items())
    for why, last in (("length", "incomplete"), ("stop", "completed")):
        output = SimpleNamespace(finish_reason=why, text="x")
        assert [item.status for item in make(None, None, output)] == ["completed", last]

        async def process(self, request, sampling_params, results, context):
            for item in items():
                yield SimpleNamespace(type="response.function_call_arguments.done")
                yield SimpleNamespace(type="response.output_item.done", item=item)

        context = SimpleNamespace(last_output=SimpleNamespace(outputs=[output]))
        told = [event async for event in forced_calls._incomplete_events(process)(None, None, None, None, context)]
        assert [event.type.split(".")[1] for event in told] == ["function_call_arguments", "output_item"] * 2
        assert [event.item.status for event in told[1::2]] == ["completed", last]


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": ""', ', "arguments": {}'])
def test_call_without_arguments_has_an_empty_object(arguments):
    written = f'<tool_call>\n{{"name": "f"{arguments}}}\n</tool_call>'
    assert read(written, "auto", cut=False) == (None, [("f", "{}")])


def chunk(delta, finish=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]}, separators=(',', ':'))}\n\n"


def called(arguments=None, name="f"):
    return {"tool_calls": [{"index": 0, "function": {"name": name} if arguments is None else {"arguments": arguments}}]}


@pytest.mark.parametrize(
    ("deltas", "arguments"),
    [
        ([called()], "{}"),
        ([called(), called("")], "{}"),
        ([called(), called('{"a"'), called(":1}")], '{"a":1}'),
    ],
)
async def test_streamed_call_without_arguments_gets_an_empty_object(deltas, arguments):
    async def generate(self, request):
        for delta in deltas:
            yield chunk(delta)
        yield chunk({}, "tool_calls")
        yield "data: [DONE]\n\n"

    events = [event async for event in forced_calls._streams_objects(generate)(None, None)]
    told = [json.loads(event[6:])["choices"][0]["delta"] for event in events[:-1]]
    calls = [call["function"] for delta in told for call in delta.get("tool_calls", ())]
    assert "".join(call.get("arguments", "") for call in calls) == arguments
    assert events[-1] == "data: [DONE]\n\n"


async def test_streamed_call_that_is_cut_gets_no_arguments():
    async def generate(self, request):
        yield chunk(called())
        yield chunk({}, "length")

    events = [event async for event in forced_calls._streams_objects(generate)(None, None)]
    assert "{}" not in json.loads(events[-1][6:])["choices"][0]["delta"].get("tool_calls", [])
    assert events[-1] == chunk({}, "length")
