"""The base of every body of a control route."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import PydanticCustomError

MOST_MISTAKES, TOO_MANY = 100, "too_many_mistakes"
"""Each that is told of takes pydantic 5 µs, and there is no way to have it tell of the first alone: bodies of 26,000
unknown fields held the loop for 0.2 s. The second is the type of an error that says how many there are."""


class StrictBody(BaseModel):
    """An unknown field is an error, and so is a value of another type: nothing is guessed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="wrap")
    @classmethod
    def _few_mistakes(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(value)
        except ValidationError as error:
            if (found := error.error_count()) <= MOST_MISTAKES:
                raise
            text = "{found} fields or values are not what is expected"
            raise PydanticCustomError(TOO_MANY, text, {"found": found}) from None
