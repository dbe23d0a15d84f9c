"""What one request takes of an engine's steps is bounded, whatever it asks for."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import xgrammar
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.engine.incremental_lexer import IncrementalLexer, terminals_from_literals
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tool_parsers.jamba_tool_parser import JambaToolParser
from vllm.tool_parsers.phi4mini_tool_parser import Phi4MiniJsonToolParser
from vllm.v1.engine.async_llm import InputStreamError
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, SlowIncrementalDetokenizer
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from serve.api.answer_version import Answer
from serve.vllm.fairness import step_bounds

# One token for each character, and one of 50 spaces.
_VOCABULARY = [chr(code) for code in range(32, 127)] + [" " * 50, "\n", "</s>"]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> xgrammar.GrammarCompiler:
    """Of a class with the bound; the library's own stays as it is."""
    bounded = type("Bounded", (xgrammar.GrammarCompiler,), {})
    step_bounds.bound_whitespace(bounded)
    info = xgrammar.TokenizerInfo(_VOCABULARY, stop_token_ids=[len(_VOCABULARY) - 1])
    return bounded(info, max_threads=1)


def accepts(compiled: Any, text: str) -> bool:
    return xgrammar.GrammarMatcher(compiled).accept_string(text)


ODD_KEYS = [
    {"type": "object", "patternProperties": {"^a$": {"type": "integer"}}},
    {"type": "object", "propertyNames": {"pattern": "^a$"}},
]


@pytest.mark.parametrize("schema", ODD_KEYS)
def test_a_run_of_whitespace_ends(compiler: xgrammar.GrammarCompiler, schema: dict[str, Any]) -> None:
    compiled = compiler.compile_json_schema(json.dumps(schema))
    assert accepts(compiled, '{"a":1,\n' + " " * 8 + '"a" : 2}')
    # Two rules may each take a run of whitespace here; unbounded, each further one cost more than the last.
    assert not accepts(compiled, '{"a":1,' + " " * (2 * step_bounds.WHITESPACE + 1))


def test_also_in_the_arguments_of_a_call(compiler: xgrammar.GrammarCompiler) -> None:
    content = {"type": "json_schema", "json_schema": ODD_KEYS[0], "max_whitespace_cnt": None}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}
    compiled = compiler.compile_structural_tag(json.dumps(tag))
    assert accepts(compiled, '<f>{"a":1, "a":2}</f>')
    assert not accepts(compiled, '<f>{"a":1,' + " " * (2 * step_bounds.WHITESPACE + 1))


def test_a_schema_within_a_tag_stays_as_it_is() -> None:
    schema = {"type": "json_schema", "properties": {"type": {"const": "json_schema"}}}
    inner = {"type": "json_schema", "json_schema": schema}
    bounded = step_bounds.with_bounds({"format": {"content": [inner, {"type": "any_text"}]}})
    assert bounded["format"]["content"] == [
        {**inner, "max_whitespace_cnt": step_bounds.WHITESPACE},
        {"type": "any_text"},
    ]


