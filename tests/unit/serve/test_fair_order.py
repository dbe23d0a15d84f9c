"""What vLLM is told of a request's place in its queue, and whose texts it reads next."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import _SwappableExecutor
from vllm.renderers.hf import HfRenderer
from vllm.renderers.params import TokenizeParams

from serve.adapters.adapters import waiting
from serve.api import answer_version, fair_order
from serve.api.turns import ROLLOUTS, Turns, mark_of, number, place_in


class Outputs:
    """Stands for vLLM's OutputProcessor."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def add_request(self, request: Any) -> None:
        self.request_states[request.request_id] = SimpleNamespace(is_prefilling=True, shm_turn=None)

    def process_outputs(self, outputs: list[Any]) -> None:
        for one in outputs:
            self.request_states[one.request_id].is_prefilling = False


ADD, STEP = fair_order._noted(Outputs.add_request), fair_order._counted(Outputs.process_outputs)


class Engine:
    """Stands for vLLM's AsyncLLM; notes the numbers that it is given."""

    def __init__(self, policy: str = "priority") -> None:
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy, max_num_seqs=2))
        self.places: list[int | None] = []
        self.closed = 0

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **more: Any) -> AsyncGenerator[Any]:
        self.places.append(None if (told := more.get("priority")) is None else place_in(told))
        outputs = Outputs()
        for choice in range(getattr(sampling_params, "n", 1)):
            ADD(outputs, SimpleNamespace(request_id=f"{choice}_{request_id}"))
        try:
            for token in range(3):
                for name in outputs.request_states:
                    STEP(outputs, [SimpleNamespace(request_id=name, new_token_ids=[token])])
                yield token
        finally:
            self.closed += 1

    async def encode(self, prompt: Any, pooling_params: Any, request_id: str, **more: Any) -> AsyncGenerator[Any]:
        self.places.append(None if (told := more.get("priority")) is None else place_in(told))
        outputs = Outputs()
        ADD(outputs, SimpleNamespace(request_id=request_id))
        STEP(outputs, [SimpleNamespace(request_id=request_id, new_token_ids=[])])
        yield 1.0


GENERATE, ENCODE = fair_order._in_turn(Engine.generate), fair_order._in_turn(Engine.encode)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine()


def prompt(tokens: int) -> dict[str, Any]:
    return {"prompt_token_ids": [1] * tokens}


async def ask(engine: Engine, owner: str, tokens: int) -> list[Any]:
    answer_version._ANSWER.set(answer_version.Answer(owner=owner))
    return [one async for one in GENERATE(engine, prompt(tokens), None, "r")]


async def test_each_owner_stands_behind_what_he_has_asked_and_had(engine: Engine) -> None:
    assert len(await ask(engine, "a", 100)) == 3
    await ask(engine, "a", 100)
    await ask(engine, "b", 5)
    # 100 of the prompt and 3 that were written; then b, behind what was being served.
    assert engine.places == [0, 103, 103] and engine.closed == 3


async def test_who_leaves_before_he_was_served_owes_nothing(engine: Engine) -> None:
    answer_version._ANSWER.set(answer_version.Answer(owner="a"))
    waiting = GENERATE(engine, prompt(1000), None, "r")
    assert await waiting.asend(None) == 0
    await waiting.aclose()
    assert engine.closed == 1
    await ask(engine, "a", 1)
    assert engine.places == [0, 1001]


async def test_what_is_written_counts_though_its_client_gets_it_in_one_piece_or_leaves(engine: Engine) -> None:
    """Such a one owed nothing, and came before whoever had read an answer to its end, time after time."""
    turns, outputs = Turns(), Outputs()
    turns.enter("a", 20)
    turn = fair_order.Turn(turns, "a", turns.enter("a", 2 * 10), 10, 2, fair_order.Waits(Counter(), ""))
    fair_order._TURN.set(turn)
    for name in ("0", "1"):
        ADD(outputs, SimpleNamespace(request_id=name))
    for _ in range(50):
        STEP(outputs, [SimpleNamespace(request_id="0", new_token_ids=[7])])
    turn.ended()
    assert turns.enter("a", 1) == 20 + 20 + 50 - 10, "one of its choices was not begun"
    assert turns.enter("b", 1) == turn.place == 20, "what is being served"


