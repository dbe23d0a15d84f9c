"""Settings of the scheduler; `appliance.config` composes them into the box's one TOML file."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0)]


class SchedulerConfig(BaseModel):
    """Every dwell, timeout and bound of the decisions, with its unit in the name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # --- deciding
    target_inflight: int = Field(32, ge=1)
    """Requests one replica carries before another one is wanted, where no engine rate has been measured."""
    give_back_after_s: Seconds = 10.0
    """How long demand must stay lower, at the least, before serving gives a device back: the hysteresis of `auto`.
    While jobs run it is longer: until the devices have idled for what a hand-over there and back costs training."""
    give_back_at_latest_s: Seconds = 300.0
    """No cost of a hand-over keeps idle devices in serving for longer than this."""
    give_backs_per_hour: int = Field(60, ge=1)
    """How often a model's traffic may give devices back within an hour, and half of how often its number of replicas
    may change; beyond it they stay."""
    proved_hold_max_s: Seconds = 1800.0
    """Replicas wanted back before giving them back had paid are kept, each time twice as long; at most this long."""
    job_pause_s: Seconds = 3.0
    """What a change of size costs a running job: from its last step before to its first step after."""
    reaction_s: Seconds = 1.2
    """From the decision that serving takes a device from training to an engine that answers on it."""
    late_requests_share: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of a model's requests that `auto` may let come late, by what the last half hour taught: it keeps as few
    replicas on standby as that allows."""
    late_share: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Where no standby is learned: share of the demand of the last half hour that may come on top of the floor
    `auto` keeps for a model."""
    floor_hold_s: Seconds = 60.0
    """How long after a model's last request that floor is kept."""
    job_dwell_s: Seconds = 30.0
    """A running job is not grown again before this long after its last (re)start. Shrinking is never delayed."""
    turn_s: Seconds = 30.0
    """With more models asked for than devices to serve them, how long a model keeps its turn."""
    await_sleep_s: Seconds = 10.0
    """How long a model that wants a replica waits for one of its own that is falling asleep, before starting anew."""
    max_resident_asleep: int = Field(8, ge=0)
    """Sleeping replicas kept as processes; the least recently used beyond this many are stopped."""

    # --- doing
    drain_timeout_s: Seconds = 600.0
    sleep_timeout_s: Seconds = 60.0
    wake_timeout_s: Seconds = 120.0
    start_replica_timeout_s: Seconds = 600.0
    swap_timeout_s: Seconds = 120.0
    start_group_timeout_s: Seconds = 600.0
    suspend_timeout_s: Seconds = 300.0
    stop_timeout_s: Seconds = 60.0
    lease_timeout_s: Seconds = 60.0
    open_timeout_s: Seconds = 30.0

    slow_step_s: Seconds = 10.0
    """A step that takes longer than this says in `appliance status` what it waits for."""

    # --- trying again
    backoff_first_s: Seconds = 1.0
    """Wait before the second try of what failed; it doubles with each failure in a row."""
    backoff_max_s: Seconds = 60.0
    """The longest such wait. Nothing is given up for ever."""
    release_attempts: int = Field(5, ge=1)
    """Tries of a release inside one hand-over; afterwards the lease stays in the ledger and a later round retries."""
    suspend_attempts: int = Field(3, ge=1)
    """Failed suspends of one group before it is stopped by force and resumed from its last snapshot."""
    job_attempts: int = Field(3, ge=1)
    """Failures of a job by its own fault, without a step of progress between them, before the job is failed. Deaths
    of its supervisors, of its node or of the host's memory are not among them."""
    replica_attempts: int = Field(3, ge=1)
    """Failures of a model's replicas in a row, by their own fault, before its requests are refused between two tries
    instead of held, and before its canary is rolled back. It is tried on."""
    replica_stable_s: Seconds = 60.0
    """A replica that stayed open this long wipes its model's failures. One that was open for longer than the wait
    before it is followed by another one after `backoff_first_s`."""

    # --- devices that fail
    device_deaths: int = Field(2, ge=0)
    """Ranks or engines that die on one device before it is cordoned; 0: never for that reason."""
    death_window_s: Seconds = 600.0
    """Within how long they must have died."""
    device_retry_first_s: Seconds = 60.0
    """A device that was cordoned for deaths, heat or silence is tried again after this time; twice as long after each
    cordon that follows."""
    device_retry_longest_s: Seconds = 900.0
    """The longest such wait. Broken memory and Xids of the hardware wait for `appliance gpu undrain`."""
    hot_for_s: Seconds = 30.0
    """How long a GPU may be above its slowdown temperature before it is cordoned."""
    device_check_s: Seconds = 5.0
    """How often the driver is asked about the health of every GPU."""

    # --- looking
    observe_every_s: Seconds = 30.0
    """Level trigger: how often the truth is read again without any event asking for it."""

    @property
    def next_answer_s(self) -> float:
        """The soonest that a hand-over after one that begins now could answer: its job has to train again before."""
        return self.job_pause_s + self.reaction_s

    @property
    def changes_per_hour(self) -> int:
        """A model gives nothing back while its count has changed, up or down, so often within an hour."""
        return 2 * self.give_backs_per_hour

    def bounds(self) -> dict[str, float]:
        """Dwell times (s), and how often at most the traffic of one model makes devices change hands in an hour.

        Its count of replicas falls at most `give_backs_per_hour` times and changes at most `changes_per_hour` times,
        but for a last rise towards `max_replicas`. A fall is up to two hand-overs (engines sleep; a job grows), a rise
        is one.
        """
        return {
            "give_back_after_s": self.give_back_after_s,
            "job_dwell_s": self.job_dwell_s,
            "turn_s": self.turn_s,
            "handovers_per_hour": float(self.give_backs_per_hour + self.changes_per_hour),
        }
