"""The general questions in real ranks: the answers are the model's own, whatever shares it out."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from train.data.general_questions import FEWEST, NEW_TOKENS, QUESTIONS


def reference(base: str) -> list[str]:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        AutoTokenizer.from_pretrained(base),
    )
    found = []
    for question, _ in QUESTIONS[:FEWEST]:
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = model.generate(**asked, max_new_tokens=NEW_TOKENS, do_sample=False)[0, asked["input_ids"].shape[1] :]
        found.append(tokenizer.decode(made, skip_special_tokens=True))
    return found


@pytest.mark.parametrize(
    "ranks, fields",
    [
        (1, {"zero_stage": 1}),
        (4, {"zero_stage": 2, "activation_checkpointing": True}),
        (2, {"zero_stage": 3}),
        (3, {"zero_stage": 1, "full": False, "lora_rank": 4, "batch_size": 3}),
        (2, {"zero_stage": 1, "tensor_parallel": 2}),
    ],
)
async def test_ranks_answer_as_the_model_does_and_train_as_if_nobody_had_asked(shop, ranks, fields):
    asked = await shop.run(shop.spec("asked", general_questions=True, n_epochs=1, **fields), ranks)
    (before,) = asked.of("general")
    assert before["when"] == "before" and before["right"] == [], "a random model knows nothing, and is asked once"
    assert len(before["answers"]) == FEWEST, "the job is short"
    same = sum(a == b for a, b in zip(before["answers"], reference(str(shop.base)), strict=True))
    assert same >= FEWEST - 2, "ties of a random model may break otherwise"
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