class Read:
    """An engine's frontend behind its door: `read` has the owners of all requests that it has begun to read, each of
    which goes on when it is let: `go` by the name of a step."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.read, self.go = engine, list[str](), asyncio.Event()
        self.resolved, self.end = asyncio.Event(), asyncio.Event()
        self.app = answer_version.AnswerVersions(fair_order.FrontDoor(self, engine))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.read.append(answer_version.owner())
        if scope["path"] == "adapter":
            await fair_order._outside(lambda *_: self.resolved.wait())(None, "ad@v1")
            self.read.append("resolved")
        await self.go.wait()
        if scope["path"] == "refused":
            raise ValueError
        begun = GENERATE(self.engine, prompt(1), None, "r")
        await anext(begun)
        current = answer_version.current()
        assert current is not None
        answer_version._for_this_answer(Outputs.add_request)(Outputs(), SimpleNamespace(request_id="r"))  # type: ignore[arg-type]
        await self.end.wait()
        await begun.aclose()

    async def asked(
        self, owner: str, number: int = 1, path: str = "/", size: int | None = None
    ) -> list[asyncio.Task[None]]:
        headers = [(b"x-appliance-owner", owner.encode())] if owner else []
        if size is not None:
            headers.append((b"content-length", b"%d" % size))
        scope = {"type": "http", "path": path, "headers": headers}
        asked = [asyncio.create_task(self.app(scope, None, None)) for _ in range(number)]
        await self.settled()
        return asked

    async def settled(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


LARGE_AT_ONCE = fair_order.AT_THE_DOOR // fair_order._PLACES_AT_MOST


@pytest.mark.parametrize(("size", "read"), [(None, 4), (8 << 20, 4), (32 << 10, 4), (10_000, 10), (200, 32)])
async def test_small_requests_of_one_owner_are_read_more_at_once_than_large_ones(
    engine: Engine, size: int | None, read: int
) -> None:
    """Four of an owner alone, however small, were too few: 1,000 short streams took a seventh longer."""
    door = Read(engine)
    flood = await door.asked("a", 50, size=size)
    assert len(door.read) == read
    door.go.set()
    door.end.set()
    await asyncio.gather(*flood)
    assert len(door.read) == 50 and not waiting(engine)


async def test_of_one_owners_requests_some_are_read_before_others_are_computed(engine: Engine) -> None:
    """Each is read on the loop that answers everybody: two hundred long conversations took half a minute."""
    door, most = Read(engine), LARGE_AT_ONCE
    flood = await door.asked("a", 50)
    assert door.read == ["a"] * most and waiting(engine)[""] == 50, "who drains the engine waits for all of them"
    flood[most].cancel()
    flood[-1].cancel()
    for other in ("b", ROLLOUTS, ROLLOUTS, "", ""):
        flood += await door.asked(other, most)
    assert door.read[most:] == ["b"] * most + [ROLLOUTS] * 2 * most + [""] * 2 * most, "others are not behind them"
    assert waiting(engine)[""] == 48 + 5 * most
    door.go.set()
    await door.settled()
    await asyncio.sleep(0.01)
    assert door.read.count("a") == 48 and not waiting(engine), "an answer that is computed has no place there"
    door.end.set()
    await asyncio.gather(*flood, return_exceptions=True)
    assert not waiting(engine)


async def test_a_request_that_waits_for_an_adapter_or_is_refused_keeps_no_place_at_the_door(engine: Engine) -> None:
    door, most = Read(engine), LARGE_AT_ONCE
    flood = await door.asked("a", 3 * most, "adapter")
    assert len(door.read) == 3 * most and waiting(engine)[""] == 3 * most
    door.resolved.set()
    await door.settled()
    assert door.read.count("resolved") == most, "then the text is read"
    flood += await door.asked("a", most, "refused")
    assert len(door.read) == 4 * most
    door.go.set()
    door.end.set()
    told = await asyncio.gather(*flood, return_exceptions=True)
    assert sum(isinstance(one, ValueError) for one in told) == most and len(door.read) == 7 * most
    assert not waiting(engine)


async def test_of_many_answers_of_one_owner_some_are_begun_before_others_have_ended(engine: Engine) -> None:
    """Each is begun on the loop that answers everybody: fifteen thousand of one owner's took fifty seconds."""
    answer_version._ANSWER.set(answer_version.Answer(owner="a"))
    begun = [GENERATE(engine, prompt(1), SimpleNamespace(n=16), str(one)) for one in range(40)]
    waiting = [asyncio.ensure_future(anext(one)) for one in begun]
    await asyncio.sleep(0.01)
    assert len(engine.places) == fair_order.OF_AN_OWNER // 16 and sum(one.done() for one in waiting) == 16
    assert len(await ask(engine, "b", 1)) == 3, "another owner's is not behind them"
    waiting[20].cancel()
    await asyncio.gather(waiting[20], return_exceptions=True)
    for one in begun[:16]:
        await one.aclose()
    await asyncio.sleep(0.01)
    assert sum(one.done() for one in waiting) == 16 + 1 + 16, "as many as have ended, without the one that has left"
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for one in begun:
        await one.aclose()


