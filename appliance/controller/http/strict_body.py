"""The base of every body of a control route."""

from __future__ import annotations

from collections.abc import Sequence
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


def place_in(given: Any, loc: Sequence[str | int]) -> list[str]:
    """The path of a mistake in what a client sent. pydantic also names the branches of unions that it tried, by kinds
    and by names of ours, which no client knows."""
    place = list[str]()
    for number, part in enumerate(loc, 1):
        if isinstance(given, dict) and part in given:
            given = given[part]
        elif isinstance(given, list) and isinstance(part, int) and part < len(given):
            given = given[part]
        elif number < len(loc) or not isinstance(given, dict) or is_branch(part):
            continue  # one that is missing stands last
        place.append(str(part))
    return place


def is_branch(part: str | int) -> bool:
    """Whether pydantic names a branch of a union here, by its type."""
    return isinstance(part, str) and (part in _BRANCHES or "[" in part or part.startswith(("_", "constrained-")))


_BRANCHES = {"bool", "int", "float", "str", "none"}
