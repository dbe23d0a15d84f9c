"""Bodies of requests for a check and a preparation of data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from appliance.controller.http.strict_body import StrictBody
from train.data_checks.options import CHECKS, ORDERS, CheckName
from train.methods.methods import METHODS

Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Share = Annotated[float, Field(gt=0, le=1)]
MOST_FILES, MOST_LISTED = 16, 8_000


class HeldAgainst(StrictBody):
    """What examples are compared with. against: id of a validation file. like: as train.data_checks.options has it."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    against: Name | None = None
    like: Annotated[float, Field(ge=0.7, le=1)] | None = None


class Changes(StrictBody):
    """What is left out or changed: see train.data_checks.options.PrepareOptions."""

    drop: Annotated[list[CheckName], Field(max_length=len(CHECKS))] = Field(default_factory=list)
    mask: bool = False
    split: Annotated[float, Field(gt=0, lt=1)] | None = None
    order: Literal[tuple(ORDERS)] = ORDERS[0]  # type: ignore[valid-type]
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0


class CheckRequest(HeldAgainst):
    """words: a list of one's own."""

    model: Name | None = None
    method: Literal[tuple(METHODS)] | None = None  # type: ignore[valid-type]
    words: Annotated[list[Name], Field(max_length=MOST_LISTED)] | None = None
    leave_out: Annotated[list[CheckName], Field(max_length=len(CHECKS))] = Field(default_factory=list)


class Mixed(StrictBody):
    file: Name
    share: Share


class PrepareRequest(CheckRequest, Changes):
    mix: Annotated[list[Mixed], Field(max_length=MOST_FILES)] = Field(default_factory=list)
