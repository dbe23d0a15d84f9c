"""The general questions in real ranks: the answers are the model's own, whatever shares it out."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from train.data.general_questions import QUESTIONS
from train.run.general_answers import NEW_TOKENS


def reference(base: str) -> list[str]:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        AutoTokenizer.from_pretrained(base),
    )
    found = []
    for question, _ in QUESTIONS:
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
    same = sum(a == b for a, b in zip(before["answers"], reference(str(shop.base)), strict=True))
    assert same >= len(QUESTIONS) - 2, "ties of a random model may break otherwise"
    quiet = await shop.run(shop.spec("quiet", n_epochs=1, **fields), ranks)
    assert not quiet.of("general") and quiet.losses() == asked.losses()
