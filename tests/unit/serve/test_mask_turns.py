"""What a neighbour of many requests whose masks take long waits for, in vLLM's scheduler on a computed time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve.vllm.fairness import mask_turns
from serve.vllm.fairness.mask_turns import MASK, STEP_S, MaskTurns
from tests.unit.serve.test_fair_steps import PLACES, Engine

COST_S = 0.034
"""Of a text of the format `uri-template`, with a vocabulary of 49,000."""


class Grammar:
    def __init__(self, cost_s: float) -> None:
        setattr(self, MASK, cost_s)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True


class Form:
    def __init__(self, cost_s: float) -> None:
        self.grammar, self.reasoner, self.reasoning_ended = Grammar(cost_s), None, None
        self.reasoning_parser_kwargs = None


class MaskedEngine(Engine):
    """Its steps take as long as their masks, too."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *, turns: bool) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        made, ready = Scheduler.schedule, Scheduler._handle_blocked_waiting_request
        if turns:
            made, ready = mask_turns._in_turns(made), mask_turns._unless_later(ready)

        def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            output = made(scheduler, *args, **kwargs)
            asked = [scheduler.requests[name] for name in output.num_scheduled_tokens]
            masks_s = sum(mask_turns._cost_s(request) for request in asked if not request.is_prefill_chunk)
            self.clock.now_s += masks_s
            self.most_s = max(self.most_s, masks_s)
            return output

        # Before the scheduler is made, which then has what others wrap around it.
        monkeypatch.setattr(Scheduler, "schedule", schedule)
        monkeypatch.setattr(Scheduler, "_handle_blocked_waiting_request", ready)
        super().__init__(root, monkeypatch, paced=True)
        monkeypatch.setattr(mask_turns, "time", self.clock)
        self.most_s = 0.0

    def ask_form(self, owner: str, name: str, most: int, cost_s: float, adapter: int = 0) -> None:
        self.ask(owner, name, 20, most, adapter)
        self.scheduler.requests[name].structured_output_request = Form(cost_s)


def neighbour(engine: MaskedEngine, cost_s: float, own_s: float = 0.0) -> tuple[float, float]:
    """Longest wait for a token, and tokens a second, of a stream beside as many forms as there are places, and more."""
    engine.ask_form("neighbour", "stream", 4000, own_s)
    while len(engine.tokens["stream"]) < 10:
        engine.step()
    engine.most_s, began_s = 0.0, engine.clock.now_s
    for one in range(PLACES + 100):
        engine.ask_form("many", f"form {one}", 40, cost_s)
    for _ in range(300):
        engine.step()
    seen = [at for at in engine.tokens["stream"] if at >= began_s - 1]
    gap_s = max(end - start for start, end in zip(seen, seen[1:], strict=False))
    return gap_s, (len(engine.tokens["stream"]) - 10) / (engine.clock.now_s - began_s)


def test_a_neighbour_of_many_long_masks_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        gap_s, rate = neighbour(MaskedEngine(tmp_path, before, turns=False), COST_S)
        assert gap_s > 2 and rate < 1, "as it was"
    engine = MaskedEngine(tmp_path, monkeypatch, turns=True)
    gap_s, rate = neighbour(engine, COST_S)
    assert gap_s < 1 and rate > 5 and engine.most_s <= STEP_S
    # All of them are written to their end, whoever came first.
    while not all(len(engine.tokens[f"form {one}"]) == 40 for one in range(PLACES + 100)):
        engine.step()
    assert engine.scheduler.max_num_active_reqs == PLACES


def test_a_mask_that_takes_long_alone_comes_half_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MaskedEngine(tmp_path, monkeypatch, turns=True)
    gap_s, rate = neighbour(engine, 0.3)
    assert gap_s < 1 and rate > 5 and engine.most_s == 0.3


def test_whose_own_form_takes_long_has_a_turn_among_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gap_s, rate = neighbour(MaskedEngine(tmp_path, monkeypatch, turns=True), COST_S, own_s=COST_S)
    assert gap_s < 1 and rate > 2


def test_who_waits_for_his_turn_keeps_his_adapters_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's scheduler asserts that what runs needs no more adapters than a batch has, which ended the engine."""
    engine = MaskedEngine(tmp_path, monkeypatch, turns=True)
    engine.scheduler.lora_config = SimpleNamespace(max_loras=2, max_cpu_loras=4)
    for adapter in (1, 2):
        engine.ask_form("many", f"form {adapter}", 40, COST_S, adapter)
    forms = [engine.tokens[f"form {adapter}"] for adapter in (1, 2)]
    while not all(forms):  # their adapters are loaded one after the other
        engine.step()
    began = [len(tokens) for tokens in forms]
    engine.ask("other", "short", 20, 40, adapter=3)
    for _ in range(16):
        engine.step()
    assert all(0 < len(tokens) - before < 14 for tokens, before in zip(forms, began, strict=True)), "one in each step"
    for adapter in (1, 2):
        setattr(engine.scheduler.requests[f"form {adapter}"].structured_output_request.grammar, MASK, 0.0)
    while not all(len(tokens) == 40 for tokens in engine.tokens.values()):
        engine.step()
    assert engine.scheduler.lora_config.max_loras == 2


def test_forms_that_take_little_are_in_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MaskedEngine(tmp_path, monkeypatch, turns=True)
    for one in range(PLACES):
        engine.ask_form("many", f"form {one}", 5, 0.0002)
    engine.ask_form("few", "form", 5, 0.01)
    for _ in range(20):
        engine.step()
    assert all(len(tokens) == 5 for tokens in engine.tokens.values())


def test_what_a_mask_takes_is_known_from_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(mask_turns.time, "thread_time", lambda: clock[0])

    class Slow:
        def fill_bitmask(self, took_s: float, index: int) -> str:
            clock[0] += took_s
            return "filled"

    Slow.fill_bitmask = mask_turns._measured(Slow.fill_bitmask)  # type: ignore[method-assign]
    slow = Slow()
    told = []
    for took_s in (0.1, 0.0, 0.0, 0.2):
        assert slow.fill_bitmask(took_s, 0) == "filled"
        told.append(getattr(slow, MASK))
    assert told == pytest.approx([0.1, 0.05, 0.025, 0.2])


def test_one_is_chosen_where_there_is_nothing_else() -> None:
    turns = MaskTurns()
    candidates = [("a", 1, 0.3), ("b", 1, 0.3), ("c", 2, 0.3)]
    seen = [turns.chosen(candidates, now_s, others=False) for now_s in (0.0, 0.1, 0.2, 0.3)]
    assert [len(found) for found in seen] == [1] * 4 and seen[1] != seen[0]
    assert {"a", "b", "c"} == set().union(*seen)
    assert turns.chosen(candidates, 0.4, others=True) == set()
