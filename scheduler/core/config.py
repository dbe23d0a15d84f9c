"""Settings of the scheduler; `appliance.config` composes them into the box's one TOML file."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0)]


class SchedulerConfig(BaseModel):
    """Every dwell, timeout and limit of the scheduler's decisions, with its unit in the name."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    # --- decisions
    target_inflight: int = Field(32, ge=1)
    """Requests one replica carries before another one is wanted, if no engine rate has been measured."""
    give_back_after_s: Seconds = 10.0
    """Minimum time that demand must stay lower before serving gives a device back: the hysteresis of `auto`.
    While jobs run it is longer: until the devices have idled for what a hand-over there and back costs training."""
    give_back_at_latest_s: Seconds = 300.0
    """Upper limit on that time: no hand-over cost keeps idle devices in serving for longer."""
    job_pause_s: Seconds = 3.8
    """What a change of size costs a running job: from the last step before it to the first step after it. Once a job
    has changed its size, what that took counts instead."""
    reaction_s: Seconds = 1.2
    """Time from the decision to move a device from training to serving until an engine on it answers."""
    late_requests_share: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of a model's requests that `auto` lets be late, as learned from the last half hour: it keeps as few
    replicas on standby as that allows."""
    job_dwell_s: Seconds = 30.0
    """A running job does not grow again before this long after its last (re)start. Shrinking is never delayed."""
    turn_s: Seconds = 30.0
    """When more models have requests than the devices can serve, how long a model keeps its turn."""
    max_resident_asleep: int = Field(8, ge=0)
    """Sleeping replicas kept as processes; the least recently used beyond this many are stopped."""
    max_asleep_per_device: int = Field(2, ge=0)
    """The most of them on one GPU: each keeps 1 to 2 GB of its memory, which plans for jobs and engines leave free."""

    # --- hand-over steps
    drain_timeout_s: Seconds = 600.0
    sleep_timeout_s: Seconds = 60.0
    start_replica_timeout_s: Seconds = 600.0
    """Also of a wake and a swap, which the engine's supervisor ends sooner (`[serve] swap_timeout_s`)."""
    start_group_timeout_s: Seconds = 600.0
    suspend_timeout_s: Seconds = 300.0
    stop_timeout_s: Seconds = 60.0
    open_timeout_s: Seconds = 30.0

    slow_step_s: Seconds = 10.0
    """A step that takes longer than this says in `appliance status` what it waits for."""

    # --- retries
    backoff_first_s: Seconds = 1.0
    """Wait before the second try of a failed operation; it doubles with each consecutive failure."""
    backoff_max_s: Seconds = 60.0
    """The longest such wait. Tries never end."""
    start_backoff_max_s: Seconds = 600.0
    """The same for a model whose engines failed to start `replica_attempts` times by their own fault. A change of its
    settings or version ends the wait."""
    suspend_attempts: int = Field(3, ge=1)
    """Failed suspends of one group before it is stopped by force and resumed from its last snapshot."""
    job_attempts: int = Field(3, ge=1)
    """Failures by a job's own fault, without a step of progress between them, before the job is failed. Deaths of its
    supervisors, of its node or for lack of host memory do not count."""
    replica_attempts: int = Field(3, ge=1)
    """Consecutive failures of a model's replicas, by their own fault, before its requests are refused between two tries
    instead of held, and before its canary is rolled back. The tries continue."""
    replica_stable_s: Seconds = 60.0
    """A replica that stayed open this long clears its model's failures. One that was open for longer than the previous
    backoff is replaced after `backoff_first_s`."""

    # --- failing devices
    device_retry_s: Seconds = 900.0
    """A device cordoned for heat, slowness or silence is tried again after this time. Broken hardware waits for
    `appliance gpu undrain`."""
    hot_for_s: Seconds = 30.0
    """How long a GPU may be above its slowdown temperature before it is cordoned."""
    slow_for_s: Seconds = 300.0
    """How long a GPU may be slowed by its board or power supply, most of its node's not, before it is cordoned."""
    device_check_s: Seconds = 5.0
    """How often the driver is asked about the health of every GPU."""

    # --- observation
    observe_every_s: Seconds = 30.0
    """Level trigger: how often the scheduler observes the world without an event."""
