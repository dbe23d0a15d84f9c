"""Planned activation bytes of a layer compared with the tensors that torch saves for backward, on meta tensors."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from train.data.packing import build_row
from train.methods.methods import method_of
from train.methods.packed_objective import PackedObjective, to_batch
from train.model import attention
from train.plan.estimate import ModelShape

META = torch.device("meta")
TOKENS = 2048
DENSE = {
    "vocab_size": 64,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 16,  # queries are twice as wide as the model, as in Qwen3 0.6B
    "num_key_value_heads": 4,
    "head_dim": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
EXPERTS = {
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 192,
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
    "use_qk_norm": True,
}
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "smollm3"), {}),
    **dict.fromkeys(("gemma", "gemma3_text", "glm4", "olmo2", "olmo3", "exaone4"), {}),
    "gemma4_text": {"hidden_size_per_layer_input": 32},
    "hunyuan_v1_dense": {},
    "mixtral": {"num_local_experts": 16, "num_experts_per_tok": 2},
    "qwen3_moe": EXPERTS,
    "glm4_moe": EXPERTS,
}


def kept_bytes(config, layers: int) -> int:
    """Bytes that the forward pass of one row saves for backward, without the weights."""
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * layers
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention.NAME)
    model.config.use_cache = False
    method = method_of("supervised")
    row = build_row([[(np.zeros(TOKENS, np.int32), np.arange(TOKENS) > 2)]], TOKENS, 0, packing=True)
    objective, batch = PackedObjective(model.train(), method, {}), to_batch(row, 0.1, META)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        objective(batch)
    return sum(storage.nbytes() for at, storage in kept.items() if at not in weights)


@pytest.fixture(autouse=True)
def packed_rows():
    attention.register()


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_bytes_match_tensors_saved_by_torch(family):
    config = AutoConfig.for_model(family, **{**DENSE, **FAMILIES[family]})
    kept = (kept_bytes(config, 3) - kept_bytes(config, 2)) / TOKENS
    planned = ModelShape.from_config(config.to_dict(), 10**9).layer_bytes()
    assert planned == pytest.approx(kept, rel=0.06), f"{kept:.0f} bytes of a token"