class Slow:
    """A grammar whose steps take the times of `clock`."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.clock[0] += tokens[0] / 1000
        return True

    def fill_bitmask(self, bitmask: Any, idx: int) -> None:
        self.clock[0] += bitmask / 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    return now


def test_a_grammar_that_takes_too_long_ends_its_own_request(clock: list[float]) -> None:
    bounded = type("Bounded", (Slow,), {})
    step_bounds.bound_time(bounded)
    quick, slow = bounded(clock), bounded(clock)
    for _ in range(10_000):
        assert quick.accept_tokens("r", [15])
    steps = 0
    while slow.accept_tokens("r", [60]):
        steps += 1
    assert steps == pytest.approx(step_bounds.MOST_BEYOND_S / 0.04, abs=1)


def test_one_whose_masks_take_too_long_does_so_too(clock: list[float]) -> None:
    bounded = type("Bounded", (Slow,), {})
    step_bounds.bound_time(bounded)
    quick, slow = bounded(clock), bounded(clock)
    for _ in range(10_000):
        quick.fill_bitmask(250, 0)
        assert quick.accept_tokens("r", [1])
    steps = 0
    while slow.accept_tokens("r", [1]):
        slow.fill_bitmask(500, 0)
        steps += 1
    assert steps == 3


class Runner:
    """Of vLLM's model runner what the function asks for, as it is in 0.32: rows of logits from `hidden_states`, and
    results once a prompt is complete."""

    def __init__(self) -> None:
        self.num_prompt_logprobs = {"a": 1, "b": 1}
        self.requests = {"a": SimpleNamespace(num_computed_tokens=0), "b": SimpleNamespace(num_computed_tokens=0)}
        self.prompts = {"a": 700, "b": 40}
        self.begins: dict[str, int] = {}
        self.rows: list[int] = []
        self.got: dict[str, list[int]] = {"a": [], "b": []}

    def _get_prompt_logprobs_dict(self, hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        complete = {}
        for req_id in list(self.num_prompt_logprobs):
            tokens = num_scheduled_tokens.get(req_id)
            if tokens is None:
                continue
            left = self.prompts[req_id] - self.requests[req_id].num_computed_tokens - 1
            rows = min(tokens, left)
            if tokens > left:
                complete[req_id] = self.got[req_id]
                del self.num_prompt_logprobs[req_id]
            if rows > 0:
                at = self.begins[req_id]
                self.got[req_id] += hidden_states[at : at + rows]
                self.rows.append(rows)
        return complete


def test_logits_of_a_prompt_are_computed_in_slices_and_are_the_same() -> None:
    sliced = type("Sliced", (Runner,), {})
    step_bounds.slice_prompt_logprobs(sliced)
    found = []
    for runner in (Runner(), sliced()):
        got: dict[str, Any] = {}
        for step in ({"x": 1, "a": 300, "b": 40}, {"x": 1, "a": 256}, {"x": 1}, {"x": 1, "a": 144}):
            at = 0
            for req_id in ("x", "a", "b"):
                runner.begins[req_id] = at
                at += step.get(req_id, 0)
            first = sum(step.values()) * 1000  # the states of a step differ from those of another
            got |= runner._get_prompt_logprobs_dict(list(range(first, first + at)), step)
            for req_id, request in runner.requests.items():
                request.num_computed_tokens += step.get(req_id, 0)
        assert runner.num_prompt_logprobs == {}
        found.append((got, max(runner.rows)))
    assert found[0][0] == found[1][0] and len(found[0][0]["a"]) == 699
    assert found[0][1] == 300 and found[1][1] == step_bounds.ROWS


def unread_bounded() -> Any:
    """vLLM's collector of a request's outputs, with the bound."""
    bounded = type("Bounded", (RequestOutputCollector,), {})
    step_bounds.bound_unread(bounded)
    return bounded


def put(waiting: Any, count: int, each: int = 21, choices: int = 1) -> Any:
    """This many tokens with so many log-probabilities each come, and nobody reads."""
    logprobs = {number: Logprob(-1.0) for number in range(each)}
    for number in range(count):
        one = CompletionOutput(number % choices, "a", [1], 0.0, [logprobs] if each else None)
        waiting.put(RequestOutput("r", None, [1], None, [one], False))
    return waiting


@pytest.mark.parametrize("choices", [1, 64])
def test_log_probabilities_of_a_stream_that_is_not_read_end_its_request(choices: int) -> None:
    """A client that read nothing for a minute had all of them kept, and written in one go once it read."""
    within, made = step_bounds.UNREAD // 21, unread_bounded()
    kept = put(made(RequestOutputKind.DELTA, "r"), within, choices=choices).get_nowait()
    assert sum(len(one.token_ids) for one in kept.outputs) == within
    waiting = put(made(RequestOutputKind.DELTA, "r"), 2 * within, choices=choices)
    with pytest.raises(InputStreamError, match="to be read") as caught:
        waiting.get_nowait()
    assert caught.value.cause.parameter == "logprobs"


def test_so_do_those_of_all_streams_of_an_owner_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made, owner = unread_bounded(), Answer(owner="ann")
    monkeypatch.setattr(step_bounds.answer_version, "current", lambda: owner)
    share = step_bounds.UNREAD // 21
    streams = [put(made(RequestOutputKind.DELTA, "r"), share) for _ in range(4)]
    owner = Answer(owner="ben")
    put(made(RequestOutputKind.DELTA, "r"), share).get_nowait()
    owner = Answer(owner="ann")
    with pytest.raises(InputStreamError, match="of all that you ask for"):
        put(made(RequestOutputKind.DELTA, "r"), share // 2).get_nowait()
    streams[0].get_nowait()
    streams[1].close()
    put(made(RequestOutputKind.DELTA, "r"), share).get_nowait()


def test_texts_of_a_stream_that_is_not_read_wait_and_plain_answers_are_no_stream() -> None:
    made = unread_bounded()
    kept = put(made(RequestOutputKind.DELTA, "r"), step_bounds.UNREAD + 1, each=0).get_nowait()
    assert len(kept.outputs[0].token_ids) > step_bounds.UNREAD
    put(made(RequestOutputKind.CUMULATIVE, "r"), 9000).get_nowait()


class Reading:
    """As vLLM's parser of a stream; `takes` seconds for each look at what was written so far."""

    def __init__(self, clock: list[float], takes: float) -> None:
        self.clock, self.takes, self.seen, self.counted = clock, takes, list[tuple[str, list[int]]](), 0

    def parse_delta(
        self, delta_text: str, delta_token_ids: list[int], request: Any, prompt: Any = None, *, finished: bool
    ) -> str:
        self.clock[0] += self.takes
        self.seen.append((delta_text, delta_token_ids))
        return delta_text

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        self.clock[0] += self.takes
        self.counted += 1
        return len(token_ids)


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes parsers, with the bound, on one clock, which stands except while one of them reads."""
    clock = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    bounded = type("Bounded", (Reading,), {})
    step_bounds.bound_reading(bounded)
    return clock, lambda takes: bounded(clock, takes)


def token(stream: Any, number: int, finished: bool = False) -> Any:
    return stream.parse_delta(f"{number} ", [number], None, [1], finished=finished)


def test_what_takes_long_to_read_is_read_for_many_tokens_at_once(reading: Any) -> None:
    """With each token vLLM reads a call of a tool from its beginning: 64 streams of long calls had everybody wait for a
    second between two tokens."""
    clock, made = reading
    quick, slow = made(0.0001), [made(0.01) for _ in range(4)]
    for number in range(1000):
        assert token(quick, number) == f"{number} "
        for one in slow:
            token(one, number)
        clock[0] += 0.01
    spent = sum(0.01 * len(one.seen) for one in slow)
    assert spent < clock[0] / step_bounds.READ_ONE_OF
    for one in slow:
        token(one, 1000, finished=True)
        assert "".join(text for text, _ in one.seen) == "".join(f"{number} " for number in range(1001))
        assert [token for _, tokens in one.seen for token in tokens] == list(range(1001))
    alone = made(0.01)
    for number in range(100):
        token(alone, number)
        clock[0] += 0.01
    assert len(alone.seen) > 15, "those that have ended take no part of the time"


def test_what_takes_too_long_to_read_ends_its_own_request(reading: Any) -> None:
    clock, made = reading
    rare, often = made(step_bounds.LONG_READ_S * 2), made(step_bounds.LONG_READ_S * 2)
    token(rare, 0)
    rare.takes = 0.001
    with pytest.raises(VLLMValidationError, match="without `stream`"):
        for number in range(12):
            token(often, number)
            token(rare, number)
            clock[0] += 10
    assert token(rare, 12, finished=True).endswith("12 ")


def test_reasoning_is_not_counted_anew_with_each_token_where_that_takes_long(reading: Any) -> None:
    """`continuous_usage_stats` had it: of 8,192 tokens of an answer without thinking 20 ms, of each stream."""
    clock, made = reading
    streams = [made(0.0) for _ in range(4)]
    for number in range(1, 1001):
        for one in streams:
            one.takes = 0.0
            token(one, number)
            one.takes = 0.01
            assert one.count_reasoning_tokens(range(number)) <= number
        clock[0] += 0.01
    assert sum(one.counted for one in streams) * 0.01 < clock[0] / step_bounds.READ_ONE_OF
    for one in streams:
        token(one, 1001, finished=True)
        assert one.count_reasoning_tokens(range(1001)) == 1001
    plain = made(0.01)
    assert [plain.count_reasoning_tokens(range(many)) for many in (7, 8)] == [7, 8]


class Counting:
    """The library's stream of tokens that become text, which counts how many it reads at once."""

    most = 0
    real = tokenizers.decoders.DecodeStream

    def __init__(self, ids: list[int] | None = None, skip_special_tokens: bool = False) -> None:
        self.stream, self.kept = self.real(ids=ids or [], skip_special_tokens=skip_special_tokens), len(ids or [])

    def step(self, tokenizer: Any, token: int) -> str | None:
        self.kept += 1
        Counting.most = max(Counting.most, self.kept)
        text = self.stream.step(tokenizer, token)
        self.kept = 1 if text else self.kept
        return text


