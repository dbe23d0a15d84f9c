"""What vLLM's configuration refuses of a model's settings, in words."""

import pytest
from pydantic import ValidationError
from vllm.config import CacheConfig, SchedulerConfig

from serve.engine.main import in_words


def test_what_vllm_refuses_is_told_without_its_classes_and_arguments():
    with pytest.raises(ValidationError) as refused:
        CacheConfig(block_size=0)
    assert in_words(refused.value) == "block-size: Input should be greater than 0"
    with pytest.raises(ValidationError) as refused:
        SchedulerConfig(max_model_len=64, is_encoder_decoder=False, max_num_seqs=8, max_num_batched_tokens=7)
    assert in_words(refused.value).startswith(
        "max_num_batched_tokens (7) must be greater than or equal to max_num_seqs"
    )
