"""Settings of the engine side; the appliance's configuration composes them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class EngineConfig(BaseModel):
    """How engines are started and how long their operations may take."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start_timeout_s: float = Field(180.0, gt=0, description="fork to healthy, first load of the weights included")
    swap_timeout_s: float = Field(300.0, gt=0)
    sleep_timeout_s: float = Field(120.0, gt=0)
    stop_timeout_s: float = Field(10.0, gt=0, description="after it the engine is killed")
    max_sequences_per_request: int = Field(64, ge=1, le=16384, description="upper bound of the request field `n`")
    stage_memory_factor: float = Field(
        1.5, ge=1.0, description="a swap is staged when this many times the model's bytes of host memory are free"
    )
    canary_logprob_tolerance: float = Field(
        0.15,
        gt=0,
        description="largest difference of a canary log-probability in nats; rounding of bf16 kernels on another "
        "batch shape stays under 0.1, other weights differ by whole nats",
    )
