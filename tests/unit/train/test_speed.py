"""Device-hours of a job that nobody has measured: what is counted, and that what was measured lies within the range."""

from __future__ import annotations

import pytest

from runtime.devices.published import ACCELERATORS, accelerator_called
from train.methods.methods import METHODS
from train.plan.estimate import ModelShape
from train.plan.speed import flops_per_token, forward_flops, speed, weights_passed

FULL = {"full": True, "lora_rank": 16, "activation_checkpointing": False, "n_epochs": 1, "batch_size": 8}
FULL |= {"micro_batch": 8, "zero_stage": 1}
LORA = FULL | {"full": False}


COLUMNS = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size"
MODELS = {
    "smollm2-135m": (134_515_008, 576, 30, 9, 3, 64, 1536, 49152),
    "llama-3.1-8b": (8_030_261_248, 4096, 32, 32, 8, 128, 14336, 128256),
    "qwen2.5-7b": (7_615_616_512, 3584, 28, 28, 4, 128, 18944, 152064),
    "qwen2.5-32b": (32_763_876_352, 5120, 64, 40, 8, 128, 27648, 152064),
    "qwen3-30b-a3b": (30_532_122_624, 2048, 48, 32, 4, 128, 6144, 151936),
}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def shape(name: str) -> ModelShape:
    parameters, *row = MODELS[name]
    config = dict(zip(COLUMNS.split(), row, strict=True)) | (EXPERTS if name == "qwen3-30b-a3b" else {})
    return ModelShape.from_config(config, parameters)


def test_full_training_takes_six_operations_a_weight_an_adapter_four_and_checkpointing_two_more():
    model = shape("llama-3.1-8b")
    weights = weights_passed(model)
    assert weights == pytest.approx(8.03e9 - 128256 * 4096, rel=0.001), "the embedding is looked up"
    assert flops_per_token(model, FULL, 0) == 6 * weights
    assert flops_per_token(model, FULL | {"activation_checkpointing": True}, 0) == 8 * weights
    assert flops_per_token(model, LORA, 0) == pytest.approx(4 * weights, rel=0.02)
    whole = flops_per_token(model, FULL, 8192) - 6 * weights
    assert whole == 3 * 4 * 32 * 4096 * 8192 / 2, "scores and values, of the half before a token"


def test_of_a_mixture_the_chosen_experts_count():
    assert weights_passed(shape("qwen3-30b-a3b")) == pytest.approx(3.3e9 - 151936 * 2048, rel=0.02)


@pytest.mark.parametrize("fields, accelerator, tokens_per_s", [(FULL, "h100", 30_035), (LORA, "h200", 13_263)])
def test_what_was_measured_of_a_small_model_lies_within_the_range(fields, accelerator, tokens_per_s):
    """Rows of 256 tokens, eight a step."""
    tokens = 2048 * 100
    found = speed(
        shape("smollm2-135m"), fields, ACCELERATORS[accelerator], tokens=tokens, row_tokens=256, steps=100, devices=1
    )
    assert found.device_s[0] < tokens / tokens_per_s < found.device_s[1]


@pytest.mark.parametrize(
    "tokens_per_s, checkpointing, name",
    [(10_643, False, "qwen2.5-7b"), (8_611, True, "qwen2.5-7b"), (2_002, True, "qwen2.5-32b")],
)
def test_what_others_measured_of_large_ones_does_too(tokens_per_s, checkpointing, name):
    """mosaicml/llm-foundry, of each of eight H100s that shared a model of about the same size."""
    fields = FULL | {"activation_checkpointing": checkpointing, "zero_stage": 3}
    found = speed(shape(name), fields, ACCELERATORS["h100"], tokens=16384, row_tokens=2048, steps=1, devices=8)
    assert found.device_s[0] < 16384 / tokens_per_s < found.device_s[1]


def test_shards_that_cross_pcie_may_take_longer():
    asked = {"tokens": 10**6, "row_tokens": 512, "steps": 10}
    card, model = ACCELERATORS["rtx-4090"], shape("qwen2.5-7b")
    assert speed(model, LORA | {"zero_stage": 3}, card, devices=8, **asked).used[0] == 0.05
    for fields, devices in ((LORA | {"zero_stage": 3}, 1), (LORA, 8)):
        assert speed(model, fields, card, devices=devices, **asked).used[0] == 0.2


def test_speed_counts_the_forward_pass_that_kto_asks_of_each_step():
    model, card = shape("llama-3.1-8b"), ACCELERATORS["h100"]
    asked = {"tokens": 1000, "row_tokens": 100.0, "steps": 1, "devices": 1, "reference": True}
    once, each = (speed(model, LORA | {"n_epochs": 3}, card, again=again, **asked).flops for again in (False, True))
    assert each - once == 3 * 1000 * forward_flops(model, 100.0) and METHODS["kto"].needs_divergence


def test_a_driver_s_name_is_one_of_the_table_if_it_is_that_form():
    assert accelerator_called("NVIDIA H100 80GB HBM3") is ACCELERATORS["h100"]
    assert accelerator_called("NVIDIA A100-SXM4-40GB") is ACCELERATORS["a100-40gb"]
    assert accelerator_called("NVIDIA GeForce RTX 4090") is ACCELERATORS["rtx-4090"]
    for other in ("NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090 Laptop GPU", "AMD EPYC 7763", ""):
        assert accelerator_called(other) is None
