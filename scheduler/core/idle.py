"""What idleness means for one model: what its operator said, and the box's own limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

CHECKPOINT_IDLE_S = 300.0
"""Limit for models that nobody deployed: checkpoints called by name, and hosts of adapters."""

POLICY_IDLE_S = 1.0
"""The same for models in training, whose jobs may wait for the devices."""


class IdleSettings(BaseModel):
    """An operator's numbers for one model. A number that is added here is taken, checked, kept and shown by the admin
    API under its name; `scheduler.autoscale.idle` gives it its meaning."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    idle_sleep_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """One replica stays awake for that long after the last request, then it sleeps; None: it sleeps only when the
    devices are wanted."""


@dataclass(frozen=True, slots=True)
class Idle:
    """limit_s: of models that nobody deployed, which sleep after it at the latest; None for others."""

    settings: IdleSettings = field(default_factory=IdleSettings)
    limit_s: float | None = None
