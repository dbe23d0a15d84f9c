"""Engines start on cards of any size beside all that may sleep there, or are refused with the reason."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.devices.kinds import KINDS, kind_of
from serve.core.config import EngineConfig
from serve.core.sizing import EngineSize, ServedShape, engine_size

GIB = 2**30
GPUS = sorted(name for name, kind in KINDS.items() if not kind.on_host)


def llama(billions: int, hidden: int, layers: int, ffn: int, kv_heads: int, heads: int) -> ServedShape:
    about = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": ffn,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
    }
    return ServedShape.from_config(about, 2 * billions * 10**9, billions * 10**9)


LLAMA_1B, LLAMA_8B = llama(1, 2048, 16, 8192, 8, 32), llama(8, 4096, 32, 14336, 8, 32)
LLAMA_70B = llama(70, 8192, 80, 28672, 8, 64)
MODEL = {"task": "generate", "arch": "LlamaForCausalLM"}


def sized(kind: str, memory: int, shape: ServedShape, asleep: int, shards: int, config: EngineConfig) -> EngineSize:
    return engine_size(
        config,
        shape,
        **MODEL,
        tensor_parallel=shards,
        device_kind=kind,
        device_memory_bytes=memory,
        asleep_per_device=asleep,
    )


def vllm_starts(size: EngineSize, kind: str, memory: int, asleep: int) -> bool:
    """Whether vLLM would (vllm/v1/worker/utils.request_memory, after its context is made) and has what it takes."""
    free = memory - asleep * kind_of(kind).asleep_bytes
    asked = -(-memory * round(size.gpu_memory_fraction * 10_000) // 10_000)
    return free - kind_of(kind).context_bytes >= asked and size.memory.device_bytes <= free


@given(
    kind=st.sampled_from(GPUS),
    memory=st.integers(6 * GIB, 192 * GIB),
    shape=st.sampled_from([LLAMA_1B, LLAMA_8B, LLAMA_70B]),
    asleep=st.integers(0, 4),
    shards=st.sampled_from([1, 2, 4, 8]),
    fraction=st.floats(0.3, 1.0),
    seqs=st.sampled_from([None, 1, 64, 4096]),
)
def test_an_engine_that_is_not_refused_starts_beside_all_that_may_sleep_there(
    kind, memory, shape, asleep, shards, fraction, seqs
):
    config = EngineConfig(gpu_memory_fraction=fraction, max_num_seqs=seqs)
    size = sized(kind, memory, shape, asleep, shards, config)
    if size.problem:
        return
    assert vllm_starts(size, kind, memory, asleep)
    assert size.gpu_memory_fraction <= fraction and size.memory.device_bytes <= memory * fraction
    assert size.spec_fields()["gpu_memory_fraction"] == size.gpu_memory_fraction
    fewer = sized(kind, memory, shape, 0, shards, config)
    assert fewer.memory.kv_cache_bytes >= size.memory.kv_cache_bytes, "what sleeps takes from the KV cache"
    assert not fewer.problem


@given(kind=st.sampled_from(GPUS), memory=st.integers(24, 192), asleep=st.integers(0, 2))
def test_small_models_start_on_every_card_from_24_gb_on(kind, memory, asleep):
    memory *= GIB
    for shape, least in ((LLAMA_1B, 32_768), (LLAMA_8B, 4_096)):
        size = sized(kind, memory, shape, asleep, 1, EngineConfig())
        assert not size.problem and (size.max_model_len or 0) >= least
        assert vllm_starts(size, kind, memory, asleep)
