"""Defines reasoning parsers for models that may answer without a thought.

A model fine-tuned on answers without thoughts writes no thoughts. vLLM's parser for `<think>` treats output without
`</think>` as a thought, so such an answer would have no content. Also, vLLM counts the empty lines that templates write
between thought and answer as part of the answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.parser.engine.adapters import make_adapters
from vllm.parser.engine.events import EventType
from vllm.parser.engine.parser_engine_config import ParserState, Transition
from vllm.parser.qwen3 import Qwen3Parser, qwen3_config
from vllm.reasoning import ReasoningParserManager

from serve.core.parsers import BEGUN_THOUGHT_PARSER, THINK_PARSER


class _StrippingParser(Qwen3Parser):
    """Strips the empty lines before an answer. The thought ends only after the empty lines, because vLLM does not parse
    the text after a thought's end (as in vllm/parser/granite_thinking.py)."""

    _answer_begun = False

    @property
    def reasoning_ended(self) -> bool:
        return self._reasoning_ended and self._answer_begun

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        reasoning, content = super().extract_reasoning(model_output, request)
        return reasoning, (content or "").lstrip("\n") or None

    def _reset(self, initial_state: Any = None) -> None:
        super()._reset(initial_state=initial_state)
        self._answer_begun = False

    def _events_to_delta(self, events: Any, finished: bool = False) -> Any:
        delta = super()._events_to_delta(events, finished=finished)
        if delta is None or not delta.content or self._answer_begun:
            return delta
        delta.content = delta.content.lstrip("\n") or None
        self._answer_begun = bool(delta.content)
        return delta if delta.content or delta.reasoning or delta.tool_calls else None


class ThoughtParser(_StrippingParser):
    """For a template whose generation prompt does not open a thought: `<think>` opens it, all else is the answer."""

    def __init__(self, tokenizer: Any, tools: Any = None, **kwargs: Any) -> None:
        config = qwen3_config(thinking=False, name=THINK_PARSER, turn_boundary_tokens=self.TURN_BOUNDARIES)
        begins = Transition(ParserState.REASONING, (EventType.REASONING_START,))
        transitions = {**config.transitions, (ParserState.CONTENT, "THINK_START"): begins}
        # A structured answer's grammar must not constrain a thought before the answer.
        kwargs["parser_engine_config"] = replace(config, transitions=transitions, wait_for_reasoning=True)
        super().__init__(tokenizer, tools, **kwargs)


class BegunThoughtParser(_StrippingParser):
    """For a template whose generation prompt opens a thought: complete output without `</think>` is the answer."""

    _streamed = ""

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        reasoning, content = super().extract_reasoning(model_output, request)
        if reasoning and not (content or "").strip() and self._ended(reasoning, request):
            return None, reasoning.lstrip("\n")
        return reasoning, content

    def extract_reasoning_streaming(self, *args: Any, **kwargs: Any) -> Any:
        delta = super().extract_reasoning_streaming(*args, **kwargs)
        self._streamed += (delta and delta.reasoning) or ""
        return delta

    def get_streaming_fallback_content(self, text: str, request: Any) -> str | None:
        """Return the text that was streamed as reasoning, if the text turns out to be the answer."""
        return self._streamed.lstrip("\n") if self._ended(self._streamed, request) else None

    def _ended(self, text: str, request: Any) -> bool:
        """Whether the model ended the text itself, judged by its length because vLLM does not tell parsers."""
        limits = ("max_completion_tokens", "max_tokens", "max_output_tokens")
        most = next((limit for name in limits if (limit := getattr(request, name, None))), None)
        return most is None or len(self.model_tokenizer.encode(text, add_special_tokens=False)) < most - 1


def register() -> None:
    """Register the parsers in vLLM. May be called several times."""
    for name, parser in ((THINK_PARSER, ThoughtParser), (BEGUN_THOUGHT_PARSER, BegunThoughtParser)):
        ReasoningParserManager.register_module(name, module=make_adapters(parser)[0])
