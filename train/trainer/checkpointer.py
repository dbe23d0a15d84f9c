"""Saves a run while it trains: snapshots of its state, and versions of its weights.

Both are written between two steps, which wait for them: a snapshot only as often as that is cheap
(train.state.cadence), a version after an epoch or a validation and at the end.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

from train.control.progress import Events, Progress
from train.control.rank_messages import broadcast_json
from train.plan.spec import TrainSpec
from train.state import fragments, snapshot
from train.state.cadence import every_s
from train.state.publish import fingerprint, publish
from train.state.writing import Written, is_full
from weights.format.errors import StoreFull
from weights.format.layout import Layout
from weights.format.names import version_name
from weights.memory.store import WeightStore

_GUESSED_BYTES_S = 1e9  # of one rank, before the first snapshot was measured


class Checkpointer:
    """One rank's part in the run's snapshots. tokens: digest of the training data's tokens. kept: tensors that every
    snapshot takes along, to be set before the first of them."""

    def __init__(self, spec: TrainSpec, store: WeightStore, engine: Any, tokens: str, emit: Events, progress: Progress):
        self._spec, self._store, self._engine, self._tokens = spec, store, engine, tokens
        self._emit, self._progress, self._grid = emit, progress, fragments.grid(engine)
        self.kept: snapshot.Kept = {}
        self._newest: tuple[int, Written] | None = None
        self._refused = False  # the last try found shared memory full, which the job has reported
        self._last_s, self._cost_s = time.monotonic(), 0.0

    def due(self) -> bool:
        """Whether it is time for the next snapshot, on the rank that decides."""
        fixed_s = self._spec.snapshot_every_s  # 0: none but that of a suspension
        if fixed_s is None:
            fixed_s = every_s(self._cost_s or self._layout.nbytes / self._grid.world_size / _GUESSED_BYTES_S)
        return fixed_s > 0 and time.monotonic() - self._last_s >= fixed_s

    def save(self, step: int) -> None:
        """Collective: a snapshot of this step in shared memory. Training goes on without one where that is full."""
        try:
            self._write(step, self._store)
        except (StoreFull, OSError) as error:
            if not is_full(error):
                raise
            if not self._refused:
                self._emit("message", level="warn", text=f"no snapshot at step {step}: {error}")
            self._refused = True
        self._last_s = time.monotonic()

    def suspend(self, step: int) -> Written:
        """Collective: a snapshot of this step, in shared memory or, if that is full, on disk: the devices are wanted
        either way."""
        newest = self._newest
        # Rank 0 alone knows whether its commit succeeded.
        if broadcast_json(newest is not None and newest[0] == step):
            assert newest is not None
            return replace(newest[1], seconds=0.0)
        try:
            return self._write(step, self._store)
        except StoreFull as full:  # raised on every rank
            self._emit("message", level="warn", text=f"the snapshot of step {step} goes to disk: {full}")
            return self.save_on_disk(step)

    def save_on_disk(self, step: int) -> Written:
        """Collective: the same in the job's directory."""
        return self._write(step, snapshot.disk_store(self._spec))

    def _write(self, step: int, store: WeightStore) -> Written:
        self._progress.enter("snapshot")
        if self._grid.rank == 0:
            snapshot.forget_older(store, self._spec)
        written = snapshot.write_snapshot(
            self._engine, self._spec, store, self._layout, self.kept, step=step, tokens=self._tokens
        )
        self._newest, self._cost_s, self._refused = (step, written), written.seconds, False
        self._emit("snapshot", step=step, **asdict(written))
        return written

    @cached_property
    def _layout(self) -> Layout:
        return snapshot.snapshot_layout(self._engine, self.kept)


class Publisher:
    """One rank's part in the run's versions."""

    def __init__(self, spec: TrainSpec, store: WeightStore, engine: Any, emit: Events, progress: Progress):
        self._spec, self._store, self._engine, self._emit, self._progress = spec, store, engine, emit, progress

    def publish(self, step: int, epoch: float) -> None:
        """Collective: a version of the model as it is after this step. Raises StoreFull, on every rank."""
        spec = self._spec
        self._progress.enter("publishing")
        version = f"{spec.version_prefix}{version_name(step)}"
        meta = {
            "job": spec.job_id,
            "base": spec.base_model,
            "step": step,
            "epoch": epoch,
            "method": spec.method,
            "base_version": spec.base_version,
        }
        adapter = None
        if spec.published_kind == "adapter":
            adapter = {"base": spec.base_model, "base_version": spec.base_version, "rank": spec.lora_rank}
        else:
            meta["fingerprint"] = fingerprint(self._engine)
        written = publish(self._engine, spec, self._store, version=version, meta=meta)
        self._emit("published", version=version, adapter=adapter, step=step, epoch=epoch, **asdict(written))

    def publish_if_room(self, step: int, epoch: float) -> None:
        """As `publish`; where memory is full, training goes on without: the last step has a version of its own."""
        try:
            self.publish(step, epoch)
        except (StoreFull, OSError) as error:
            if not is_full(error):
                raise
            text = f"the version of step {step}, epoch {epoch:.3g}, is not published: {error}"
            self._emit("message", level="warn", text=text)