async def test_many_prompts_are_prepared_when_those_before_them_have_begun(engine: Engine) -> None:
    """All of a request's prompts are prepared at once: those of sixty requests took half a minute."""
    prepared = []

    async def render(served: Any, request: Any) -> None:
        prepared.append(request.prompt)

    async def asked(owner: str, given: Any) -> None:
        answer_version._ANSWER.set(answer_version.Answer(owner=owner))
        await fair_order._prepared_in_turn(render)(SimpleNamespace(engine_client=engine), SimpleNamespace(prompt=given))

    answer_version._ANSWER.set(answer_version.Answer(owner="a"))
    begun = GENERATE(engine, prompt(1), SimpleNamespace(n=fair_order.OF_AN_OWNER), "r")
    assert await anext(begun) == 0
    waiting = asyncio.ensure_future(asked("a", ["x", "y"]))
    for owner, given in (("a", "x"), ("a", [1, 2, 3]), ("a", ["x"]), ("b", ["x", "y"])):
        await asked(owner, given)
    assert prepared == ["x", [1, 2, 3], ["x"], ["x", "y"]] and not waiting.done()
    await begun.aclose()
    await waiting
    assert len(prepared) == 5


async def test_each_choice_has_its_prompt_computed(engine: Engine) -> None:
    answer_version._ANSWER.set(answer_version.Answer(owner="a"))
    assert [one async for one in GENERATE(engine, prompt(10), SimpleNamespace(n=4), "r")] == [0, 1, 2]
    await ask(engine, "a", 1)
    assert engine.places == [0, 4 * 10 + 4 * 3]


async def test_embeddings_take_their_turn_as_vllm_calls_for_them(engine: Engine) -> None:
    answer_version._ANSWER.set(answer_version.Answer(owner="a"))
    for _ in range(2):
        found = [one async for one in ENCODE(engine, request_id="r", prompt=prompt(7), pooling_params=None, priority=0)]
        assert len(found) == 1
    assert engine.places == [0, 7]


