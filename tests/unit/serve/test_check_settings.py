"""What vLLM's configuration takes of a model's settings, and its core or workers do not."""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from vllm.config import CacheConfig, SchedulerConfig

from serve.engine.check_settings import in_words, refused_later


def config(*, block_size=None, quantization=None, latent=False):
    cache = SimpleNamespace(
        block_size=block_size or 1000,  # of a model that keeps states alone, as vLLM sets it
        user_specified_block_size=block_size is not None,
    )
    model = SimpleNamespace(use_mla=latent, quantization=quantization, hf_config=SimpleNamespace())
    return SimpleNamespace(model_config=model, cache_config=cache)


def test_what_an_engine_starts_with_is_not_refused():
    assert refused_later(config(), on_host=True) == refused_later(config(), on_host=False) == ""
    assert refused_later(config(block_size=16, quantization="fp8"), on_host=False) == ""
    assert refused_later(config(block_size=16, latent=True), on_host=True) == ""
    assert refused_later(config(quantization="awq"), on_host=True) == ""


@pytest.mark.parametrize(
    ("given", "on_host", "reason"),
    [
        ({"block_size": 16}, True, "blocks of 16 tokens: block-size has to be a multiple of 32"),
        ({"block_size": 7}, False, "has to be a multiple of 16"),
        ({"quantization": "fp8_per_tensor"}, True, "no layers in fp8_per_tensor"),
    ],
)
def test_what_no_engine_starts_with_is_refused_before_anything_restarts(given, on_host, reason):
    assert reason in refused_later(config(**given), on_host=on_host)


def test_what_vllm_refuses_is_told_without_its_classes_and_arguments():
    with pytest.raises(ValidationError) as refused:
        CacheConfig(block_size=0)
    assert in_words(refused.value) == "block-size: Input should be greater than 0"
    with pytest.raises(ValidationError) as refused:
        SchedulerConfig(max_model_len=64, is_encoder_decoder=False, max_num_seqs=8, max_num_batched_tokens=7)
    assert in_words(refused.value).startswith(
        "max_num_batched_tokens (7) must be greater than or equal to max_num_seqs"
    )
