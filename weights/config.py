"""Settings of the weight store."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class WeightsConfig(BaseModel):
    """How much memory weights may take, and how they are laid out. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget_bytes: int | None = Field(default=None, ge=1, description="Bound on all the store holds.")
    budget_share: float = Field(default=0.5, gt=0, le=1, description="Bound as a share of the size of the tmpfs.")
    pool_bytes: int | None = Field(default=None, ge=0, description="Bound on freed segments kept for re-use.")
    persist_rate_bytes_s: int | None = Field(default=None, ge=1, description="Bound on background copies to disk.")

    def budget_for(self, filesystem_bytes: int) -> int:
        """The budget in bytes on a tmpfs of `filesystem_bytes`."""
        return self.budget_bytes if self.budget_bytes is not None else int(filesystem_bytes * self.budget_share)
