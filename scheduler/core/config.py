"""Settings of the scheduler; `appliance.config` composes them into the box's one TOML file."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0)]


class SchedulerConfig(BaseModel):
    """All dwell times, timeouts and limits of the scheduler. A name ends in the unit, if any."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    # --- decisions
    target_inflight: int = Field(32, ge=1)
    """Requests that one replica carries before another is started, if no engine rate has been measured."""
    give_back_after_s: Seconds = 10.0
    """Minimum time that demand must stay lower before serving gives a device back: the hysteresis of `auto`.
    While jobs run it is longer: until the idle time equals the cost to training of a hand-over there and back."""
    give_back_at_latest_s: Seconds = 300.0
    """Upper limit of that time, whatever the cost of a hand-over."""
    job_pause_s: Seconds = 3.8
    """Cost of a change of size to a running job: from the last step before it to the first step after it. Once a job
    has changed its size, its own measurement counts instead."""
    reaction_s: Seconds = 1.2
    """Time from the decision to move a device from training to serving until an engine on it answers requests."""
    late_requests_share: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of a model's requests that may be late: `auto` keeps as few replicas on standby as this allows, judging by
    the last half hour."""
    job_dwell_s: Seconds = 30.0
    """A running job does not grow again before this long after its last (re)start. Shrinking is never delayed."""
    turn_s: Seconds = 30.0
    """How long a model keeps its turn when the devices cannot serve all models with requests at once."""
    max_resident_asleep: int = Field(8, ge=0)
    """Sleeping replicas kept as processes; the least recently used beyond this many are stopped."""
    max_asleep_per_device: int = Field(2, ge=0)
    """Limit of sleeping replicas per GPU: each keeps 1 to 2 GB of its memory, which plans for jobs and engines leave
    free."""

    # --- hand-over steps
    drain_timeout_s: Seconds = 600.0
    sleep_timeout_s: Seconds = 60.0
    start_replica_timeout_s: Seconds = 600.0
    """Also limits a wake and a swap, which the engine's supervisor ends earlier (`[serve] swap_timeout_s`)."""
    start_group_timeout_s: Seconds = 600.0
    suspend_timeout_s: Seconds = 300.0
    stop_timeout_s: Seconds = 60.0
    open_timeout_s: Seconds = 30.0

    slow_step_s: Seconds = 10.0
    """For a step that takes longer than this, `appliance status` shows what it waits for."""

    # --- retries
    backoff_first_s: Seconds = 1.0
    """Wait before the second try of a failed operation; it doubles with each consecutive failure."""
    backoff_max_s: Seconds = 60.0
    """Upper limit of this wait. Retries never end."""
    start_backoff_max_s: Seconds = 600.0
    """The same for a model whose engines failed to start `replica_attempts` times by their own fault. A change of its
    settings or version ends the wait."""
    suspend_attempts: int = Field(3, ge=1)
    """Failed suspends of one group before it is stopped by force and resumed from its last snapshot."""
    job_attempts: int = Field(3, ge=1)
    """Failures by a job's own fault, without a step of progress between them, before the job is failed. Deaths of its
    supervisors, of its node or for lack of host memory do not count."""
    replica_attempts: int = Field(3, ge=1)
    """Consecutive failures of a model's replicas, by their own fault, after which its requests are refused between
    tries instead of held, and its canary is rolled back. Retries continue."""
    replica_stable_s: Seconds = 60.0
    """A replica that stayed open this long clears its model's failures. One that was open for longer than the previous
    backoff is replaced after `backoff_first_s`."""

    # --- failing devices
    device_retry_s: Seconds = 900.0
    """A device cordoned for heat, slowness or silence is retried after this time. Broken hardware waits for
    `appliance gpu undrain`."""
    hot_for_s: Seconds = 30.0
    """How long a GPU may be above its slowdown temperature before it is cordoned."""
    slow_for_s: Seconds = 300.0
    """How long board or power supply may slow a GPU, while most GPUs of its node run freely, before it is cordoned."""
    device_check_s: Seconds = 5.0
    """Interval of health readings of every GPU."""

    # --- observation
    observe_every_s: Seconds = 30.0
    """Level trigger: interval of observations without an event."""
