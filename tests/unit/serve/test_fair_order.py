"""What vLLM is told of a request's place in its queue."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

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
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy))
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
    turn = fair_order.Turn(turns, "a", turns.enter("a", 2 * 10), 10, 2)
    fair_order._TURN.set(turn)
    for name in ("0", "1"):
        ADD(outputs, SimpleNamespace(request_id=name))
    for _ in range(50):
        STEP(outputs, [SimpleNamespace(request_id="0", new_token_ids=[7])])
    turn.ended()
    assert turns.enter("a", 1) == 20 + 20 + 50 - 10, "one of its choices was not begun"
    assert turns.enter("b", 1) == turn.place == 20, "what is being served"


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
