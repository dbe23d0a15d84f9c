"""Who shares a model with whom, and what of it is cut."""

import pytest
import torch
import transformers
from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType
from transformers import AutoModelForCausalLM

from tests.model_sizes import sizes
from tests.train_support.tiny import FAMILIES
from train.model.tensor_parallel import partition_config
from train.plan import estimate
from train.plan.errors import UnsupportedModel
from train.state.fragments import Fragment
from weights.format.torch_views import narrow, runs_view

SIZES = sizes(48, 100, 2, 4, 2, vocab_size=384)


def config(family, **fields):
    name, more = FAMILIES[family]
    return getattr(transformers, f"{name}Config")(**(SIZES | more | fields))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_partition_config_cuts_attention_and_mlp_only(family, tied):
    model_config = config(family, tie_word_embeddings=tied)
    plan = AutoTPConfig.from_dict(partition_config(model_config, 2))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    kinds, held = {}, 0
    for name, parameter in model.named_parameters():
        weight = name.rpartition(".")[0] + ".weight"  # a bias goes with its weight
        spec = plan.find_matching_spec("model." + weight)
        kind = None if spec is None else spec.partition_type
        whole = kind in (None, PartitionType.SKIP) or (name.endswith("bias") and kind is PartitionType.ROW)
        held += parameter.numel() // (1 if whole else 2)
        kinds.setdefault(kind, set()).add(weight.split(".")[-2])
    assert kinds[PartitionType.COLUMN] == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert kinds[PartitionType.ROW] == {"o_proj", "down_proj"}
    summed = {spec.patterns[0] for spec in plan.layer_specs if spec.grad_allreduce}
    assert (len(summed) == 2) == (family == "qwen3"), "norms of q and k see the heads of their rank alone"
    shape = estimate.ModelShape.from_config(model_config.to_dict(), sum(p.numel() for p in model.parameters()))
    fields = {"full": True, "zero_stage": 1, "precision": "fp32", "offload": "none", "micro_batch": 1}
    fields |= {"max_length": 8, "activation_checkpointing": False, "tensor_parallel": 2}
    # The estimate cuts norms too, which are a thousandth of a real model.
    assert estimate.rank_memory(shape, fields, 2).weights_bytes == pytest.approx(4 * held, rel=1e-2)


@pytest.mark.parametrize(
    "model_config, shared, said",
    [
        (config("mixtral"), 2, "'mixtral' has layers cut as .*experts"),
        (config("llama"), 4, "num_key_value_heads 2, which 4 does"),
        (config("llama", num_key_value_heads=4, num_attention_heads=8, intermediate_size=99), 2, "intermediate_size"),
        (transformers.Phi3Config(**SIZES), 2, "fused matrices"),
        (transformers.BloomConfig(), 2, "'bloom' has no tensor-parallel plan"),
    ],
    ids=["experts", "heads", "columns", "fused", "no-plan"],
)
def test_partition_config_uncuttable_model_is_refused(model_config, shared, said):
    with pytest.raises(UnsupportedModel, match=said):
        partition_config(model_config, shared)


@pytest.mark.parametrize("dim", [0, 1])
def test_fragment_pieces_map_slice_to_whole(dim):
    whole = torch.arange(6 * 8, dtype=torch.float32)
    made = torch.full_like(whole, -1)
    for rank in range(2):
        held = narrow((6, 8), dim, rank * (6, 8)[dim] // 2, (6, 8)[dim] // 2)
        mine = runs_view(whole, held).reshape(-1)
        for first, last in ((0, 7), (7, 24)):
            fragment = Fragment("w", 0, mine, {"exp_avg": mine}, held).narrow(first, last)
            assert torch.equal(fragment.moments["exp_avg"], mine[first:last]) and fragment.start == first
            for runs, ours in fragment.pieces():
                assert (runs_view(made, runs) == -1).all(), "written twice"
                runs_view(made, runs).copy_(fragment.weights[ours].view(runs.count, runs.run))
    assert torch.equal(made, whole)
