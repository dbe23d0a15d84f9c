"""An engine's computed memory and context length."""

from pathlib import Path

import pytest
import vllm
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from runtime.devices import kinds
from serve.core.config import EngineConfig
from serve.core.model_settings import ModelSettings
from serve.core.sizing import CPU_KV_BYTES, GRAPH_BYTES, LEAST_ACTIVATIONS_BYTES, NotServable, ServedShape, engine_size
from tests.model_sizes import sizes

GIB = 2**30
# The keys of SmolLM2-135M-Instruct's config.json that sizing reads.
SMOL = sizes(576, 1536, 30, 9, 3, vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True)
SMOL_PARAMETERS = 134_515_008


def smol(**changes):
    return ServedShape.from_config({**SMOL, **changes}, 2 * SMOL_PARAMETERS, SMOL_PARAMETERS)


def size(config=None, shape=None, dtype=None, kv_cache_dtype=None, **kw):
    given = {
        "settings": ModelSettings(dtype=dtype, kv_cache_dtype=kv_cache_dtype),
        "task": "generate",
        "arch": "LlamaForCausalLM",
        "tensor_parallel": 1,
        "device_kind": "cuda",
        "device_memory_bytes": 80 * GIB,
        "asleep_per_device": 2,
        **kw,
    }
    return engine_size(config or EngineConfig(), shape or ServedShape(16 * GIB, context=2048), **given)


def on_cpu(config=None, shape=None, **kw):
    return size(config, shape or smol(), **{"device_kind": "cpu", "device_memory_bytes": 3 * GIB, **kw})


def settings(config=None, task="generate", arch="LlamaForCausalLM", **kw):
    return size(config, task=task, arch=arch, **kw).spec_fields()


def test_gpu_kv_cache_gets_remaining_memory():
    reserve = kinds.kind_of("cuda").context_bytes + GRAPH_BYTES + LEAST_ACTIVATIONS_BYTES
    config = EngineConfig(gpu_memory_fraction=0.9)
    assert settings(config)["gpu_memory_fraction"] == 0.9
    assert settings(config)["kv_cache_bytes"] == int(72 * GIB) - 16 * GIB - reserve
    assert settings(config, tensor_parallel=2)["kv_cache_bytes"] == int(72 * GIB) - 8 * GIB - reserve


def test_gpu_weights_bytes_follow_computing_dtype():
    """A bfloat16 checkpoint takes twice its bytes in float32, and a float32 checkpoint half in bfloat16."""
    config = EngineConfig(adapter_slots=0)
    for stored in (2 * SMOL_PARAMETERS, 4 * SMOL_PARAMETERS):
        shape = ServedShape.from_config(SMOL, stored, SMOL_PARAMETERS)
        for dtype, element in (("bfloat16", 2), ("float32", 4)):
            assert size(config, shape, dtype=dtype).memory.weights_bytes == element * SMOL_PARAMETERS
    bits = {"bits": 4}
    for said in ({"quantization_config": bits}, {"text_config": {**SMOL, "compression_config": bits}}):
        packed = ServedShape.from_config({**SMOL, **said}, 3 * SMOL_PARAMETERS, SMOL_PARAMETERS)
        assert size(shape=packed).memory.weights_bytes == 3 * SMOL_PARAMETERS
    elsewhere = ServedShape.from_config(SMOL, SMOL_PARAMETERS, SMOL_PARAMETERS)
    assert size(shape=elsewhere).memory.weights_bytes == SMOL_PARAMETERS, "quantised by hf_quant_config.json"


def test_gpu_refuses_kv_dtype_unlike_computing_dtype():
    """FlashAttention: "query and key must have the same dtype"; Triton's products need equal dtypes too."""
    found = size(kv_cache_dtype="float16")
    assert "computed in bfloat16" in found.problem
    assert size(EngineConfig(adapter_slots=0), dtype="float32", kv_cache_dtype="bfloat16").problem
    alike = [(None, "bfloat16"), ("float16", "float16"), ("float16", None), ("float16", "auto"), (None, "fp8")]
    assert not any(size(dtype=dtype, kv_cache_dtype=kv).problem for dtype, kv in alike)


