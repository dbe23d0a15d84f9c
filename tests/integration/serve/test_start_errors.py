"""vLLM's start errors are translated into settings of the box, without vLLM's classes and options."""

import re

import pytest
from pydantic import ValidationError
from vllm.config import CacheConfig, SchedulerConfig

from appliance.config import BoxConfig
from serve.engine.main import in_words
from serve.engine.start_errors import in_our_words, out_of_memory


def test_in_words_omits_vllm_classes():
    with pytest.raises(ValidationError) as refused:
        CacheConfig(block_size=0)
    assert in_words(refused.value) == "block-size: Input should be greater than 0"
    with pytest.raises(ValidationError) as refused:
        SchedulerConfig(max_model_len=64, is_encoder_decoder=False, max_num_seqs=8, max_num_batched_tokens=7)
    assert in_words(refused.value).startswith(
        "max_num_batched_tokens (7) must be greater than or equal to max_num_seqs"
    )


KV = (
    "ValueError: To serve at least one request with the model's max seq len (8192), (0.35 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (0.24 GiB). Based on the available memory, the estimated "
    "maximum model length is 5568. Try increasing `gpu_memory_utilization` (which also controls CPU memory reservation "
    "on the CPU backend, despite its name) or decreasing `max_model_len` when initializing the engine."
)
FULL = (
    "ValueError: Free memory on device cuda:0 (3.21/79.1 GiB) on startup is less than desired GPU memory utilization "
    "(0.92, 72.8 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)


@pytest.mark.parametrize(
    "message, says, memory",
    [
        (KV, ["8192 tokens", "0.35 GiB", "0.24 GiB", "[serve] kv_cache_bytes", "[serve] max_model_len", "5568"], False),
        (FULL, ["3.21 of 79.1 GiB", "[serve] gpu_memory_fraction"], True),
        (
            "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (281). Each decode sequence requires "
            "one Mamba cache block, so CUDA graph capture cannot proceed. Please lower max_num_seqs to at most 281 or "
            "increase gpu_memory_utilization.",
            ["holds 281 states, not 1024", "`appliance model deploy m --max-num-seqs 281`"],
            False,
        ),
        (
            "ValueError: Model architectures ['OddForCausalLM'] are not supported for now. Supported architectures: []",
            ["OddForCausalLM", "`appliance model rm m`"],
            False,
        ),
        (
            "ValueError: Failed to find a kernel that can implement the NVFP4 linear layer. Reasons: \n x",
            ["m has quantised layers", "NVFP4", "kind of device", "GGUF"],
            False,
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", ["[serve] kv_cache_bytes"], True),
        (
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
            ["memory ran out"],
            True,
        ),
    ],
)
def test_in_our_words_names_box_settings(message, says, memory):
    text = in_our_words(message, "m") or ""
    assert out_of_memory(message) is memory
    for part in says:
        assert part in text
    assert "gpu_memory_utilization" not in text and "\n" not in text and "vLLM" not in text
    for key in re.findall(r"\[serve\] (\w+)", text):
        assert key in BoxConfig().model_dump()["serve"], "a setting that exists"


def test_in_our_words_unknown_message_is_none():
    assert in_our_words("ValueError: the moon is full", "m") is None
