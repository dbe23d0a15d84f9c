"""The general questions in real ranks: the answers are the model's own, whatever shares it out."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from train.data.general_questions import FEWEST, QUESTIONS
from train.run.general_answers import prompt_of


def reference(base: str) -> list[float]:
    """How likely the right words are."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        AutoTokenizer.from_pretrained(base),
    )
    known = []
    for question in QUESTIONS[:FEWEST]:
        prompt = prompt_of(tokenizer, question)
        with torch.no_grad():
            logits = model(torch.tensor([prompt.asked + prompt.begun])).logits[0, -1].double()
        known.append(logits[[prompt.right, *prompt.wrong]].softmax(-1)[0].item())
    return known


@pytest.mark.parametrize(
    "ranks, fields",
    [
        (1, {"zero_stage": 1}),
        pytest.param(4, {"zero_stage": 2, "activation_checkpointing": True}, marks=pytest.mark.soak),
        (2, {"zero_stage": 3}),
        (3, {"zero_stage": 1, "full": False, "lora_rank": 4, "batch_size": 3}),
        (2, {"zero_stage": 1, "tensor_parallel": 2}),
    ],
)
async def test_ranks_answer_as_the_model_does_and_train_as_if_nobody_had_asked(shop, ranks, fields):
    asked = await shop.run(shop.spec("asked", general_questions=True, n_epochs=1, **fields), ranks)
    (before,) = asked.of("general")
    assert before["when"] == "before", "a random model knows nothing, and is asked once"
    assert len(before["known"]) == FEWEST, "the job is short"
    assert before["known"] == pytest.approx(reference(str(shop.base)), abs=0.02), "bfloat16 has three digits"
    quiet = await shop.run(shop.spec("quiet", n_epochs=1, **fields), ranks)
    assert not quiet.of("general") and quiet.losses() == asked.losses()


async def test_devices_wanted_before_the_first_step_do_not_wait_for_answers(shop):
    spec, quiet = shop.spec("asked", general_questions=True, n_epochs=1), shop.spec("quiet", n_epochs=1)
    first = await shop.launch(spec, 2).start()
    report = await first.group.suspend()
    assert report.step <= 1
    second = await shop.run(spec, 2, snapshot=report.snapshot_path)
    assert [event["when"] for event in [*first.of("general"), *second.of("general")]] == ["before"]
    assert first.losses() | second.losses() == (await shop.run(quiet, 2)).losses()
