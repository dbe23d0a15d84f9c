"""Fixes three kinds of tool calls that vLLM leaves unchecked or loses: a call that a request forces, a call that the
token limit cuts, and a call without arguments.

vLLM holds arguments to their schema only for tools with `strict: true`, or for all tools of all requests
(`--tool-strict-level parameter`). A small model that had to call `get_weather(city)` wrote a list of schemas. Where a
client forces the call ("required", or one function by name), the gateway has measured what the grammar costs
(appliance.gateway.payload.structure); where the model may choose, it has not, and `strict` decides as in vLLM.

A call that is cut has no end, and vLLM's parsers of whole answers then find none: what the model wrote of it became the
`content`, where OpenAI gives the call with the arguments as far as they go, and the finish reason "length" (Responses:
an item that is `incomplete`). Parsers of streams accept calls without an end, so they read a cut answer. A call whose
name is cut is neither a call nor content, as in a stream. A call that a stop sequence cuts stays as it is: otherwise
the finish reason would be the tools, and a client would run an incomplete call.

A model leaves the arguments out, or writes null, where a tool takes none. Clients read the arguments as an object, so
these are `{}`. vLLM's parsers of whole answers take such a call for text, or pass on what the model wrote.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from typing import Any

from vllm.entrypoints.generate.base.protocol import FunctionCall
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.responses import streaming_events
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.parser import abstract_parser
from vllm.parser.abstract_parser import DelegatingParser
from vllm.tool_parsers import structural_tag_registry
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

_CUT = "length"
_MARKS = ("tool_call_start_token", "tool_calls_start_token", "bot_token")
"""vLLM's parsers use these names for the text that begins a call, if it is one text."""
_PIECES, _MOST_CALLS = 16, 128
"""In how many pieces a parser of streams reads a cut answer again (each look takes time in proportion to the answer),
and how many calls it may find: OpenAI's limit of tools. The second bound stops a parser that never returns None."""

_NO_ARGUMENTS = ("", "null", '""')
_EMPTY = "{}"
_CALLS, _ENDS = '"tool_calls":[', '"finish_reason":"'
_DATA = "data: "

_cut_texts: ContextVar[frozenset[str]] = ContextVar("cut_texts", default=frozenset())
"""The answers of the current request that its token limit cut: vLLM does not tell its parsers."""
_is_cut: ContextVar[bool] = ContextVar("is_cut", default=False)
"""Whether the answer that is being read is among them; its parser gets the text after the reasoning."""


def apply() -> None:
    seen = structural_tag_registry.resolve_tool_strictness

    def resolve(tools: Any, tool_choice: Any, strict_level: ToolStrictLevel) -> Any:
        return seen(tools, tool_choice, ToolStrictLevel.PARAMETER if _forces(tool_choice) else strict_level)

    structural_tag_registry.resolve_tool_strictness = resolve
    abstract_parser.resolve_tool_strictness = resolve
    read_cut_calls()
    chat, responses = OpenAIServingChat, OpenAIServingResponses
    chat.chat_completion_full_generator = _says_cut(chat.chat_completion_full_generator)
    responses._make_response_output_items = _incomplete_items(responses._make_response_output_items)
    responses._process_simple_streaming_events = _incomplete_events(responses._process_simple_streaming_events)
    chat.chat_completion_stream_generator = _streams_objects(chat.chat_completion_stream_generator)
    streaming_events.emit_simple_tool_call_done = _done_with_object(streaming_events.emit_simple_tool_call_done)


def read_cut_calls() -> None:
    DelegatingParser.parse = _knows_cut(DelegatingParser.parse)
    DelegatingParser._extract_tool_calls = _with_cut_calls(DelegatingParser._extract_tool_calls)


def _forces(tool_choice: Any) -> bool:
    return tool_choice not in ("auto", "none", None)


