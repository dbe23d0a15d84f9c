"""Makes an owner's requests wait in an engine behind each other, instead of all of them ahead of everybody else's.

vLLM takes waiting requests in the order in which they came, so an owner who sent a hundred long prompts at once had an
engine to himself until they were computed. With `--scheduling-policy priority` it takes the smallest number first. Here
each request gets the number that start-time fair queueing gives it (Goyal, Vin and Cheng, SIGCOMM 1996): where its
owner's earlier requests end if each took as long as it has tokens, but not before what is being served now. An owner
who asks little is next, however much others have asked; an owner who is alone has the whole engine; rollouts of a job
that trains wait behind everybody. Where KV memory ends, vLLM preempts the largest number first.

An answer is begun on the frontend's loop, and told to the core, one after the other: behind sixty requests of 256 short
prompts a neighbour's question waited fifty seconds before it had a number at all. So of one owner's answers only twice
as many as an engine writes together, and OF_AN_OWNER at least, are begun before others have ended; and a request of
many prompts is prepared, all of it at once, when all of its owner's before it have begun.

On that loop requests are read and checked, too: behind two hundred of 1,000 messages each a neighbour's question waited
31 s. So of one owner's requests only those are read at once that have a place: of AT_THE_DOOR a large one takes eight,
and a small one takes one (where each had one of four, an owner alone had a seventh fewer short answers). One that waits
for something else, such as an adapter, has none meanwhile, or it would keep the others from being read.

Before that, one thread of the frontend renders templates and tokenizes texts in the order in which they came, and vLLM
tokenizes a text to its end before it says that it is too long: 660,000 letters took more than a second where 8,192
tokens are allowed, and 8 MiB 16 s. So owners take turns there too, and a long text is read piece by piece until it has
too many tokens. Before that its words are counted, which takes a tenth of the time.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import BaseRenderer, _SwappableExecutor
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor

from serve.adapters.adapters import waiting
from serve.api import answer_version
from serve.api.turns import ROLLOUTS, Room, Rooms, ThreadsInTurns, Turns, behind, mark_of, number

# A text with more bytes than this for each token that a prompt may have is first read in pieces: real texts have three
# or four. (Counted by characters, a million emoji passed for 131,072 tokens and were 2.7 million, 4.2 s.) The second
# number is a tolerance in tokens: a text that is cut into pieces may have a few more than the whole.
LONG_BYTES, SPARE_TOKENS = 8, 1024
_PIECE_CHARS = 4096  # at least
# Words of a text with more characters than this for each token that a prompt may have are counted, in as many as the
# second number says: a real text has a word in six.
_WORDY_CHARS, _COUNTED_CHARS = 4, 16
_WORD = re.compile(" [A-Za-z]")
_LETTERS = "".join(f" {chr(first + at)}" for first in (65, 97) for at in range(26))
_SPACES = str.maketrans("Ġ▁", "  ")
OF_AN_OWNER, AT_THE_DOOR = 256, 32
_BYTES_OF_A_PLACE, _PLACES_AT_MOST = 4096, 8


def apply() -> None:
    """Call once per process, before it makes its engine."""
    AsyncLLM.generate = _in_turn(AsyncLLM.generate)
    AsyncLLM.encode = _in_turn(AsyncLLM.encode)
    OpenAIServingCompletion.render_completion_request = _prepared_in_turn(
        OpenAIServingCompletion.render_completion_request
    )
    OpenAIServingModels.resolve_lora = _outside(OpenAIServingModels.resolve_lora)
    read_in_pieces(BaseRenderer)
    read_in_turns(_SwappableExecutor)
    pictures_in_turns(BaseRenderer)
    OutputProcessor.add_request = _noted(OutputProcessor.add_request)
    OutputProcessor.process_outputs = _counted(OutputProcessor.process_outputs)


class FrontDoor:
    """ASGI application around vLLM's, in AnswerVersions'. A request whose client has left while it waits for its place
    takes one for no longer than it takes to see that."""

    def __init__(self, app: Any, engine: AsyncLLM) -> None:
        self.app, self._engine, self._rooms = app, engine, Rooms(AT_THE_DOOR)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = answer_version.current()
        if answer is None or scope["type"] != "http":  # "lifespan" lasts as long as the server
            await self.app(scope, receive, send)
            return
        answer.waits = Waits(waiting(self._engine))
        with answer.waits:
            if answer.owner in ("", ROLLOUTS):
                await self.app(scope, receive, send)
                return
            answer.place = self._rooms.of(answer.owner).take(_places(scope))
            async with answer.place:
                await self.app(scope, receive, send)


def _places(scope: Any) -> int:
    """How many of its owner's places at the door a request takes: by its size, since reading it takes as long."""
    size = next((value for name, value in scope.get("headers", ()) if name == b"content-length"), b"")
    return min(1 + int(size) // _BYTES_OF_A_PLACE, _PLACES_AT_MOST) if size.isdigit() else _PLACES_AT_MOST


def _outside(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """resolve: brings and loads an adapter, which may take a minute."""

    @functools.wraps(resolve)
    async def run(self: Any, name: str) -> Any:
        answer = answer_version.current()
        if answer is None or answer.place is None:
            return await resolve(self, name)
        answer_version.is_read()
        found = await resolve(self, name)
        await answer.place.take()
        return found

    return run


class Waits:
    """Counts one request among those of `number` that the engine does not have yet, from the beginning to `end`."""

    def __init__(self, number: Counter[str], adapter: str = "") -> None:
        self._number, self._adapter, self._counted = number, adapter, False

    def __enter__(self) -> None:
        self._number[self._adapter] += 1
        self._counted = True

    def uses(self, adapter: str) -> None:
        """Counts it by this adapter from now on."""
        if self._counted and adapter != self._adapter:
            self.end()
            self._adapter = adapter
            self.__enter__()

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        if self._counted:
            self._counted = False
            self._number[self._adapter] -= 1
            if not self._number[self._adapter]:
                del self._number[self._adapter]


@dataclass(slots=True)
class Turn:
    """The turn of one request. tokens: of its prompt; unserved: how many of its choices have no token yet; waits: until
    the engine has it."""

    turns: Turns
    owner: str
    place: int
    tokens: int
    unserved: int
    waits: Waits

    def computed(self, tokens: int, *, first: bool) -> None:
        """A step has written this many tokens of one choice. first: whether they are its first."""
        if first:
            self.unserved -= 1
            self.turns.served(self.place)
        self.turns.took(self.owner, tokens)

    def ended(self) -> None:
        self.turns.took(self.owner, -self.tokens * self.unserved)


TURN = "shm_turn"  # attribute of a RequestState, of one choice
_TURN: ContextVar[Turn | None] = ContextVar("turn", default=None)


def _in_turn(answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(answer)
    def run(self: AsyncLLM, *args: Any, **kwargs: Any) -> Any:
        answer_version.is_read()
        if self.vllm_config.scheduler_config.policy != "priority":  # a deployment's own arguments may say so
            return answer(self, *args, **kwargs)
        given = dict(zip(("prompt", "params"), args, strict=False)) | kwargs
        params = given.get("params") or given.get("sampling_params") or given.get("pooling_params")
        turns = self.__dict__.setdefault("shm_turns", Turns())
        outputs = functools.partial(answer, self, *args, **kwargs)
        adapter = given.get("lora_request")
        waits = Waits(waiting(self), adapter.lora_name if adapter is not None else "")
        owner = answer_version.owner()
        return _placed(outputs, _room(self, owner), waits, turns, owner, _tokens(given.get("prompt")), params)

    return run


def _room(engine: AsyncLLM, owner: str) -> Room:
    if owner == ROLLOUTS:  # bounded by their job, and one that waited here would not be interrupted with the others
        return Room(sys.maxsize)
    places = max(OF_AN_OWNER, 2 * engine.vllm_config.scheduler_config.max_num_seqs)
    rooms: Rooms = engine.__dict__.setdefault("shm_rooms", Rooms(places))
    return rooms.of(owner)


def _prepared_in_turn(render: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(render)
    async def run(self: OpenAIServingCompletion, request: Any) -> Any:
        if not isinstance(request.prompt, list) or len(request.prompt) < 2 or isinstance(request.prompt[0], int):
            return await render(self, request)
        answer_version.is_read()
        async with _room(self.engine_client, answer_version.owner()).take(1):
            return await render(self, request)

    return run


async def _placed(
    answer: Callable[..., AsyncGenerator[Any, None]],
    room: Room,
    waits: Waits,
    turns: Turns,
    owner: str,
    tokens: int,
    params: Any,
) -> AsyncGenerator[Any, None]:
    choices = getattr(params, "n", 1) or 1
    with waits:
        async with room.take(choices):
            turn = Turn(turns, owner, turns.enter(owner, choices * tokens), tokens, choices, waits)
            outputs = answer(priority=number(behind(owner, turn.place), mark_of(owner)))
            _TURN.set(turn)  # for _noted, which this task comes to before it calls for another answer
            try:
                async for output in outputs:
                    yield output
            finally:
                await outputs.aclose()
                turn.ended()


def _noted(add_request: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(add_request)
    def run(self: OutputProcessor, request: Any, *args: Any, **kwargs: Any) -> None:
        add_request(self, request, *args, **kwargs)
        if (turn := _TURN.get()) is not None:
            turn.waits.end()
        setattr(self.request_states[request.request_id], TURN, turn)

    return run


def _counted(process: Callable[..., Any]) -> Callable[..., Any]:
    """process: OutputProcessor.process_outputs, of each step. Tokens count as they are written, even if a client gets
    them in one piece or leaves before: otherwise a client that left early owed nothing, and was ahead of those that had
    paid for everything."""

    @functools.wraps(process)
    def run(self: OutputProcessor, outputs: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            state = self.request_states.get(output.request_id)
            if state is not None and (turn := getattr(state, TURN, None)) is not None:
                turn.computed(len(output.new_token_ids), first=state.is_prefilling)
        return process(self, outputs, *args, **kwargs)

    return run


def _tokens(prompt: Any) -> int:
    found = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    return max(1, len(found)) if found is not None else 1


def read_in_pieces(renderer: Any) -> None:
    """renderer: BaseRenderer. Reading a text stops as soon as its pieces have more tokens than a prompt may have, and
    does not begin where its words are more. Of one that is to be cut no more is read than what has the tokens that are
    left of it."""
    tokenize = renderer._tokenize_prompt

    @functools.wraps(tokenize)
    def _tokenize_prompt(self: Any, prompt: Any, params: Any) -> Any:
        text, most = prompt["prompt"], params.max_input_tokens
        if params.truncate_prompt_tokens is not None:
            return tokenize(self, {**prompt, "prompt": _cut(text, params, self.get_tokenizer())}, params)
        if most is None:
            return tokenize(self, prompt, params)
        tokenizer, piece = self.get_tokenizer(), max(most, _PIECE_CHARS)
        if len(text) > _WORDY_CHARS * most:
            if (each := self.__dict__.get("shm_words")) is None:
                each = self.__dict__["shm_words"] = words_of_a_token(tokenizer)
            words = 0
            for at in range(0, min(len(text), _COUNTED_CHARS * most) if each else 0, piece):
                words += len(_WORD.findall(text, at, at + piece))
                if words > each * most:
                    raise _too_long(params)
        if _is_longer(text, LONG_BYTES * most):
            tokens = 0
            for at in range(0, len(text), piece):
                tokens += len(tokenizer(text[at : at + piece], add_special_tokens=False)["input_ids"])
                if tokens > most + SPARE_TOKENS:
                    raise _too_long(params)
        return tokenize(self, prompt, params)

    renderer._tokenize_prompt = _tokenize_prompt


def _cut(text: str, params: Any, tokenizer: Any) -> str:
    """A part of the text with more tokens than are left of it. serve.vllm.fairness.request_bounds has cut it by the
    longest token of the vocabulary before, which may have 80 characters: most tokens have four, and an emoji has
    three tokens or four."""
    left = params.truncate_prompt_tokens
    most = (left if left >= 0 else params.max_truncation_tokens or 0) + SPARE_TOKENS
    piece, tokens = most // 2, 0
    of_the_end = (params.truncation_side or tokenizer.truncation_side) == "left"
    for at in range(0, len(text) - piece, piece):
        part = text[len(text) - at - piece : len(text) - at] if of_the_end else text[at : at + piece]
        tokens += len(tokenizer(part, add_special_tokens=False)["input_ids"])
        if tokens > most:
            return text[len(text) - at - piece :] if of_the_end else text[: at + piece]
    return text


def words_of_a_token(tokenizer: Any) -> int:
    """How many words one of its tokens has at most, so that a text has no fewer tokens than words divided by this; 0
    where that says nothing of its tokens. A word is a space before a letter; that a token ends with counts as one."""
    vocabulary = [*tokenizer.get_vocab()]
    if not all(isinstance(token, str) for token in vocabulary):  # a checkpoint's own tokenizer may have bytes
        return 0
    most = max((len(_WORD.findall(token.translate(_SPACES) + "a")) for token in vocabulary), default=0)
    most = max(most, 1)
    # A tokenizer may drop letters, or make one token of all that it does not know.
    tokens = len(tokenizer(_LETTERS, add_special_tokens=False)["input_ids"])
    return most if tokens * most >= len(_LETTERS) // 2 else 0


def _too_long(params: Any) -> VLLMValidationError:
    """In vLLM's words, which gateways and clients know."""
    least = params.max_input_tokens + 1
    return VLLMValidationError(
        f"This model's maximum context length is {params.max_total_tokens} tokens. However, your prompt contains at "
        f"least {least} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
        "length of the input prompt.",
        parameter="input_tokens",
        value=least,
    )


def _is_longer(text: str, size: int) -> bool:
    return 4 * len(text) > size and len(text.encode(errors="surrogatepass")) > size


def read_in_turns(executor: Any) -> None:
    """executor: _SwappableExecutor, whose threads do all that is done with texts before the core has a request. It
    replaces them if one does not return."""
    made, replaced, ended = executor.__init__, executor.replace_inner, executor.shutdown

    def turns(self: Any) -> ThreadsInTurns:
        return ThreadsInTurns(self._inner.submit, self._max_workers, max(1, self._max_workers // 2))

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.shm_turns = turns(self)

    def submit(self: Any, do: Any, /, *args: Any, **kwargs: Any) -> Any:
        return _asked(self.shm_turns, do, *args, **kwargs)

    @functools.wraps(replaced)
    def replace_inner(self: Any) -> None:
        waiting = ThreadsInTurns(self._inner.submit, 0, 0)
        waiting.take_over(self.shm_turns)  # first: threads that are given up take nothing more
        replaced(self)
        self.shm_turns = turns(self)
        self.shm_turns.take_over(waiting)

    @functools.wraps(ended)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        self.shm_turns.cancel()
        ended(self, *args, **kwargs)

    executor.__init__, executor.submit, executor.replace_inner = init, submit, replace_inner
    executor.shutdown = shutdown


def pictures_in_turns(renderer: Any) -> None:
    """renderer: BaseRenderer, which has one more thread that reads pictures and sounds."""
    made = renderer.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        pool = self._mm_executor
        pool.submit = functools.partial(_asked, ThreadsInTurns(pool.submit, 1, 1))

    renderer.__init__ = init


def _asked(turns: ThreadsInTurns, do: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Whoever stops waiting for work cancels it. It is done in the context of who asks (serve.vllm.owner_caches)."""
    return turns.submit(answer_version.owner(), functools.partial(copy_context().run, do, *args, **kwargs))
