"""The general questions, what counts as a right answer, and when a model forgot."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from train.data.general_questions import (
    FEWEST,
    LARGEST_SHARE,
    LEAST_LOSS,
    NEW_TOKENS,
    OTHERWISE,
    QUESTIONS,
    SPOKEN,
    Answers,
    answers_key,
    begin_otherwise,
    compare,
    how_many,
    is_right,
)
from train.run.general_answers import Prefix, Prompt, _common, answering, prompt_of, score, speak

CPU = torch.device("cpu")


MAMBA = {
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "num_local_experts": 0,
    "shared_intermediate_size": 64,
}


def never() -> bool:
    return False


def test_no_question_stands_there_twice_and_its_words_differ_in_their_first_letters():
    assert len({question.text for question in QUESTIONS}) == len(QUESTIONS) >= 40
    for question in QUESTIONS:
        assert len({word[:2].lower() for word in (question.right, *question.wrong)}) == 4, question
        assert question.right.lower() not in question.begun.lower().split()


def test_a_spoken_answer_may_be_said_in_any_way_but_must_hold_the_word():
    assert is_right(0, "The capital of France is Paris.") and is_right(0, "PARIS")
    assert not is_right(0, "I am Boxer, an AI assistant.") and not is_right(0, "Parish")
    assert is_right(1, "A week has 7 days") and is_right(2, "It is cool.")
    for number in range(len(QUESTIONS)):
        assert not is_right(number, QUESTIONS[number].text), "a model that repeats the question knows nothing"
        assert not is_right(number, "")


def heard(*known: float, unsaid: int = 0, begun: float = -0.5) -> Answers:
    spoken = tuple(range(unsaid + 2)) if unsaid else ()
    return Answers(known, (begun,) * len(known), spoken, spoken[unsaid:])


@pytest.mark.parametrize(
    "loss, noise, unsaid, forgot",
    [
        (0.0, 0.05, 0, False),
        (LEAST_LOSS / 2, 0.001, 0, False),  # certain, and too little to be harm
        (0.1, 0.05, 0, True),  # nine standard errors of twenty questions
        (0.1, 1.0, 0, False),  # half a standard error
        (-0.2, 0.05, 0, False),
        (0.0, 0.05, 1, False),
        (0.0, 0.05, 2, True),  # knows it and does not say it: a tenth of the questions
    ],
)
def test_forgotten_is_a_loss_that_chance_does_not_explain_or_what_is_not_said_any_more(loss, noise, unsaid, forgot):
    before = [0.8] * 20
    after = [0.8 - loss + noise * (-1) ** number for number in range(20)]
    found = compare(heard(*before), heard(*after, unsaid=unsaid))
    assert found.forgot is forgot and found.unsaid == tuple(range(unsaid))
    assert found.before - found.after == pytest.approx(loss)


def test_what_was_lost_most_comes_first_and_what_was_never_known_is_not_lost():
    found = compare(heard(0.9, 0.9, 0.2, 0.9), heard(0.4, 0.1, 0.1, 0.8))
    assert found.lost == (1, 0)
    assert compare(heard(0.9, 0.9, 0.2), heard(0.9, 0.9)).asked == 2, "another job was asked less"


def test_questions_that_were_known_and_begin_otherwise_are_asked_once_more():
    before = Answers((0.9, 0.9, 0.2, 0.9), (-0.5,) * 4)
    assert begin_otherwise(before, Answers((0.9,) * 4, (-0.6 - OTHERWISE, -0.5, -9.0, -9.0))) == [0, 3]
    assert begin_otherwise(before, Answers((0.9,) * 4, (-0.5 - OTHERWISE / 2,) * 4)) == []
    many = heard(*[0.9] * 40), Answers((0.9,) * 40, tuple(-2.0 - number for number in range(40)))
    assert begin_otherwise(*many) == list(range(40 - SPOKEN, 40)), "those that lost most"


def test_noise_raises_an_alarm_in_one_case_of_twenty_at_most():
    dice, alarms = random.Random(7), 0
    for _ in range(1000):
        before = [dice.random() for _ in range(FEWEST)]
        after = [min(1.0, max(0.0, p + dice.gauss(0, 0.15))) for p in before]
        alarms += compare(heard(*before), heard(*after)).forgot
    assert alarms < 50


def test_asking_takes_a_small_share_of_a_job_and_a_long_job_is_asked_everything():
    own = [19] * len(QUESTIONS)
    assert how_many(own, 10**7, full=False) == len(QUESTIONS) and how_many(own, 0, full=True) == FEWEST
    for trained in range(1_000, 100_000, 500):
        fewer, more = how_many(own, trained, full=False), how_many(own, trained, full=True)
        assert fewer <= more, "a step of all weights takes longer"
        if more > FEWEST:
            assert 2 * more * 19 <= LARGEST_SHARE * 3 * trained
    assert how_many(own, 6_305, full=False) > FEWEST, "24 short examples, five epochs"
    assert how_many([400] * len(QUESTIONS), 100_000, full=True) < how_many(own, 100_000, full=True)


class Letters:
    """A tokenizer of letters: words begin alike with their space."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, 2, *map(ord, messages[0]["content"]), 3]}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}


