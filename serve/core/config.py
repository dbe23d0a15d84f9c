"""Settings of the engine side; the appliance's configuration composes them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class EngineConfig(BaseModel):
    """How engines are started and how long their operations may take."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_replicas: int = Field(2, ge=1, description="replicas a model may have, unless its deployment says otherwise")
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="requests an engine runs at once, more wait in its queue; None: 1,024 on a GPU of 70 GiB or more, "
        "256 on a smaller one, 64 on a CPU",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="tokens; None: the model's own context, or as much of it as the KV cache holds"
    )
    kv_cache_bytes: int | None = Field(
        None,
        ge=1,
        description="per device; None: on a GPU what all else leaves, on a CPU one whole context",
    )
    gpu_memory_fraction: float = Field(
        0.92,
        gt=0,
        le=1,
        description="share of a GPU that one engine may use at most; engines asleep there may leave less",
    )
    start_timeout_s: float = Field(
        600.0,
        gt=0,
        description="from fork to healthy, with the first load of the weights and, on a GPU, the first compilation",
    )
    swap_timeout_s: float = Field(150.0, gt=0, description="bound for a weight swap, a wake or a sleep")
    stop_timeout_s: float = Field(10.0, gt=0, description="time to stop; then the supervisor kills the engine")
    hung_s: float = Field(
        120.0,
        gt=0,
        description="an engine that gives no sign of life for this long is killed and restarted; on a processor one "
        "step may take a minute",
    )
    max_sequences_per_request: int = Field(64, ge=1, le=16384, description="upper bound of the request field `n`")
    adapter_slots: int = Field(
        4, ge=0, description="LoRA adapters per batch of an engine; 0: engines serve none, LoRA jobs publish merged"
    )
    adapter_max_rank: int = Field(32, ge=1, le=512, description="largest rank of an adapter that engines take")
    adapters_resident: int = Field(
        32, ge=1, description="adapters an engine keeps loaded (at least adapter_slots); others load on request"
    )
    adapter_drain_timeout_s: float = Field(
        90.0, gt=0, description="time that adapter requests have to finish before the base weights change"
    )
    adapter_fetch_timeout_s: float = Field(
        60.0, gt=0, description="how long a request waits for an adapter that only a tier below memory and disk holds"
    )
    fingerprint_logprob_tolerance: float = Field(
        0.15,
        gt=0,
        description="largest difference in nats between the log-probability that training recorded for a version and "
        "the one that an engine computes; rounding stays under 0.1",
    )
