"""The base of every body of a control route."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints


class StrictBody(BaseModel):
    """An unknown field is an error, and so is a value of another type: nothing is guessed."""

    model_config = ConfigDict(extra="forbid", strict=True)


_Text = Annotated[str, StringConstraints(max_length=512)]
Metadata = Annotated[dict[Annotated[str, StringConstraints(min_length=1, max_length=64)], _Text], Field(max_length=16)]
"""OpenAI's limits."""