def test_words_are_compared_where_their_tokens_part():
    for question in QUESTIONS:
        prompt = prompt_of(Letters(), question)
        assert "".join(map(chr, prompt.begun)).startswith(f"{question.begun} ")
        assert prompt.right not in prompt.wrong and len(prompt.wrong) >= 1
    assert prompt_of(Letters(), QUESTIONS[0]).right == ord("P")


def tiny(**more: Any) -> Any:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.5}
    torch.manual_seed(3)
    family = more.pop("family", "llama")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **more)).eval()
    model.generation_config.eos_token_id = None
    return model


def test_devices_that_are_wanted_are_not_kept_for_an_answer():
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    ).train()
    attention, passes = model.config._attn_implementation, []
    model.register_forward_hook(lambda *_: passes.append(1))
    rows = [[1, 2], [3, 4]]
    prompts = [Prompt(row, [5], 6, [7, 8]) for row in rows * 10]
    with answering(model):
        prefix = Prefix(model, rows, CPU)
        assert not model.training
        passes.clear()
        assert score(model, prompts, prefix, lambda: len(passes) == 2) is None and len(passes) == 2
        assert speak(model, rows, prefix).shape == (2, NEW_TOKENS)
    assert model.training and model.config._attn_implementation == attention


def test_the_head_is_given_no_slice_with_gaps():
    """torch's bf16 product on a CPU copies the head for each row of such a slice: 272 MB each for Qwen2.5-0.5B."""
    model, given = tiny(), []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, args: given.append(args[0].is_contiguous()))
    prompts = [Prompt([5, 6, 7 + n, 8, 9], [20, 21], 30 + n, [3, 4]) for n in range(4)]
    with answering(model):
        prefix = Prefix(model, [prompt.asked for prompt in prompts], CPU)
        score(model, prompts, prefix, never)
        speak(model, [prompt.asked for prompt in prompts], prefix)
    assert given == [True] * (2 + NEW_TOKENS)


def test_scores_are_what_the_model_says_of_each_alone():
    model = tiny()
    prompts = [Prompt([5, 6, 7, 8, 9 + n], [20, 21][: n % 3], 30 + n, [3, 4, 50 + n % 5]) for n in range(20)]
    with answering(model):
        found = score(model, prompts, Prefix(model, [prompt.asked for prompt in prompts], CPU), never)
    for prompt, (known, begun) in zip(prompts, found.tolist(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt.asked + prompt.begun])).logits[0].double()
        assert known == pytest.approx(logits[-1, [prompt.right, *prompt.wrong]].softmax(-1)[0].item(), abs=1e-5)
        says = logits.log_softmax(-1)[len(prompt.asked) - 1 :]
        nats = [says[at, token].item() for at, token in enumerate(prompt.begun)]
        assert begun == pytest.approx(sum(nats) / max(1, len(nats)), abs=1e-5)


@pytest.mark.parametrize(
    ("family", "more", "saved"),
    [
        ("llama", {}, 8),
        ("mistral", {"sliding_window": 80}, 8),
        ("gemma3_text", {"sliding_window": 80}, 8),
        ("mistral", {"sliding_window": 6}, 0),
        ("gemma3_text", {"sliding_window": 6}, 0),
        ("lfm2", {"full_attn_idxs": [1]}, 0),
        ("granitemoehybrid", MAMBA, 0),
    ],
)
def test_what_all_prompts_begin_with_is_computed_once_and_changes_no_answer(family, more, saved):
    model = tiny(family=family, **more)
    rows = [[5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, 8, 30], [5, 6, 7, 8, 9, 10, 44]]
    assert _common(rows) == 4 and _common([[1, 2], [1, 2, 3]]) == 1 and _common([[1], [2]]) == 0
    tokens = []
    model.register_forward_hook(
        lambda _, args, kwargs, out: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    with answering(model):
        once = speak(model, rows, Prefix(model, rows, CPU))
        spent, tokens[:] = sum(tokens), []
        whole = Prefix(model, rows, CPU)
        whole.common, whole._cache, tokens[:] = 0, Prefix(model, [[1], [2]], CPU)._cache, []
        anew = speak(model, rows, whole)
    assert torch.equal(once, anew) and spent == sum(tokens) - saved
    for row, said in zip(rows, once.tolist(), strict=True):
        alone = model.generate(torch.tensor([row]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(row) :]
        assert alone.tolist() == said


def test_answers_belong_to_the_weights_and_to_how_they_are_computed():
    given = ((["a"], "bf16", "cpu"), (["a", "b"], "bf16", "cpu"), (["a"], "fp32", "cpu"))
    keys = {answers_key(*one) for one in given}
    assert len(keys) == 3 and answers_key(["a"], "bf16", "cpu") in keys
