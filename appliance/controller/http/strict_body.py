"""The base of every body of a control route."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictBody(BaseModel):
    """An unknown field is an error, and so is a value of another type: nothing is guessed."""

    model_config = ConfigDict(extra="forbid", strict=True)
