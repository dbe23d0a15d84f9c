"""What a client is told of a request that vLLM cannot read."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, field_validator
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from serve.api.request_faults import UNREADABLE, _for_requests, of_request


@pytest.mark.parametrize("error", [KeyError("a"), AttributeError("b"), RecursionError(), TypeError("c")])
def test_error_of_reading_is_the_requests_in_words_about_requests(error: Exception) -> None:
    told = of_request(error)
    assert isinstance(told, VLLMValidationError) and str(told) == UNREADABLE


@pytest.mark.parametrize("error", [OSError("disk"), MemoryError()])
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


@pytest.mark.parametrize(
    ("error", "kind"), [(EngineDeadError(), "EngineDeadError"), (EngineGenerateError(), "InternalServerError")]
)
def test_dead_engine_has_a_type_of_its_own(error: Exception, kind: str) -> None:
    told = _for_requests(create_error_response)(error).error
    assert (told.type, told.code) == (kind, 500)