def _knows_cut(parse: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(parse)
    def run(self: DelegatingParser, model_output: str, *args: Any, **kwargs: Any) -> Any:
        _is_cut.set(model_output in _cut_texts.get())
        return parse(self, model_output, *args, **kwargs)

    return run


def _with_cut_calls(extract: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(extract)
    def run(
        self: DelegatingParser, content: str | None, request: Any, enable_auto_tools: bool = False
    ) -> tuple[list[FunctionCall] | None, str | None]:
        calls, text = extract(self, content, request, enable_auto_tools)
        if not _is_cut.get():
            calls, text = _whole_calls(self, calls, text, content, request)
        forced = _forces(request.tool_choice)
        called = request.tools and request.tool_choice != "none" and (forced or enable_auto_tools)
        if calls or not content or not called or not _is_cut.get() or self._tool_parser is None:
            return calls, text
        begun, beside = _begun_calls(self, content, request)
        return (begun, beside) if begun or forced or _begins_call(self._tool_parser, content) else (calls, text)

    return run


def _whole_calls(
    parser: DelegatingParser, calls: list[FunctionCall] | None, text: str | None, written: str | None, request: Any
) -> tuple[list[FunctionCall] | None, str | None]:
    """The calls of an answer that is not cut, each with an object, and the text beside them."""
    tool_parser = parser._tool_parser
    auto = bool(request.tools) and request.tool_choice in ("auto", None)
    ended = auto and written and tool_parser is not None and _ends_call(tool_parser, written)
    if not calls and ended and written and _begins_call(tool_parser, written):
        begun, beside = _begun_calls(parser, written, request)
        if begun and all(call.arguments.strip() in _NO_ARGUMENTS for call in begun):
            calls, text = begun, beside
    for call in calls or ():
        if call.arguments.strip() in _NO_ARGUMENTS:
            call.arguments = _EMPTY
    return calls, text


def _ends_call(tool_parser: Any, written: str) -> bool:
    marks = (getattr(tool_parser, name.replace("start", "end"), None) for name in _MARKS if "start" in name)
    return any(isinstance(mark, str) and mark in written for mark in marks)


def _begins_call(tool_parser: Any, written: str) -> bool:
    """Whether the answer has the whole mark of a call: what follows is not text, even if the call's name is cut, and
    neither is it in a stream. An incomplete mark at the end may be text. A mark that is a word (Phi's "functools") is
    text unless "[" follows."""
    marks = (getattr(tool_parser, name, None) for name in _MARKS)
    return any(isinstance(m, str) and (f"{m}[" if m.isalpha() else m) in written for m in marks)


def _begun_calls(parser: DelegatingParser, written: str, request: Any) -> tuple[list[FunctionCall], str | None]:
    """The calls that the parser of streams finds in it, and the text beside them."""
    used = parser._tool_parser
    calls, beside = dict[int, FunctionCall](), ""
    parser._tool_parser = type(used)(parser.model_tokenizer, used.tools)  # one holds what it has read
    encode = parser.model_tokenizer.encode
    try:
        # Some parsers return a call's name first and its arguments with the next piece, so the text is passed in
        # pieces. And they are called until they return nothing more: a piece may begin several calls, and some parsers
        # return one at a time.
        size = max(1, -(-len(written) // _PIECES))
        text, ids, named, end = "", list[int](), False, 0
        for _ in range(_PIECES + 2 * _MOST_CALLS):
            new = written[end : end + size]
            new_ids = encode(new, add_special_tokens=False) if new else []
            delta, named = parser._extract_tool_calls_streaming(
                text, text + new, new, ids, ids + new_ids, new_ids, request, function_name_returned=named
            )
            if delta is None and not new:
                break
            text, ids, end = text + new, ids + new_ids, end + size
            beside += (delta and delta.content) or ""
            for piece in delta.tool_calls if delta else ():
                call = calls.setdefault(piece.index, FunctionCall(id=None, name="", arguments=""))
                call.id = call.id or piece.id
                call.name = call.name or (piece.function and piece.function.name) or ""
                call.arguments += (piece.function and piece.function.arguments) or ""
    finally:
        parser._tool_parser = used
    return [call for _, call in sorted(calls.items()) if call.name], beside or None


def _says_cut(answer: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM gives the tools as finish reason of an answer that called one, cut or not; in a stream it does not."""

    @functools.wraps(answer)
    async def run(self: OpenAIServingChat, request: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
        cut = set[int]()

        async def noted() -> AsyncGenerator[Any, None]:
            async for result in results:
                texts: dict[bool, set[str]] = {True: set(), False: set()}
                for output in result.outputs:
                    is_cut = output.finish_reason == _CUT
                    texts[is_cut].add(output.text)
                    if is_cut:
                        cut.add(output.index)
                # If two answers have the same text, the reason of the complete one would be the tools.
                _cut_texts.set(frozenset(texts[True] - texts[False]))
                yield result

        made = await answer(self, request, noted(), *args, **kwargs)
        for choice in getattr(made, "choices", ()):  # an error has none
            if choice.index in cut:
                choice.finish_reason = _CUT
        return made

    return run


def _incomplete_items(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def run(self: OpenAIServingResponses, request: Any, final_output: Any, *args: Any, **kwargs: Any) -> Any:
        cut = final_output.finish_reason == _CUT
        _cut_texts.set(frozenset((final_output.text,) if cut else ()))
        items = make(self, request, final_output, *args, **kwargs)
        if cut and items:
            _mark_incomplete(items[-1])
        return items

    return run


def _incomplete_events(process: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(process)
    async def run(
        self: OpenAIServingResponses, request: Any, sampling_params: Any, results: Any, context: Any, *rest: Any
    ) -> AsyncGenerator[Any, None]:
        held = None  # an item's end: whether it is the last one is known when nothing follows
        async for event in process(self, request, sampling_params, results, context, *rest):
            if held is not None:
                yield held
                held = None
            if event.type == "response.output_item.done":
                held = event
            else:
                yield event
        if held is not None:
            last = context.last_output
            if last is not None and last.outputs and last.outputs[0].finish_reason == _CUT:
                _mark_incomplete(held.item)
            yield held

    return run


def _streams_objects(generate: Callable[..., Any]) -> Callable[..., Any]:
    """A stream of chat whose call has no arguments when its choice ends gets them with that event."""

    @functools.wraps(generate)
    async def run(self: OpenAIServingChat, request: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        empty = dict[tuple[int, int], bool]()  # of each call, by its choice and place
        async for event in generate(self, request, *args, **kwargs):
            if _CALLS in event or (empty and _ENDS in event):
                event = _with_objects(event, empty)
            yield event

    return run


def _with_objects(event: str, empty: dict[tuple[int, int], bool]) -> str:
    chunk = json.loads(event[len(_DATA) :])
    changed = False
    for choice in chunk.get("choices", ()):
        calls = choice["delta"].get("tool_calls") or []
        for call in calls:
            at = choice["index"], call["index"]
            empty[at] = empty.get(at, True) and not (call.get("function") or {}).get("arguments")
        if choice.get("finish_reason") in ("tool_calls", "stop"):
            given = [
                {"index": n, "function": {"arguments": _EMPTY}}
                for (c, n), none in empty.items()
                if none and c == choice["index"]
            ]
            if given:
                choice["delta"]["tool_calls"] = [*calls, *given]
                changed = True
    if not changed:
        return event
    return f"{_DATA}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _done_with_object(done: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """The same for a stream of /v1/responses."""

    @functools.wraps(done)
    def run(state: Any) -> list[Any]:
        if state.tool_call_is_custom or state.accumulated_text.strip():
            return done(state)
        return [*streaming_events.emit_simple_tool_call_delta(state, _EMPTY), *done(state)]

    return run


def _mark_incomplete(item: Any) -> None:
    if hasattr(item, "status"):  # a call of a custom tool has none
        item.status = "incomplete"
