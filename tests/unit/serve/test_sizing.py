"""How much memory an engine gets."""

import pytest

from serve.core.config import EngineConfig
from serve.core.sizing import CPU_KV_BYTES, GPU_RESERVE_BYTES, ModelTooLarge, engine_settings

GIB = 2**30


def settings(config=None, **kw):
    given = {
        "task": "generate",
        "arch": "LlamaForCausalLM",
        "max_position_embeddings": 2048,
        "weight_bytes": 16 * GIB,
        "tensor_parallel": 1,
        "device_kind": "cuda",
        "device_memory_bytes": 80 * GIB,
        **kw,
    }
    return engine_settings(config or EngineConfig(), **given)


def test_a_gpu_engine_gets_what_weights_and_reserve_leave():
    config = EngineConfig(gpu_memory_fraction=0.9)
    assert settings(config)["gpu_memory_fraction"] == 0.9
    assert settings(config)["kv_cache_bytes"] == int(72 * GIB) - 16 * GIB - GPU_RESERVE_BYTES
    assert settings(config, tensor_parallel=2)["kv_cache_bytes"] == int(72 * GIB) - 8 * GIB - GPU_RESERVE_BYTES


def test_a_model_that_leaves_no_room_is_refused_with_the_remedy():
    with pytest.raises(ModelTooLarge, match="raise the deployment's tensor_parallel"):
        settings(weight_bytes=70 * GIB)


def test_the_configuration_wins_over_the_arithmetic():
    assert settings(EngineConfig(kv_cache_bytes=GIB))["kv_cache_bytes"] == GIB
    assert settings(device_kind="cpu")["kv_cache_bytes"] == CPU_KV_BYTES


def test_the_shorter_of_model_and_configuration_is_the_context():
    assert settings()["max_model_len"] == 2048
    assert settings(EngineConfig(max_model_len=512))["max_model_len"] == 512
    assert settings(EngineConfig(max_model_len=4096))["max_model_len"] == 2048
    assert settings(max_position_embeddings=None)["max_model_len"] is None


def test_engines_take_adapters_where_every_layer_of_the_model_does():
    taken = settings(EngineConfig(adapter_slots=4, adapter_max_rank=32, adapters_resident=2))
    assert (taken["adapter_slots"], taken["adapter_max_rank"], taken["adapters_resident"]) == (4, 32, 4)
    for without in ({"arch": "MixtralForCausalLM"}, {"task": "embed"}, {"config": EngineConfig(adapter_slots=0)}):
        assert "adapter_slots" not in settings(**without)
