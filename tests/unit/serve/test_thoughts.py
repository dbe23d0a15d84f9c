"""What the parsers of `<think>` take for the answer, whole and in a stream."""

from __future__ import annotations

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager

from serve.core.parsers import BEGUN_THOUGHT_PARSER, THINK_PARSER
from serve.vllm import thoughts
from tests.train_support.tiny import tokenizer


@pytest.fixture(scope="module")
def words():
    thoughts.register()
    made = tokenizer()
    made.add_tokens(["<think>", "</think>"])
    return made


@pytest.mark.parametrize(
    ("parser", "prompt", "written", "max_tokens", "thought", "answer"),
    [
        (THINK_PARSER, "assistant\n", "yes", None, None, "yes"),
        (THINK_PARSER, "assistant\n", "<think>\nso\n</think>\n\nyes", None, "so", "yes"),
        (THINK_PARSER, "assistant\n", "<think>\n\n</think>\n\nyes", None, None, "yes"),
        (THINK_PARSER, "assistant\n", "<think>\nso it goes on", 4, "so it goes on", None),
        (BEGUN_THOUGHT_PARSER, "assistant\n<think>\n", "so\n</think>\n\nyes", None, "so", "yes"),
        (BEGUN_THOUGHT_PARSER, "assistant\n<think>\n", "yes", None, None, "yes"),
        (BEGUN_THOUGHT_PARSER, "assistant\n<think>\n", "yes", 100, None, "yes"),
        (BEGUN_THOUGHT_PARSER, "assistant\n<think>\n", "so it goes on", 2, "so it goes on", None),
    ],
)
def test_answer_with_and_without_a_thought_is_content(words, parser, prompt, written, max_tokens, thought, answer):
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "a"}], max_tokens=max_tokens, include_reasoning=True
    )
    made = ParserManager.get_parser(reasoning_parser_name=parser, tool_parser_name=None)
    reasoning, content, _ = made(words).parse(written, request)
    assert ((reasoning or "").strip() or None, content) == (thought, answer)

    stream, streamed = made(words), ""
    tokens = words.encode(written)
    for number, token in enumerate(tokens, 1):
        delta = stream.parse_delta(
            words.decode([token]), [token], request, words.encode(prompt), finished=number == len(tokens)
        )
        streamed += (delta and delta.content) or ""
    assert streamed == (answer or "")
