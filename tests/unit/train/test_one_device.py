"""A step computes on the device of its batch alone: what it made in host memory unasked, or waited for, would fail or
stall it on a GPU.

torch's device "meta" has shapes and no numbers, so the steps below are those of any device that is not the host: a
tensor of the host among theirs raises, and so does a number that is asked back.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from train.data.packing import RolloutRow, build_row
from train.methods.methods import method_of
from train.model import attention

META = torch.device("meta")
SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
}


def row(method):
    """What the method makes a batch of: one row of two sequences."""
    draw = np.random.default_rng(0)
    two = [(draw.integers(0, 384, size).astype(np.int32), np.arange(size) > 2) for size in (20, 30)]
    built = build_row([two], 64, 0, packing=True)
    if method == "dpo":
        return replace(built, reference=np.zeros(2, np.float32))
    if method in ("reinforcement", "distillation"):
        of_row = {field.name: getattr(built, field.name) for field in fields(built)}
        zeros = np.zeros(len(built.labels), np.float32)
        return RolloutRow(**of_row, advantages=zeros + 1, sampled=zeros)
    return built


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("name", ["supervised", "dpo", "reinforcement", "distillation"])
def test_a_step_stays_on_its_device_and_asks_nothing_back(name, kind):
    attention.register()
    with META:
        model = AutoModelForCausalLM.from_config(
            CONFIGS[kind], dtype=torch.bfloat16, attn_implementation=attention.NAME
        )
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    method = method_of(name)
    objective = method.objective(model.train(), {option.name: option.auto for option in method.options})
    objective(method.batch(row(name), 0.1, META)).backward()
    assert [n for n, weight in model.named_parameters() if weight.grad is None or weight.grad.device != META] == []
