"""What a client is told of a request that vLLM cannot read."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, field_validator
from vllm.renderers.chat_utils import ChatTemplateResolutionError

from serve.api.request_faults import of_request


def test_a_chat_with_a_model_that_has_no_template_is_told_what_to_do():
    told = str(of_request(ChatTemplateResolutionError("As of transformers v4.44, default chat template is no longer")))
    assert "/v1/completions" in told and "--chat-template FILE" in told and "transformers" not in told


def test_what_a_check_of_a_value_says_is_told_without_pydantics_own_words():
    class Thinking(BaseModel):
        budget: int

        @field_validator("budget")
        @classmethod
        def below(cls, value: int) -> int:
            raise ValueError("budget must be less than max_tokens.")

    with pytest.raises(ValidationError) as caught:
        Thinking(budget=1)
    assert str(of_request(caught.value)) == "Invalid value for `budget`: budget must be less than max_tokens."