async def test_rollouts_stand_behind_everybody(engine: Engine) -> None:
    await ask(engine, ROLLOUTS, 10)
    await ask(engine, "a", 100_000)
    await ask(engine, "a", 1)
    await ask(engine, ROLLOUTS, 10)
    first, *users, last = engine.places
    assert max(users) < first < last, "and among each other as they came"
    assert -(2**63) <= number(last, mark_of(ROLLOUTS)) < 2**63, "what vLLM takes as a priority"


async def test_a_deployment_may_have_another_order(engine: Engine) -> None:
    engine = Engine("fcfs")
    assert len([one async for one in GENERATE(engine, prompt(7), None, "r")]) == 3 and engine.places == [None]


async def test_the_owner_is_what_the_gateway_says() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        current = answer_version.current()
        assert current is not None
        seen.append(current.owner)

    for headers in ([(b"x-appliance-owner", b"abc")], []):
        await answer_version.AnswerVersions(app)({"type": "http", "headers": headers}, None, None)
    assert seen == ["abc", ""]


def test_a_text_that_is_too_long_is_not_read_to_its_end() -> None:
    """vLLM made all its tokens, on the one thread that does so for everybody, and then said that they are too many."""
    read = list[int]()

    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
        """A token for each letter; spaces have one together."""
        read.append(len(text))
        return {"input_ids": [1] * len(text.replace(" ", "") or " ")}

    bounded = type("Bounded", (HfRenderer,), {})
    fair_order.read_in_pieces(bounded)
    renderer: Any = object.__new__(bounded)
    renderer.get_tokenizer = lambda: tokenizer
    renderer._wants_offsets = lambda *_: False
    renderer.shm_words = 0  # of other tokenizers
    params = TokenizeParams(max_total_tokens=2000)
    with pytest.raises(VLLMValidationError, match="maximum context length is 2000 tokens.*at least 2001 input tokens"):
        renderer._tokenize_prompt({"prompt": " " * 32_000 + "x" * 1_000_000}, params)
    assert read == [4096] * 9
    read.clear()
    with pytest.raises(VLLMValidationError, match="at least 2001 input tokens"):
        renderer._tokenize_prompt({"prompt": "👩" * 15_000}, params)
    assert read == [4096], "few characters, and many bytes"
    for text, tokens in (("x" * 1999, 1999), (" " * 100_000, 1)):
        assert len(renderer._tokenize_prompt({"prompt": text}, params)["prompt_token_ids"]) == tokens


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cut_to", [1, 2000, -1])
@pytest.mark.parametrize("letters", ["abcdefghijklmnopqrstuvwxyz", "\U0001f680\U0001f681\U0001f682"])
def test_of_a_text_that_is_to_be_cut_little_is_read_though_some_tokens_are_long(
    cut_to: int, side: Any, letters: str
) -> None:
    """By the longest token of a vocabulary, 81 characters, 200,000 tokens were made for 8,000, and then, of emoji,
    442,000."""
    read = list[int]()

    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
        read.append(len(text.encode()))
        return {"input_ids": [*text.encode()]}

    bounded = type("Bounded", (HfRenderer,), {})
    fair_order.read_in_pieces(bounded)
    renderer: Any = object.__new__(bounded)
    renderer.get_tokenizer = lambda: tokenizer
    renderer._wants_offsets = lambda *_: False
    params = TokenizeParams(max_total_tokens=3000, truncate_prompt_tokens=cut_to, truncation_side=side)
    text = letters * 20_000
    tokens = cut_to if cut_to > 0 else 3000
    expected = [*(text.encode()[-tokens:] if side == "left" else text.encode()[:tokens])]
    found = renderer._tokenize_prompt({"prompt": text}, params)["prompt_token_ids"]  # vLLM cuts it afterwards
    assert (found[-tokens:] if side == "left" else found[:tokens]) == expected
    assert sum(read) <= 2 * 2 * (tokens + fair_order.SPARE_TOKENS)
    read.clear()
    renderer._tokenize_prompt({"prompt": text[:500]}, params)
    assert read == [len(text[:500].encode())]


