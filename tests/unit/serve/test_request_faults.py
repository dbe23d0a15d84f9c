"""What a client is told of a request that vLLM cannot read."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, field_validator
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from serve.api.answers import UNREADABLE, of_request


@pytest.mark.parametrize("error", [KeyError("a"), AttributeError("b"), RecursionError(), TypeError("c")])
def test_error_of_reading_is_the_requests_in_words_about_requests(error: Exception) -> None:
    told = of_request(error)
    assert isinstance(told, VLLMValidationError) and str(told) == UNREADABLE


@pytest.mark.parametrize("error", [OSError("disk"), MemoryError(), EngineDeadError()])
def test_error_of_the_machine_is_not_the_requests(error: Exception) -> None:
    assert of_request(error) is error


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
