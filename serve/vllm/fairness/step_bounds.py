"""Bounds how much of an engine's steps, and of its frontend's loop, one request may take: all other requests wait.

xgrammar's rule for `patternProperties` and `propertyNames` takes whitespace after a comma in two places, so each space
doubles what it keeps of an answer: 120 tokens of spaces, which `logit_bias` can ask for, took 0.6 s for each further
token of all requests, and 2.5 GB. So a run of whitespace in JSON is bounded, which xgrammar can do itself.

Other rules may do the same, and expressions do: `(.|\\n)*` six times took 0.04 s for each token after 120, and one mask
for `(.{1,8}){32}` 1.7 s. So the time that each grammar takes to accept tokens and to make masks is measured, and a
grammar that takes longer than any real form ends its own request.

If log-probabilities of a prompt are asked for, vLLM's first model runner (all CPU engines; GPU engines only where its
second lacks something, see VllmConfig.use_v2_model_runner) computes the logits of all tokens of the prompt in a step at
once, each row as long as the vocabulary, in float32 and in several copies: 1,700 tokens took 1.5 GB with a vocabulary
of 49,152, and a step of 8,192 with 151,936 would take more than 20 GB. Its second runner computes 1,024 rows at a time,
and the first now does it in slices too.

vLLM merges the outputs that a stream's client does not read into one, which its frontend then writes in one go: 420,000
log-probabilities took 280 MB, and it wrote them for seconds on the loop that sends everybody's tokens. So such outputs
are bounded.

On that loop vLLM also searches for tool calls in an answer: with each token it searches all that was written so far. A
call in Llama's form with 32,000 characters took 15 ms for each token, one with 500,000 more than a second, and a forced
one in Phi's form 30 ms. So if a search takes long, it is done once for many tokens, and if it takes too long, it ends
its own request. If a stream reports usage with each token, vLLM also counts the reasoning tokens anew each time: 20 ms
after 8,192 tokens; this is done less often, too. When vLLM read a whole answer, it copied the rest at each mark of
reasoning or of a call (2 s for 32,000 marks), and Phi's parser searched for the end of a call from each beginning (60 s
for 50,000 calls without an end).

There vLLM also converts each token to text together with all earlier ones that have no text yet: with the first token
the whole prompt, with later ones all special tokens, which are not shown, and all bytes that form no character, which
`logit_bias` can ask for. 64 answers to a prompt of 100,000 tokens took 0.7 s for each token of all requests.

With a `thinking_token_budget`, vLLM's first runner searches the whole answer at each step, and the prompt once, for the
beginning and end of reasoning: 64 answers of 32,000 tokens without reasoning took 0.8 s of each step.
"""

from __future__ import annotations

import copy
import functools
import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from tokenizers import decoders
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import InputStreamError

from serve.api import answer_version

# As deep as people indent; 32 cost 20 ms of compiling, in a thread that gives way.
WHITESPACE = 32
# Seconds that one step may take for a grammar; real forms take 0.01 to 4 ms to accept a token. And how much all steps
# together may take beyond it.
STEP_S = 0.02
# Seconds of one mask: a text of `maxLength` 500 takes 0.2 s with 151,936 tokens on busy cores, most forms 1 ms.
MASK_S = 0.3
MOST_BEYOND_S = 0.5
# Rows of logits: 80 MB of each copy with a vocabulary of 151,936.
ROWS = 128
# Log-probabilities that wait for clients that do not read: for one stream as many as a plain answer may have; and for
# all streams of an owner, 170 MB.
UNREAD, UNREAD_OF_AN_OWNER = 1 << 16, 1 << 18
# Seconds of one search for tool calls, or of one count of reasoning; most take 0.02 ms. Streams that take longer than
# READ_S share one of READ_ONE_OF parts of the loop's time, and one may exceed LONG_READ_S by MOST_BEYOND_S in all.
READ_S, LONG_READ_S = 0.0005, 0.05
READ_ONE_OF = 4
# Characters of an answer that are searched at once.
PIECE = 4096
# The last tokens of an answer, in which the beginning and end of its reasoning are searched for again: more than are
# drafted.
SEARCHED_AGAIN = 64
# How many tokens before an answer's first one, and how many of an answer that have no text yet, are kept: a character
# has four at most.
BEFORE_ANSWER, WITHOUT_TEXT = 64, 32


