"""Layers that keep a state know no bounds of examples: a model that has such layers learns from one example a row."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.train_support.specs import host_spec
from train.model import attention
from train.model.model import keeps_state
from train.plan.errors import UnsupportedModel
from train.trainer.worker import refuse_shared_rows

SHAPE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.3}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
DELTA = {f"linear_{what}": n for what, n in {"num_value_heads": 2, "num_key_heads": 1}.items()}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
FAMILIES = {
    "qwen3_5_text": {**DELTA, "layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 0},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "lfm2": {"full_attn_idxs": [1]},
    "llama": {},
    "gemma3_text": {"sliding_window": 6},
    "qwen3_moe": EXPERTS,
}


def model_of(family):
    attention.register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE | FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).float().eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_keeps_state_matches_influence_between_examples(family):
    model, lengths = model_of(family), (9, 7)
    ids = torch.randint(3, 60, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        row = model(input_ids=ids, position_ids=positions, use_cache=False, segments=((0, 9), (9, 16))).logits[0, 9:]
        alone = model(input_ids=ids[:, 9:], position_ids=positions[:, 9:], use_cache=False, segments=((0, 7),)).logits[
            0
        ]
    assert keeps_state(model) == (not torch.allclose(row, alone, atol=1e-4))


def test_shared_rows_of_recurrent_model_are_refused():
    keeping, other = model_of("lfm2"), model_of("llama")
    refuse_shared_rows(keeping, host_spec(packing=False))
    alone = {"packing": False}
    for more in ({}, alone | {"micro_batch": 2}, alone | {"method": "dpo"}, alone | {"method": "reinforcement"}):
        refuse_shared_rows(other, host_spec(**more))
        with pytest.raises(UnsupportedModel, match="lfm2 has layers that keep a state"):
            refuse_shared_rows(keeping, host_spec(**more))