SPECIAL = 256


@pytest.fixture
def detokenizers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes vLLM's, the first as it is, the second with the bound, of one token for each byte and a special one."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({one: at for at, one in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|special|>"])
    monkeypatch.setattr(tokenizers.decoders, "DecodeStream", Counting)
    monkeypatch.setattr(Counting, "most", 0)
    bounded = type("Bounded", (FastIncrementalDetokenizer,), {})
    step_bounds.bound_without_text(bounded, type("Slow", (SlowIncrementalDetokenizer,), {}))

    def make(prompt: list[int], **params: Any) -> list[Any]:
        asked = SimpleNamespace(request_id="r", prompt_token_ids=prompt, sampling_params=SamplingParams(**params))
        told = SimpleNamespace(_tokenizer=tokenizer)
        return [made(told, asked) for made in (FastIncrementalDetokenizer, bounded)]

    return tokenizer, make


@pytest.mark.parametrize("shown", [False, True])
def test_text_is_the_same_however_few_tokens_are_read_for_it(detokenizers: Any, shown: bool) -> None:
    tokenizer, make = detokenizers
    ids = tokenizer.encode("Grüße, 世界! 👩‍👩‍👧 " * 40).ids
    ids = [one for at, token in enumerate(ids) for one in ([token, SPECIAL] if at % 7 == 0 else [token])]
    texts = []
    for one in make(ids, skip_special_tokens=not shown):
        for token in ids:
            one.update([token], False)
        texts.append(one.output_text)
    assert texts[0] == texts[1] and ("<|special|>" in texts[1]) is shown


