"""What a job takes, against the numbers of the papers and against real models' parameters."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig
from transformers.utils import logging as transformers_logging

from train.plan import estimate
from train.plan.auto import DatasetStats, ModelStats, resolve
from train.plan.estimate import ModelShape

transformers_logging.set_verbosity_error()
LLAMA_8B = ModelShape.from_config(
    {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    8_030_261_248,
)


def fields(**given):
    return resolve(given, DatasetStats(7473, 1_200_000, 480), ModelStats(LLAMA_8B.n_parameters, 8192, "cuda"), 8)


def test_zero_shares_out_what_its_paper_says():
    alone, shared = (estimate.rank_memory(LLAMA_8B, fields(full=True, zero_stage=1), n) for n in (1, 8))
    # 2 + 4 + 12 bytes per parameter: 16 in the paper, with 2 bytes of gradients.
    assert alone.state_bytes == 18 * LLAMA_8B.n_parameters
    assert shared.state_bytes == 6 * LLAMA_8B.n_parameters + 12 * LLAMA_8B.n_parameters // 8
    two = estimate.rank_memory(LLAMA_8B, fields(full=True, zero_stage=2), 8)
    three = estimate.rank_memory(LLAMA_8B, fields(full=True, zero_stage=3), 8)
    assert two.state_bytes == pytest.approx(2 * LLAMA_8B.n_parameters + 2 * LLAMA_8B.n_parameters, rel=1e-6)
    assert three.state_bytes == pytest.approx(18 * LLAMA_8B.n_parameters / 8 + 2 * estimate.LIVE_ELEMENTS, rel=1e-6)
    assert alone.device_bytes > shared.device_bytes > two.device_bytes > three.device_bytes


def test_the_largest_parameter_is_found_as_transformers_builds_it():
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    for kind, more in ((LlamaConfig, {}), (MixtralConfig, {"num_local_experts": 16})):
        made = kind(**sizes, **more, vocab_size=64)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
        count, largest = model.num_parameters(), max(p.numel() for p in model.parameters())
        assert ModelShape.from_config(made.to_dict(), count).largest == pytest.approx(largest, rel=0.15)


def test_tensor_parallelism_cuts_all_but_embeddings_and_head():
    eight = LLAMA_8B.n_parameters
    alone, shared = (
        estimate.rank_memory(LLAMA_8B, fields(full=True, zero_stage=1, tensor_parallel=n), 8) for n in (1, 4)
    )
    outside = 2 * 128256 * 4096
    held = outside + (eight - outside) // 4
    assert LLAMA_8B.outside == outside and LLAMA_8B.tensor_slices == 8
    assert shared.weights_bytes == 2 * held and shared.gradients_bytes == 4 * held
    assert shared.optimizer_bytes == 12 * held // 2, "ZeRO shares it out over the two groups"
    assert shared.state_bytes < alone.state_bytes and shared.activations_bytes < alone.activations_bytes
    assert estimate.snapshot_bytes(LLAMA_8B, fields(full=True, tensor_parallel=4)) == 12 * eight
