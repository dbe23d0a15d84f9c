"""Engine settings, a section of the appliance's configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class EngineConfig(BaseModel):
    """How engines are started and how long their operations may take."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_replicas: int = Field(2, ge=1, description="most replicas of a model, unless its deployment sets a limit")
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="requests that an engine runs at once; further requests wait; None: 1,024 on a GPU of at least "
        "70 GiB, 256 on a smaller GPU, 64 on a CPU",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="context in tokens; None: the model's context, or less if the KV cache holds less"
    )
    kv_cache_bytes: int | None = Field(
        None,
        ge=1,
        description="KV cache per device; None: the free memory of a GPU, or on a CPU the memory of one full context",
    )
    gpu_memory_fraction: float = Field(
        0.92,
        gt=0,
        le=1,
        description="largest share of a GPU that one engine may use; less if engines may sleep on that GPU",
    )
    start_timeout_s: float = Field(
        600.0,
        gt=0,
        description="time limit from fork to healthy, including the first weight load and, on a GPU, compilation",
    )
    swap_timeout_s: float = Field(150.0, gt=0, description="time limit for a weight swap, a wake or a sleep")
    stop_timeout_s: float = Field(10.0, gt=0, description="time limit of a stop; then the supervisor kills the engine")
    hung_s: float = Field(
        120.0,
        gt=0,
        description="an engine that does not respond for this long is killed and restarted; on a processor one "
        "step may take a minute",
    )
    max_sequences_per_request: int = Field(64, ge=1, le=16384, description="upper bound of the request field `n`")
    adapter_slots: int = Field(
        4, ge=0, description="LoRA adapters per batch; 0: engines serve no adapters, LoRA jobs publish merged weights"
    )
    adapter_max_rank: int = Field(32, ge=1, le=512, description="largest adapter rank that engines accept")
    adapters_resident: int = Field(
        32, ge=1, description="adapters an engine keeps loaded (at least adapter_slots); others load on request"
    )
    adapter_drain_timeout_s: float = Field(
        90.0, gt=0, description="time limit for adapter requests to finish before the base weights change"
    )
    adapter_fetch_timeout_s: float = Field(
        60.0, gt=0, description="how long a request waits for an adapter that is in neither memory nor the disk library"
    )
    fingerprint_logprob_tolerance: float = Field(
        0.15,
        gt=0,
        description="largest difference in nats between the log-probabilities that training recorded and an engine "
        "computes for a version's token; rounding stays under 0.1",
    )
