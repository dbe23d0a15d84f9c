"""Grammars are checked and compiled by their backend; the parsers of <think> separate thought and answer."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser.parser_manager import ParserManager
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import backend_guidance
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from serve.core.parsers import BEGUN_THOUGHT_PARSER, THINK_PARSER
from serve.vllm import grammars, thoughts
from serve.vllm.grammars import BoundedGrammar, FormBackend
from tests.train_support.tiny import tokenizer

NAMES = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 500, "pattern": r"^(\w{1,20} ?){1,50}$"}},
}
CYCLE = {"$ref": "#/$defs/p", "$defs": {"p": {"$ref": "#/$defs/q"}, "q": {"anyOf": [{"$ref": "#/$defs/p"}]}}}
JSON, TAG = StructuredOutputOptions.JSON, StructuredOutputOptions.STRUCTURAL_TAG


def tag(schema: dict[str, Any]) -> str:
    content = {"type": "json_schema", "json_schema": schema}
    return json.dumps(
        {"type": "structural_tag", "format": {"type": "tag", "begin": "<c>", "content": content, "end": "</c>"}}
    )


def backend(known: int = 352) -> Any:
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<picture>"]})
    options = SimpleNamespace(disable_any_whitespace=True, disable_additional_properties=False)
    config = SimpleNamespace(structured_outputs_config=options, model_config=None, speculative_config=None)
    return FormBackend(config, words, known)


def params(**form: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**form))


def first_tokens(of: Any, kind: StructuredOutputOptions, spec: str) -> set[str]:
    mask = of.allocate_token_bitmask(2)
    of.compile_grammar(kind, spec).fill_bitmask(mask, 1)
    assert mask.shape == (2, -(-of.vocab_size // 32)) and set(mask[0].tolist()) == {-1}
    return {of.tokenizer.decode([n]) for n in range(of.vocab_size) if mask[1, n // 32] >> (n % 32) & 1}


@pytest.mark.parametrize("known", [320, 325, 352, 384])
def test_backend_masks_every_grammar_kind_at_model_length(known: int) -> None:
    of = backend(known)
    assert {"-", "0"} <= first_tokens(of, JSON, '{"type": "integer"}') <= {*"-0123456789"}
    assert first_tokens(of, StructuredOutputOptions.REGEX, "[ab]") == {"a", "b"}
    assert first_tokens(of, StructuredOutputOptions.CHOICE, '["yes", "no"]') == {"y", "n"}
    assert first_tokens(of, StructuredOutputOptions.JSON_OBJECT, "") == {"{"}
    assert first_tokens(of, TAG, tag({"type": "integer"})) == {"<"}


@pytest.mark.parametrize("schema", [{"$ref": "#"}, CYCLE])
def test_compile_unsatisfiable_schema_raises(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no first token"):
        backend().compile_grammar(JSON, json.dumps(schema))


@pytest.mark.parametrize(
    ("more", "other"), [({}, False), ({"allOf": [{}, {}]}, True), ({"additionalProperties": {}}, True)]
)
def test_prepared_forbids_unlisted_properties(more: dict[str, Any], other: bool) -> None:
    asked = params(json={"type": "object", "properties": {"a": {"type": "integer"}}, **more})
    with grammars.prepared(asked):
        grammar = backend().compile_grammar(JSON, json.dumps(asked.structured_outputs.json))
    tokens = tokenizer().encode('{"b', add_special_tokens=False)
    assert (grammar.validate_tokens(tokens) == tokens) is other


@pytest.mark.parametrize("form", [{"json": {"type": "x"}}, {"regex": "a(?=b)"}, {"json": {"enum": []}}])
def test_prepared_refuses_unsupported_grammars(form: dict[str, Any]) -> None:
    asked = params(**form)
    with grammars.prepared(asked), pytest.raises(VLLMValidationError):
        backend_guidance.validate_guidance_grammar(asked)


class Slow:
    """A grammar whose steps advance `clock`: by the token's number in milliseconds, and by `mask_ms` for a mask."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.mask_ms = clock, 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.clock[0] += tokens[0] / 1000
        return True

    def fill_bitmask(self, bitmask: Any, idx: int) -> None:
        self.clock[0] += self.mask_ms / 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    return now


def test_slow_grammar_stops_accepting_tokens(clock: list[float]) -> None:
    quick, slow = (BoundedGrammar(Slow(clock), 32) for _ in range(2))
    for _ in range(10_000):
        assert quick.accept_tokens("r", [15])
    steps = 0
    while slow.accept_tokens("r", [60]):
        steps += 1
    assert steps == pytest.approx(grammars.MOST_BEYOND_S / 0.04, abs=1)


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
def test_thought_parsers_separate_answer_from_thought(words, parser, prompt, written, max_tokens, thought, answer):
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
