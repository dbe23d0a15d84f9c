"""When a rank writes its snapshots and model versions: beside training if possible. snapshot.py and publish.py say what
they hold; writing.py copies and commits both.

    wished for or due -> reserved during the step -> copied during the next one -> committed and told at its end

The snapshot of a suspension and the last version cannot overlap with a step: training has ended when they begin.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch

from train.control.progress import ControlSignals, Events, Progress
from train.data.packing import StepPlan
from train.plan.spec import TrainSpec
from train.state import fragments, parking, snapshot
from train.state.cadence import Cadence
from train.state.copies import CopyPlan
from train.state.prefault import prefault
from train.state.publish import begin_publish, fingerprint, published_tensors
from train.state.snapshot_reservation import SnapshotReservation, draft_name
from train.state.writing import Writing, Written
from weights.format.errors import StoreFull
from weights.format.layout import Layout
from weights.memory.draft import Draft
from weights.memory.store import WeightStore


class Saving:
    """One rank's part of it. `steps`: which step is the last, and which end an epoch.

    `begin_version`, `snapshot_if_room`, `suspend` and `publish_result` are collective. The state must not change
    between the begin of what is written beside a step and `copied`. `kept`: tensors that every snapshot takes along; to
    be set before the first of them, as `steps` is if it was not known before.
    """

    def __init__(
        self,
        spec: TrainSpec,
        store: WeightStore,
        engine: Any,
        steps: StepPlan,
        emit: Events,
        signals: ControlSignals,
        progress: Progress,
    ):
        self.spec, self.store, self.engine = spec, store, engine
        self.steps = steps
        self.kept: snapshot.Kept = snapshot.NOTHING
        self._emit, self._signals, self._progress = emit, signals, progress
        grid = fragments.grid(engine)
        self._rank, self._world_size = grid.rank, grid.world_size
        self._cadence = Cadence(spec.snapshot_every_s)
        self._room_s = 0.0  # processor time of making room after the last snapshot
        self._sealing: list[threading.Thread] = []
        self._writing: list[tuple[Writing | Written, Callable[[Written], None], Callable[[Exception], None] | None]]
        self._writing = []  # what is written, what tells of it, and what is told instead where there was no room
        self._beside = -1, Written("", 0, 0.0)
        self._room: threading.Thread | None = None
        self._reservation = SnapshotReservation(spec.job_id, self._reserve_snapshot) if self._rank == 0 else None
        # The step that this world began after. What it began with is perhaps the job's only snapshot, and is not made
        # again: reserving it anew removed it, and a job whose first step after a pause was left, or had no samples yet,
        # started over.
        self.began_at = -1

    # --- in a step

    def foresee(self, step: int) -> None:
        """Rank 0 reserves what the snapshot after `step`, the step under way, will be written into, once it is wished
        for or due."""
        if self._reservation is None or step == self.began_at:
            return
        if self._cadence.due():
            self._signals.snapshot = True
        if self._signals.snapshot or self._signals.suspend:
            # A version that is written first also gets the available room first.
            spec, steps = self.spec, self.steps
            version_due = (spec.publishes_epochs and step in steps.epoch_end_steps()) or (
                spec.publish == "best" and steps.validates(step, spec.eval_interval, spec.most_validations)
            )
            if not version_due and step < self.steps.total_steps:
                self._reservation.begin(step)

    def reserved(self, step: int) -> int:
        """The number of what rank 0 has reserved for the snapshot of this step; 0 on other ranks, or if nothing."""
        return self._reservation.number(step) if self._reservation is not None else 0

    def copied(self) -> None:
        """Returns when this rank's part of what is written beside the step is written: the state may change."""
        for writing, _, _ in self._writing:
            writing.copied()

    # --- between two steps

    def finish(self) -> None:
        """Commit and report what was written beside training. At a step boundary rank 0 does not wait: every rank
        marked its part before its optimizer stepped."""
        while self._writing:
            writing, tell, no_room = self._writing.pop(0)
            try:
                written = writing.finish()
            except OSError as error:
                # A draft's memory is allocated at reservation, its manifest's is not: others may have used the last
                # page. Only rank 0 commits, so the other ranks need not know.
                if no_room is None or error.errno != errno.ENOSPC:
                    raise
                assert isinstance(writing, Writing)
                writing.abort()
                no_room(error)
            else:
                tell(written)

    def make_first_room(self) -> None:
        """After the first step of this world: what it will write is known now."""
        if self._room is None:
            self._cadence.guess(self.layout.nbytes // self._world_size)
            self._make_room()

    def snapshot_if_room(self, step: int, draft: int, pace_s: float) -> None:
        """A snapshot of this step, copied beside the next over about `pace_s`."""
        if step == self.began_at:
            self._signals.snapshot = False
            return

        def tell(written: Written) -> None:
            self._beside = step, written
            self._emit("snapshot", step=step, **asdict(written))
            if dear := self._cadence.wrote(written.stall_s + written.beside_s + self._room_s):
                self._emit("message", level="info", text=dear)
            self._make_room()

        def no_room(full: Exception) -> None:
            if self._cadence.refused():
                self._emit(
                    "message",
                    level="warn",
                    text=(f"no snapshot at step {step}, the next is tried in {self._cadence.interval_s:.0f} s: {full}"),
                )

        self._cadence.begun()
        try:
            self._writing.append((self._begin_snapshot(step, draft=draft, pace_s=pace_s), tell, no_room))
        except StoreFull as full:  # raised on every rank; the run itself needs no room
            no_room(full)
        self._signals.snapshot = False

    def publish_if_room(self, step: int, pace_s: float) -> None:
        """A version of this step, copied beside the next. Training goes on without it where memory is full: the last
        step has one of its own."""

        def no_room(full: Exception) -> None:
            epoch = step * self.spec.batch_size / self.steps.n_packs
            text = f"the version of step {step}, epoch {epoch:.3g}, is not published: {full}"
            self._emit("message", level="warn", text=text)

        try:
            self.begin_version(self._version_name(step), step, pace_s, no_room)
        except StoreFull as full:  # raised on every rank
            no_room(full)

    def begin_version(
        self, version: str, step: int, pace_s: float | None, no_room: Callable[[Exception], None] | None = None
    ) -> None:
        """A version of the model as it is after this step, copied beside the next over about `pace_s`; None: now.

        no_room: told if its commit meets a full memory; None: that is an error. Raises StoreFull, on every rank.
        """
        self._progress.enter("publishing")
        epoch = step * self.spec.batch_size / self.steps.n_packs
        meta = {
            "job": self.spec.job_id,
            "base": self.spec.base_model,
            "step": step,
            "epoch": epoch,
            "method": self.spec.method,
            "base_version": self.spec.base_version,
        }
        adapter = None
        if self.spec.published_kind == "adapter":
            adapter = {
                "base": self.spec.base_model,
                "base_version": self.spec.base_version,
                "rank": self.spec.lora_rank,
            }
        else:
            meta["fingerprint"] = fingerprint(self.engine)

        def tell(written: Written) -> None:
            self._emit("published", version=version, adapter=adapter, step=step, epoch=epoch, **asdict(written))
            if self._rank == 0:
                self._seal(version)
            self._make_room()

        writing = begin_publish(self.engine, self.spec, self.store, version=version, meta=meta, pace_s=pace_s)
        self._writing.append((writing, tell, no_room))

    def _version_name(self, step: int) -> str:
        return f"{self.spec.version_prefix}{snapshot.version_name(step)}"

    # --- at the end

    def give_back(self) -> None:
        """The memory of what a snapshot brings back, where the process stays (see train.state.parking)."""
        parking.give_back(self._restorable)

    def suspend(self, step: int, draft: int) -> Written:
        """A snapshot of this step, in shared memory or, if that is full, on disk: the devices are wanted either way."""
        self.finish()
        if self._beside[0] == step:  # it was being written beside the step that was left
            self.drop_reserved()
            self.give_back()
            return replace(self._beside[1], seconds=0.0)
        self._progress.enter("snapshot")
        try:
            writing = self._begin_snapshot(step, draft=draft)
        except StoreFull as full:
            self._emit("message", level="warn", text=f"the snapshot of step {step} goes to disk: {full}")
            writing = self._begin_snapshot(step, snapshot.disk_store(self.spec))
        writing.copied()
        self.give_back()  # not only when it is committed, which others hold up
        return self._end_snapshot(writing, step)

    def publish_result(self, step: int) -> None:
        """Raises StoreFull, with the state kept on disk: a later start only publishes."""
        try:
            self.begin_version(self._version_name(step), step, None)
            self.finish()
        except StoreFull:
            # Hours of work must not be lost for lack of memory.
            self._progress.enter("snapshot")
            self._end_snapshot(self._begin_snapshot(step, snapshot.disk_store(self.spec)), step)
            raise

    def drop_reserved(self) -> None:
        """Free an unneeded reservation."""
        if self._reservation is not None:
            self._reservation.drop()

    def wait(self) -> None:
        """Return when none of its threads is running."""
        for thread in (*self._sealing, self._room):
            if thread is not None:
                thread.join()

    # --- how

    @cached_property
    def layout(self) -> Layout:
        """The layout of a snapshot."""
        return snapshot.snapshot_layout(self.engine, self.kept)

    @cached_property
    def _plan(self) -> CopyPlan:
        return snapshot.plan_of_written(self.engine, self.layout, self.kept)

    @cached_property
    def _restorable(self) -> list[torch.UntypedStorage]:
        return parking.restorable(self.engine) if parking.can_park(self.spec) else []

    @cached_property
    def _version_layout(self) -> Layout:
        return Layout.plan(published_tensors(self.engine, self.spec))

    def _begin_snapshot(
        self, step: int, store: WeightStore | None = None, draft: int = 0, pace_s: float | None = None
    ) -> Writing:
        """The part of this rank is written when it returns, or with `pace_s` beside the next step."""
        return snapshot.begin_snapshot(
            self.engine,
            self.spec,
            store or self.store,
            self.layout,
            step,
            pace_s,
            plan=self._plan,
            draft=self._take_draft(draft),
        )

    def _end_snapshot(self, writing: Writing, step: int) -> Written:
        written = writing.finish()
        self._cadence.begun()
        self._signals.snapshot = False
        self._emit("snapshot", step=step, **asdict(written))
        store = snapshot.store_of(written.path, self.store, self.spec)
        if self._rank == 0 and store is not self.store:
            snapshot.forget_older(store, self.spec)
        return written

    def _reserve_snapshot(self, step: int, draft: str) -> Draft:
        return snapshot.reserve_snapshot(self.spec, self.store, self.layout, step, self._world_size, draft)

    def _take_draft(self, number: int) -> Draft | None:
        """What rank 0 has reserved under this number, on every rank; None for 0."""
        if not number:
            return None
        if self._reservation is not None:
            return self._reservation.take()
        return self.store.attach(self.store.draft_path(draft_name(self.spec.job_id, number)), self.layout)

    def _make_room(self) -> None:
        """Forget old snapshots and make room for the next, on a thread: the next suspension is then only a copy."""
        if self._room is not None and self._room.is_alive():
            return
        ours = self._plan.ranges()
        assert self._restorable is not None  # looked for now, not while devices are waited for
        version = self._version_layout

        def make() -> None:
            began_s = time.thread_time()
            if self._rank == 0:
                snapshot.forget_older(self.store, self.spec)
                # Else the version would be cut out of the snapshot's segment.
                if self.spec.publish == "best" or (self.spec.publishes_epochs and self.steps.n_epochs > 1):
                    prefault(self.store, version, [], stock=True)
            prefault(self.store, self.layout, ours, stock=self._rank == 0)
            self._room_s = time.thread_time() - began_s

        self._room = threading.Thread(target=make, name="room", daemon=True)
        self._room.start()

    def _seal(self, version: str) -> None:
        stored = self.store.find(self.spec.published_kind, self.spec.output_model, version)
        thread = threading.Thread(target=self.store.seal, args=(stored,), name="seal")
        thread.start()
        self._sealing.append(thread)