def test_gpu_refuses_adapters_in_float32():
    """vLLM's kernels would fail an assertion in the warm-up batch."""
    kernel = Path(vllm.__file__).parent / "lora" / "ops" / "triton_ops" / "lora_shrink_op.py"
    assert "assert inputs.dtype in [torch.float16, torch.bfloat16]\n" in kernel.read_text()
    found = size(dtype="float32")
    assert "[serve] adapter_slots to 0" in found.problem
    with pytest.raises(NotServable, match="compute no adapters"):
        found.spec_fields()
    for computed in (
        size(),
        size(dtype="float16"),
        size(EngineConfig(adapter_slots=0), dtype="float32"),
        size(dtype="float32", task="embed"),
        on_cpu(dtype="float32"),
    ):
        assert not computed.problem


def test_model_without_kv_memory_is_refused():
    with pytest.raises(NotServable, match="Raise the deployment's tensor_parallel"):
        settings(shape=ServedShape(70 * GIB))


def test_context_is_minimum_of_model_and_configuration():
    assert settings()["max_model_len"] == 2048
    assert settings(EngineConfig(max_model_len=512))["max_model_len"] == 512
    assert settings(EngineConfig(max_model_len=4096))["max_model_len"] == 2048
    assert settings(shape=ServedShape(GIB))["max_model_len"] is None


def test_cpu_kv_cache_holds_one_context():
    for dtype, element in (("bfloat16", 2), ("float32", 4)):
        one = on_cpu(dtype=dtype)
        per_token = 2 * 30 * 3 * 64 * element
        assert one.max_model_len == 8192 and not one.shortened and not one.problem
        assert one.memory.kv_cache_bytes == max(CPU_KV_BYTES, (8192 + 128) * per_token)
        assert one.kv_tokens >= 8192
    assert on_cpu(shape=smol(max_position_embeddings=512)).memory.kv_cache_bytes == CPU_KV_BYTES


def test_context_beyond_kv_cache_is_shortened():
    little = on_cpu(EngineConfig(kv_cache_bytes=64 * 2**20), dtype="bfloat16")
    assert little.max_model_len == little.kv_tokens and little.max_model_len % 128 == 0
    assert little.max_model_len + 128 <= 64 * 2**20 // 23040
    assert "holds 2,688 of 8,192 tokens, 192 MB would hold all" in little.shortened
    long = on_cpu(shape=smol(max_position_embeddings=131_072 * 8), dtype="bfloat16")
    assert long.memory.kv_cache_bytes == 3 * GIB and 0 < long.max_model_len < 131_072 * 8 and long.shortened
    nothing = on_cpu(EngineConfig(kv_cache_bytes=2**20), dtype="bfloat16")
    assert "raise kv_cache_bytes" in nothing.problem