def test_tokens_without_a_text_are_not_read_again_with_each_further_one(detokenizers: Any) -> None:
    """Nor is the prompt: of one of 100,000 tokens, and 64 answers of special tokens alone, which `logit_bias` asks for,
    each token took all other requests most of a second."""
    tokenizer, make = detokenizers
    (half,) = {tokenizer.token_to_id(one) for one in tokenizer.encode("世").tokens[1:2]}
    prompt = tokenizer.encode("x" * 5000).ids
    for token in (SPECIAL, half):
        _, bounded = make(prompt)
        for _ in range(1000):
            bounded.update([token], False)
        for last in tokenizer.encode("end").ids:
            bounded.update([last], False)
        assert bounded.output_text.endswith("end") and len(bounded.output_token_ids) == 1003
        assert bounded.output_text.count("\N{REPLACEMENT CHARACTER}") == (1000 if token == half else 0)
    assert Counting.most <= step_bounds.BEFORE_ANSWER + step_bounds.WITHOUT_TEXT + 1


class Looked(list[int]):
    """Tokens, and how many of them were looked at."""

    many = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.many += len(found) if isinstance(at, slice) else 1
        return found


BEGINS, ENDS = [7], [8, 9]


def budgets(bounded: bool) -> Any:
    holder = type("Holder", (ThinkingBudgetStateHolder,), {})
    if bounded:
        step_bounds.bound_search(holder)
    told = SimpleNamespace(reasoning_start_token_ids=BEGINS, reasoning_end_token_ids=ENDS)
    return holder(told, 1, 0, torch.device("cpu"), False)


def test_the_end_of_reasoning_is_not_looked_for_in_the_whole_answer_at_each_step() -> None:
    """`thinking_token_budget` had it: of 32,000 tokens 12 ms of each step of all requests, for each answer."""
    holder, answer = budgets(bounded=True), Looked()
    state = holder._init_state_entry([1, 2], 10**6)
    for _ in range(1000):
        answer.append(1)
        state["output_tok_ids"] = answer
        holder._update_think_state(state)
    assert answer.many <= 1000 * 2 * (step_bounds.SEARCHED_AGAIN + 2)


