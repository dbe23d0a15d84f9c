"""The base of every body of a control route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from appliance.controller.interfaces.errors import shown


class StrictBody(BaseModel):
    """An unknown field is an error, and so is a value of another type: nothing is guessed."""

    model_config = ConfigDict(extra="forbid", strict=True)


_Text = Annotated[str, StringConstraints(max_length=512)]
Metadata = Annotated[dict[Annotated[str, StringConstraints(min_length=1, max_length=64)], _Text], Field(max_length=16)]
"""OpenAI's limits."""


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
        place.append(str(part)[:64])
    return place


def is_branch(part: str | int) -> bool:
    """Whether pydantic names a branch of a union here, by its type."""
    return isinstance(part, str) and (part in _BRANCHES or "[" in part or part.startswith(("_", "constrained-")))


_BRANCHES = {"bool", "int", "float", "str", "none"}


def first_error(found: Sequence[Any]) -> dict[str, Any]:
    """The first error. Where it is one branch of a union, that of its branches into which the value got furthest: of a
    wrong object in place of true or false, what is wrong in the object. Where a field is missing, one beside it that
    is unknown: a name that is spelt wrong is both, and looks right to whoever is told of the missing one alone."""
    first: dict[str, Any] = found[0]
    if first["type"] == "missing":
        beside = first["loc"][:-1]
        return next((one for one in found if one["type"] == "extra_forbidden" and one["loc"][:-1] == beside), first)
    if not first["loc"] or not is_branch(first["loc"][-1]):  # none of what is no object at all
        return first
    union = first["loc"][:-1]
    return max((one for one in found if one["loc"][: len(union)] == union), key=lambda one: len(one["loc"]))


def message_of(param: str, first: dict[str, Any]) -> tuple[str, str]:
    """Message and code of this mistake: the gateway has the same codes."""
    kind = first["type"]
    if kind == "extra_forbidden":
        return f"Unrecognized request argument supplied: {param}.", "unknown_parameter"
    if kind == "missing":
        return f"Missing required parameter: '{param}'.", "missing_required_parameter"
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return f"Invalid value for '{param}': {first['msg']}; {shown(first.get('input'))} was given.", code