@pytest.mark.parametrize("device_bytes", [23 * GIB + n * 2**20 for n in (0, 1, 2, 3, 5, 8)])
def test_shortened_context_fits_any_block_size(device_bytes):
    """vLLM refuses to start an engine whose KV cache does not hold one context in whole blocks; some kernels, such as
    latent attention's, need blocks larger than 16 tokens."""
    latent = ServedShape(14 * GIB, context=1_048_576, layers=27, latent=576, hidden=2048, ffn=10944, vocab=102_400)
    found = size(shape=latent, device_memory_bytes=device_bytes)
    token_bytes = 27 * 576 * 2
    assert found.shortened and found.max_model_len
    for block in (16, 64, 128):
        whole_blocks = -(-found.max_model_len // block) + 1  # plus the block that vLLM reserves
        assert whole_blocks <= found.memory.kv_cache_bytes // (block * token_bytes)


def test_cpu_weights_include_packed_tied_head():
    tied, plain = on_cpu(dtype="float32"), on_cpu(shape=smol(tie_word_embeddings=False), dtype="float32")
    assert plain.memory.weights_bytes == 4 * SMOL_PARAMETERS, "stored in bfloat16, computed in float32"
    assert tied.memory.weights_bytes - plain.memory.weights_bytes == 4 * 49152 * 576
    packed = ServedShape.from_config({**SMOL, "quantization_config": {}, "tie_word_embeddings": False}, 10, 40)
    assert packed.quantized is False, "an empty quantization_config does not count"
    quantised = ServedShape.from_config({**SMOL, "quantization_config": {"bits": 4}}, 10**8, SMOL_PARAMETERS)
    assert on_cpu(shape=quantised, dtype="float32").memory.weights_bytes == 10**8 + 4 * 49152 * 576


def test_quantised_model_without_avx512_is_refused(monkeypatch):
    """Refused before the start, because the engine would fail with vLLM's message or compute wrong numbers."""
    quantised = ServedShape.from_config({**SMOL, "quantization_config": {"quant_method": "awq"}}, 10**8, 40)
    for lacks in ("", "AVX-512"):
        monkeypatch.setattr(type(kinds.kind_of("cpu")), "lacks_for_quantised", lambda self, lacks=lacks: lacks)
        found = on_cpu(shape=quantised)
        assert ("only on a processor with AVX-512" in found.problem) == bool(lacks)
        assert not on_cpu().problem and not size(shape=quantised).problem
    with pytest.raises(NotServable, match=r"quantised.*import the model as its publisher trained it"):
        found.spec_fields()


@pytest.mark.parametrize(
    ("changes", "computed"),
    [
        ({}, True),
        ({"head_dim": 128}, True),
        ({"head_dim": 8}, False),
        ({"num_attention_heads": 24}, False),  # heads of 24 elements
        ({"head_dim": 24, "kv_lora_rank": 512}, True),  # latent attention has its own kernel
    ],
)
def test_cpu_unsupported_head_size_is_refused(changes, computed):
    found = on_cpu(shape=smol(**changes))
    assert (not found.problem) == computed
    assert computed or "engines on a logical CPU device compute heads of 32, 64, 80" in found.problem
    assert not size(shape=smol(**changes)).problem, "on a GPU the engine checks head sizes"


def test_head_sizes_equal_vllms():
    assert set(CPUAttentionBackend.get_supported_head_sizes()) == kinds.kind_of("cpu").head_sizes


def test_adapter_slots_need_supported_architecture_and_task():
    taken = settings(EngineConfig(adapter_slots=4, adapter_max_rank=32, adapters_resident=2))
    assert (taken["adapter_slots"], taken["adapter_max_rank"], taken["adapters_resident"]) == (4, 32, 4)
    for without in ({"arch": "MixtralForCausalLM"}, {"task": "embed"}, {"config": EngineConfig(adapter_slots=0)}):
        assert not settings(**without)["adapter_slots"]
    quantised = smol(quantization_config={"quant_method": "awq"})
    assert size(shape=quantised).adapter_slots and on_cpu(shape=quantised).adapter_slots


def test_gpu_max_num_seqs_defaults_to_vllms():
    given = {n: settings(device_memory_bytes=n * GIB)["max_num_seqs"] for n in (24, 48, 79, 141, 180)}
    assert given == {24: 256, 48: 256, 79: 1024, 141: 1024, 180: 1024}
    assert settings(device_memory_bytes=79 * GIB, device_name="NVIDIA A100-SXM4-80GB")["max_num_seqs"] == 256
    assert settings(EngineConfig(max_num_seqs=8))["max_num_seqs"] == 8
    assert on_cpu().max_num_seqs == 64, "a CPU gains nothing from more requests"
    wide = ServedShape(16 * GIB, hidden=4096, ffn=14336, vocab=128_256, context=2048)
    few, many = (size(EngineConfig(max_num_seqs=n), wide).memory.activations_bytes for n in (64, 1024))
    assert many - few == 960 * 128_256 * 16, "activations include sampling"
