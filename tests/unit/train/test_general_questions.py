"""The general questions, what counts as a right answer, and when a model forgot."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from train.data.general_questions import (
    FEWEST,
    LARGEST_SHARE,
    LEAST_KNOWN,
    NEW_TOKENS,
    QUESTIONS,
    answers_key,
    compare,
    how_many,
    is_right,
)
from train.run.general_answers import _common, _greedy


def number(question: str) -> int:
    return next(n for n, (asked, _) in enumerate(QUESTIONS) if asked == question)


def test_no_question_stands_there_twice_and_accepted_words_are_words():
    assert len({question for question, _ in QUESTIONS}) == len(QUESTIONS) >= 20 > LEAST_KNOWN
    for n, (question, accepted) in enumerate(QUESTIONS):
        assert all(is_right(n, f"I think it is {word.upper()}, yes.") for word in accepted)
        assert not is_right(n, question), "a model that repeats the question knows nothing"
        assert not is_right(n, "")


def test_an_answer_may_be_said_in_any_way_but_must_hold_the_word():
    france = number("What is the capital of France?")
    assert is_right(france, "The capital of France is Paris.") and is_right(france, "PARIS")
    assert not is_right(france, "I am Boxer, an AI assistant.") and not is_right(france, "Parish")


@pytest.mark.parametrize(
    "before, after, forgot",
    [
        (range(20), range(20), False),
        (range(20), range(16), False),  # four lost: one in sixteen by chance
        (range(20), range(15), True),
        (range(20), range(0), True),
        (range(20), [*range(15), 20, 21, 22], False),  # five lost, three won: some tip over either way
        (range(10), range(20), False),
        ([], [], False),
    ],
)
def test_forgotten_is_what_chance_does_not_explain(before, after, forgot):
    found = compare(list(before), list(after))
    assert found.forgot is forgot and found.lost == tuple(sorted(set(before) - set(after)))


def test_noise_that_tips_answers_either_way_raises_an_alarm_in_one_case_of_twenty_at_most():
    for changed in range(1, 13):
        ways = list(itertools.product((True, False), repeat=changed))
        alarms = 0
        for lost in ways:
            before = [n for n, is_lost in enumerate(lost) if is_lost]
            after = [n for n, is_lost in enumerate(lost) if not is_lost]
            alarms += compare(before, after).forgot
        assert alarms / len(ways) < 0.05


def test_asking_takes_a_small_share_of_a_job_and_a_long_job_is_asked_everything():
    prompts = [37] * len(QUESTIONS)
    assert how_many(prompts, 10**7, full=False) == len(QUESTIONS)
    assert how_many(prompts, 0, full=True) == FEWEST > LEAST_KNOWN, "five of them may be lost and be told from chance"
    for trained in range(1_000, 100_000, 500):
        fewer, more = how_many(prompts, trained, full=False), how_many(prompts, trained, full=True)
        assert fewer <= more, "a step of all weights takes longer"
        if more > FEWEST:  # at least the tokens of prompts and answers, forwards, against three times those trained
            assert 2 * more * (37 + NEW_TOKENS) <= LARGEST_SHARE * 3 * trained
    longer = how_many([400] * len(QUESTIONS), 100_000, full=True)
    assert FEWEST <= longer < how_many(prompts, 100_000, full=True), "a template's system prompt costs as well"


def test_devices_that_are_wanted_are_not_kept_for_an_answer():
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    ).train()
    attention, passes = model.config._attn_implementation, []
    model.register_forward_hook(lambda *_: passes.append(1))
    rows, cpu = [[1, 2], [3, 4]], torch.device("cpu")
    assert _greedy(model, rows, 0, cpu, lambda: len(passes) == 3) is None and len(passes) == 3
    assert model.training and model.config._attn_implementation == attention
    assert _greedy(model, rows, 0, cpu, lambda: False).shape == (2, NEW_TOKENS)


@pytest.mark.parametrize(
    ("family", "window", "saved"),
    [("llama", None, 8), ("mistral", 20, 8), ("gemma3_text", 20, 8), ("mistral", 6, 0), ("gemma3_text", 6, 0)],
)
def test_what_all_prompts_begin_with_is_computed_once_and_changes_no_answer(family, window, saved):
    torch.manual_seed(3)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.5}
    config = AutoConfig.for_model(family, **shape, **({"sliding_window": window} if window else {}))
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    rows = [[5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, 8, 30], [5, 6, 7, 8, 9, 10, 44]]
    assert _common(rows) == 4 and _common([[1, 2], [1, 2, 3]]) == 1 and _common([[1], [2]]) == 0
    tokens = []
    model.register_forward_hook(
        lambda _, args, kwargs, out: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    once = _greedy(model, rows, 4, torch.device("cpu"), lambda: False)
    spent, tokens[:] = sum(tokens), []
    anew = _greedy(model, rows, 0, torch.device("cpu"), lambda: False)
    assert torch.equal(once, anew) and spent == sum(tokens) - saved
    for row, said in zip(rows, once.tolist(), strict=True):
        alone = model.generate(torch.tensor([row]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(row) :]
        assert alone.tolist() == said


def test_answers_belong_to_the_weights_and_to_how_they_are_computed():
    given = ((["a"], "bf16", "cpu"), (["a", "b"], "bf16", "cpu"), (["a"], "fp32", "cpu"))
    keys = {answers_key(*one) for one in given}
    assert len(keys) == 3 and answers_key(["a"], "bf16", "cpu") in keys