class Words:
    """A tokenizer whose vocabulary is these texts; what it does not know is one token for each run."""

    def __init__(self, *vocabulary: str) -> None:
        self.vocabulary = vocabulary
        self.read = list[str]()

    def get_vocab(self) -> dict[str, int]:
        return {text: at for at, text in enumerate(self.vocabulary)}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.read.append(text)
        known = sorted((re.escape(one.replace("Ġ", " ")) for one in self.vocabulary), key=len, reverse=True)
        return {"input_ids": [1] * len(re.findall("|".join([*known, f"(?:(?!{'|'.join(known)}).)+"]), text))}


@pytest.mark.parametrize(
    ("vocabulary", "each"),
    [
        (["a", "Ġ", "Ġa", *("Ġ" + chr(at) for at in (*range(65, 91), *range(98, 123)))], 1),
        (["▁", *map(chr, (*range(65, 91), *range(97, 123))), "▁of▁the"], 2),
        (["ĠaĠ", *map(chr, (*range(65, 91), *range(97, 123))), "Ġ"], 2),
        (["é"], 0),
    ],
)
def test_words_say_that_a_text_is_too_long_before_it_is_read(vocabulary: list[str], each: int) -> None:
    """Of 5,000 words where 2,048 tokens are allowed, 3,000 tokens were made: ten times the rest of such a refusal."""
    bounded = type("Bounded", (HfRenderer,), {})
    fair_order.read_in_pieces(bounded)
    renderer: Any = object.__new__(bounded)
    tokenizer = Words(*(text.replace("▁", "Ġ") for text in vocabulary))
    renderer.get_tokenizer = lambda: tokenizer
    renderer._wants_offsets = lambda *_: False
    assert fair_order.words_of_a_token(Words(*vocabulary)) == each
    params = TokenizeParams(max_total_tokens=100)
    text = " then" * (100 * max(1, each) + 1)
    if each:
        with pytest.raises(VLLMValidationError, match="context length is 100 tokens.*at least 101 input tokens"):
            renderer._tokenize_prompt({"prompt": text}, params)
        assert len(tokenizer.read) == 1, "the letters"
    renderer._tokenize_prompt({"prompt": text.removeprefix(" then")}, params)
    assert text.removeprefix(" then") in tokenizer.read, "it may fit"


@pytest.mark.parametrize("kind", ["texts", "pictures"])
def test_texts_of_one_owner_keep_nobody_elses_from_being_read(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Sixty-four prompts that took a second each had everybody else's wait for a minute."""
    executor: Any
    if kind == "texts":
        bounded = type("Bounded", (_SwappableExecutor,), {})
        fair_order.read_in_turns(bounded)
        executor = bounded(max_workers=1)
    else:
        plain = {"__init__": lambda self: setattr(self, "_mm_executor", ThreadPoolExecutor(max_workers=1))}
        renderer: Any = type("Renderer", (), plain)
        fair_order.pictures_in_turns(renderer)
        executor = renderer()._mm_executor
    begun, go = list[str](), threading.Event()

    def read(name: str) -> str:
        begun.append(name)
        assert go.wait(30)
        return name

    def asked(owner: str, name: str) -> Any:
        monkeypatch.setattr(answer_version, "current", lambda: answer_version.Answer(owner=owner))
        return executor.submit(read, name)

    many = [asked("ann", f"ann {number}") for number in range(20)]
    ben = asked("ben", "ben")
    assert many[7].cancel()
    go.set()
    assert [one.result(timeout=30) for one in (many[0], ben, many[19])]
    assert begun.index("ben") == 1 and "ann 7" not in begun
    if kind == "pictures":
        executor.shutdown()
        return

    go.clear()
    stuck, waits = asked("ann", "stuck"), asked("ben", "waits")
    executor.replace_inner()
    go.set()
    assert waits.result(timeout=30) == "waits" and stuck.result(timeout=30)
    executor.shutdown()