def bound_whitespace(compiler: Any) -> None:
    """compiler: xgrammar.GrammarCompiler."""
    of_schema, of_tag = compiler.compile_json_schema, compiler.compile_structural_tag

    @functools.wraps(of_schema)
    def compile_json_schema(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("max_whitespace_cnt", WHITESPACE)
        return of_schema(self, *args, **kwargs)

    @functools.wraps(of_tag)
    def compile_structural_tag(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], str):
            args = (json.dumps(with_bounds(json.loads(args[0]))),)
        return of_tag(self, *args, **kwargs)

    compiler.compile_json_schema = compile_json_schema
    compiler.compile_structural_tag = compile_structural_tag


def with_bounds(tag: Any) -> Any:
    """A structural tag whose JSON contents all have a bound of whitespace; their schemas stay as they are."""
    if isinstance(tag, list):
        return [with_bounds(inner) for inner in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema":
        most = tag.get("max_whitespace_cnt")
        return {**tag, "max_whitespace_cnt": WHITESPACE if most is None else most}
    return {name: with_bounds(inner) for name, inner in tag.items()}


def bound_time(grammar: Any) -> None:
    """grammar: a class of vLLM's StructuredOutputGrammar, whose `accept_tokens` and `fill_bitmask` run within a step. A
    request whose grammar does not accept its token is ended with an error."""
    accept, fill = grammar.accept_tokens, grammar.fill_bitmask

    def spent(self: Any, began_s: float, allowed_s: float) -> float:
        beyond_s: float = getattr(self, "shm_beyond_s", 0.0) + max(0.0, time.thread_time() - began_s - allowed_s)
        self.shm_beyond_s = beyond_s
        return beyond_s

    @functools.wraps(accept)
    def accept_tokens(self: Any, request_id: str, tokens: list[int]) -> bool:
        began_s = time.thread_time()
        accepted: bool = accept(self, request_id, tokens)
        return spent(self, began_s, STEP_S) <= MOST_BEYOND_S and accepted

    @functools.wraps(fill)
    def fill_bitmask(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_s = time.thread_time()
        filled = fill(self, *args, **kwargs)
        spent(self, began_s, MASK_S)
        return filled

    grammar.accept_tokens, grammar.fill_bitmask = accept_tokens, fill_bitmask


def slice_prompt_logprobs(runner: Any) -> None:
    """runner: vllm.v1.worker.gpu_model_runner.GPUModelRunner."""
    compute = runner._get_prompt_logprobs_dict

    @functools.wraps(compute)
    def run(self: Any, hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        """vLLM's function takes from the batch where a request stands in `hidden_states`. So it gets these from the
        slice on, as if an earlier step had computed the tokens before it."""
        found: dict[str, Any] = {}
        for req_id in list(self.num_prompt_logprobs):
            tokens, request = num_scheduled_tokens.get(req_id), self.requests[req_id]
            if tokens is None:
                continue
            computed = request.num_computed_tokens
            try:
                for at in range(0, tokens, ROWS):
                    request.num_computed_tokens = computed + at
                    found |= compute(self, hidden_states[at:], {req_id: min(ROWS, tokens - at)})
                    if req_id not in self.num_prompt_logprobs:
                        break  # it has its whole prompt
            finally:
                request.num_computed_tokens = computed
        return found

    runner._get_prompt_logprobs_dict = run


def bound_unread(collector: Any) -> None:
    """collector: vllm.v1.engine.output_processor.RequestOutputCollector. vLLM aborts a request whose outputs are an
    InputStreamError, and answers with its cause."""
    made, put, get, get_nowait, close = (
        getattr(collector, name) for name in ("__init__", "put", "get", "get_nowait", "close")
    )
    of_owners = Counter[str]()

    def waits(self: Any, number: int) -> None:
        of_owners[self.shm_owner] += number - self.shm_unread
        self.shm_unread = number
        if not of_owners[self.shm_owner]:
            del of_owners[self.shm_owner]

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.shm_owner, self.shm_unread = answer_version.owner(), 0
        made(self, *args, **kwargs)

    @functools.wraps(put)
    def bounded(self: Any, output: Any) -> None:
        put(self, output)
        kept = self.output
        if kept is output or not self.aggregate or not isinstance(kept, RequestOutput):
            return
        waits(self, sum(_number(one.logprobs) for one in kept.outputs))
        if self.shm_unread > UNREAD or of_owners[self.shm_owner] > UNREAD_OF_AN_OWNER:
            waits(self, 0)
            text = f"{UNREAD} log-probabilities of this stream, or {UNREAD_OF_AN_OWNER} of all that you ask for, wait"
            self.output = InputStreamError(
                VLLMValidationError(f"{text} to be read: ask for fewer, or read faster.", parameter="logprobs")
            )

    @functools.wraps(get)
    async def read(self: Any) -> Any:
        output = await get(self)
        waits(self, 0)
        return output

    @functools.wraps(get_nowait)
    def read_nowait(self: Any) -> Any:
        waits(self, 0)
        return get_nowait(self)

    @functools.wraps(close)
    def closed(self: Any) -> None:
        waits(self, 0)
        close(self)

    collector.__init__, collector.put, collector.close = init, bounded, closed
    collector.get, collector.get_nowait = read, read_nowait


class _Slow:
    """Work on the loop that is repeated with each token and takes long: all of it together gets a part of the loop's
    time."""

    def __init__(self) -> None:
        self._members = WeakSet[Any]()

    def until_s(self, one: Any, took_s: float) -> float:
        """When the work may be repeated after it took so long; 0.0: with the next token."""
        if took_s <= READ_S:
            self._members.discard(one)
            return 0.0
        self._members.add(one)
        return time.monotonic() + READ_ONE_OF * took_s * len(self._members)

    def ended(self, one: Any) -> None:
        self._members.discard(one)


def bound_reading(parser: Any) -> None:
    """parser: vllm.parser.abstract_parser.DelegatingParser, of which each stream has one. What its streams' generators
    raise vLLM tells the client. When many tokens come at once, Llama's parser leaves out a short second call, as it
    does where vLLM itself puts together what waits for the loop."""
    read, count = parser.parse_delta, parser.count_reasoning_tokens
    readers, counters = _Slow(), _Slow()

    @functools.wraps(read)
    def parse_delta(
        self: Any, delta_text: str, delta_token_ids: list[int], *args: Any, finished: bool, **kwargs: Any
    ) -> Any:
        self.shm_goes_on = not finished
        held: list[Any] | None = self.__dict__.get("shm_held")  # until when, the text, its tokens
        if held is not None:
            held[1] += delta_text
            held[2] += delta_token_ids
            if not finished and time.monotonic() < held[0]:
                return None
            _, delta_text, delta_token_ids = held
            self.shm_held = None
        began_s = time.thread_time()
        found = read(self, delta_text, delta_token_ids, *args, finished=finished, **kwargs)
        if finished:
            readers.ended(self)
            counters.ended(self)
            return found
        took_s = time.thread_time() - began_s
        self.shm_beyond_s = getattr(self, "shm_beyond_s", 0.0) + max(0.0, took_s - LONG_READ_S)
        if self.shm_beyond_s > MOST_BEYOND_S:
            text = "The answer's calls of tools are too long to be read while they are written: ask without `stream`."
            raise VLLMValidationError(text, parameter="stream")
        if until_s := readers.until_s(self, took_s):
            self.shm_held = [until_s, "", []]
        return found

    @functools.wraps(count)
    def count_reasoning_tokens(self: Any, token_ids: Sequence[int]) -> int:
        counted: tuple[float, int] | None = self.__dict__.get("shm_counted")  # until when, how many
        if counted is not None and self.__dict__.get("shm_goes_on") and time.monotonic() < counted[0]:
            return counted[1]
        began_s = time.thread_time()
        found: int = count(self, token_ids)
        self.shm_counted = counters.until_s(self, time.thread_time() - began_s), found
        return found

    parser.parse_delta, parser.count_reasoning_tokens = parse_delta, count_reasoning_tokens


def bound_without_text(detokenizer: Any, slow: Any) -> None:
    """detokenizer: vllm.v1.engine.detokenizer.FastIncrementalDetokenizer; slow: SlowIncrementalDetokenizer, for
    tokenizers that are Python."""
    made, step, slow_step = detokenizer.__init__, detokenizer._protected_step, slow.decode_next

    @functools.wraps(made)
    def init(self: Any, tokenizer: Any, request: Any) -> None:
        if request.prompt_token_ids and len(request.prompt_token_ids) > BEFORE_ANSWER:
            request = copy.copy(request)
            request.prompt_token_ids = request.prompt_token_ids[-BEFORE_ANSWER:]
        made(self, tokenizer, request)
        self.shm_without_text = []
        self.shm_unseen = _special_ids(self.tokenizer) if self.skip_special_tokens else frozenset()

    @functools.wraps(step)
    def bounded(self: Any, next_token_id: int) -> str | None:
        if next_token_id in self.shm_unseen:
            return None
        text: str | None = step(self, next_token_id)
        without: list[int] = self.shm_without_text
        if text is not None:
            without.clear()
            return text
        without.append(next_token_id)
        if len(without) < WITHOUT_TEXT:
            return None
        text = self.tokenizer.decode(without, skip_special_tokens=self.skip_special_tokens)
        without.clear()
        self.stream = decoders.DecodeStream(skip_special_tokens=self.skip_special_tokens)
        return text

    @functools.wraps(slow_step)
    def slow_bounded(self: Any, next_token_id: int) -> str:
        text: str = slow_step(self, next_token_id)
        if len(self.tokens) - self.read_offset > WITHOUT_TEXT:
            self.prefix_offset = self.read_offset = len(self.tokens)
        return text

    detokenizer.__init__, detokenizer._protected_step, slow.decode_next = init, bounded, slow_bounded


def bound_search(holder: Any) -> None:
    """holder: vllm.v1.sample.thinking_budget_state.ThinkingBudgetStateHolder, of its first runner."""
    update = holder._update_think_state

    @functools.wraps(update)
    def bounded(self: Any, state: dict[str, Any]) -> None:
        update(self, state)
        # It has now searched everything; only what drafts and unfinished steps may still change is searched again.
        state["scan_offset"] = max(state["scan_offset"], len(state["output_tok_ids"]) - SEARCHED_AGAIN)

    holder._update_think_state = bounded
    holder._find_last_sequence_index = staticmethod(_last_of)


def _last_of(tokens: list[int], sequence: list[int]) -> int:
    """The index at which the last such sequence begins, -1 if there is none."""
    if not sequence:
        return -1
    turned, ends = tokens[::-1], sequence[::-1]
    at = -1
    try:
        while True:
            at = turned.index(ends[0], at + 1)
            if turned[at : at + len(ends)] == ends:
                return len(tokens) - at - len(ends)
    except ValueError:
        return -1


def bound_pieces(lexer: Any) -> None:
    """lexer: vllm.parser.engine.incremental_lexer.IncrementalLexer, which copies what is left with each mark."""
    feed = lexer.feed

    @functools.wraps(feed)
    def in_pieces(self: Any, text: str, token_texts: tuple[str, ...] = (), token_count: int = 0) -> list[Any]:
        if len(text) <= PIECE:
            return list(feed(self, text, token_texts, token_count))
        counts, found = self._char_token_counts(text, token_texts, token_count), list[Any]()
        for at in range(0, len(text), PIECE):
            self.buffer += text[at : at + PIECE]
            self._token_counts += counts[at : at + PIECE]
            found += self._drain()
        return found

    lexer.feed = in_pieces


def bound_unended(parser: Any, end: str) -> None:
    """parser: of vLLM. Its expression searches for the end of a call from each beginning of one."""
    extract = parser.extract_tool_calls

    @functools.wraps(extract)
    def ended(self: Any, model_output: str, request: Any) -> Any:
        found = extract(self, "".join(model_output.rpartition(end)[:2]), request)
        if not found.tools_called:
            found.content = model_output
        return found

    parser.extract_tool_calls = ended


@functools.cache
def _special_ids(tokenizer: Any) -> frozenset[int]:
    """tokenizer: tokenizers.Tokenizer; an engine has one."""
    return frozenset(number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def _number(logprobs: Sequence[Any] | None) -> int:
    return len(logprobs) * len(logprobs[0] or ()) if logprobs else 0