@pytest.mark.parametrize("seed", range(5))
def test_reasoning_ends_where_it_did(seed: int) -> None:
    chance, found = random.Random(seed), []
    drawn = chance.choices([1, 7, 8, 9], [90, 2, 4, 4], k=600)
    prompt = chance.choices([1, 7, 8, 9], [9, 1, 1, 1], k=30) + chance.choice([[], BEGINS, ENDS])
    for bounded in (False, True):
        holder, said, answer = budgets(bounded), list[Any](), list[int]()
        state = holder._init_state_entry(prompt, 50)
        for token in drawn:
            answer.append(token)
            state |= {"output_tok_ids": answer, "force_index": []}
            holder._update_think_state(state)
            said.append({**state, "output_tok_ids": None, "scan_offset": None})
        found.append(said)
    assert found[0] == found[1]


@pytest.mark.parametrize("sequence", [[1], [1, 2], [1, 1, 2], [3], []])
def test_the_last_of_a_sequence_is_found(sequence: list[int]) -> None:
    for tokens in ([], [1], [2, 1], [1, 1, 1, 2, 1], [1, 2, 1, 2, 2], [2, 2, 2]):
        expected = ThinkingBudgetStateHolder._find_last_sequence_index(tokens, sequence)
        assert step_bounds._last_of(tokens, sequence) == expected


class Marks(IncrementalLexer):
    """Counts the characters that are copied."""

    copied = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "buffer":
            self.copied += len(value)
        super().__setattr__(name, value)


def lexer(bounded: bool) -> Marks:
    kind = type("Lexer", (Marks,), {})
    if bounded:
        step_bounds.bound_pieces(kind)
    return kind(terminals_from_literals({"BEGIN": "<think>", "END": "</think>"}))


def test_an_answer_of_many_marks_is_not_copied_with_each() -> None:
    """32,000 of them held an engine's loop for 2 s."""
    one, many = lexer(bounded=True), 20_000
    assert [token.terminal for token in one.feed("<think>" * many) + one.flush()] == ["BEGIN"] * many
    assert one.copied <= many * step_bounds.PIECE


@pytest.mark.parametrize("piece", [1, 2, 7, 50])
def test_marks_are_found_in_pieces_as_in_the_whole(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_bounds, "PIECE", piece)
    text, found = "a <th < <think>b</think> </thi <<think>" * 5 + "<thin", []
    for one in (lexer(bounded=False), lexer(bounded=True)):
        tokens = one.feed(text, ("a <th", " < ", "<think>"), 9) + one.flush()
        marks = [token.terminal for token in tokens if token.terminal in ("BEGIN", "END")]
        found.append(("".join(token.value for token in tokens), marks, sum(token.token_count for token in tokens)))
    assert marks == ["BEGIN", "END", "BEGIN"] * 5
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "parser, begin, end",
    [(Phi4MiniJsonToolParser, "functools[", "]"), (JambaToolParser, "<tool_calls>", "</tool_calls>")],
)
def test_the_end_of_a_call_is_looked_for_where_there_is_one(parser: Any, begin: str, end: str) -> None:
    """Of 50,000 calls without one an expression held an engine's loop for a minute."""
    kind, looked = type("Parser", (parser,), {}), list[str]()
    extract = kind.extract_tool_calls

    def seen(self: Any, model_output: str, request: Any) -> Any:
        looked.append(model_output)
        return extract(self, model_output, request)

    kind.extract_tool_calls = seen
    step_bounds.bound_unended(kind, end)
    one = kind.__new__(kind)
    vars(one).update(tool_calls_start_token=begin, tool_calls_regex=re.compile(f"{begin}(.*?){end}", re.DOTALL))
    for text in (begin * 9, "", "no call"):
        found = one.extract_tool_calls(text, None)
        assert (found.tools_called, found.content) == (False, text) and looked[-1] == ""
    call = json.dumps({"name": "f", "arguments": {"a": 1}})
    call = f"{begin}{call}{end}" if end == "]" else f"{begin}[{call}]{end}"
    assert one.extract_tool_calls(call + begin * 9, None).tools_called and looked[-1] == call
