"""The training loop: steps, and between them everything else a run does (validate, snapshot, publish, stop).

    for each step:  micro-batches -> optimizer step -> one tiny all-reduce (loss and wishes) -> act on the wishes

The all-reduce makes all ranks see the same wishes at the same step boundary, so they suspend, cancel or snapshot
together without any other coordination.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from deepspeed import comm

from train import fragments, parking, snapshot
from train.ahead import Ahead, draft_name
from train.beside import Writing, Written
from train.board import Board
from train.copies import CopyPlan
from train.data import TokenSet
from train.errors import TrainingDiverged
from train.event_log import EventLog
from train.objectives import to_batch
from train.packing import StepPlan
from train.publish import begin_publish, published_tensors
from train.room import make_room
from train.schedule import learning_rate
from train.spec import TrainSpec
from weights.draft import Draft
from weights.errors import StoreFull
from weights.layout import Layout
from weights.store import WeightStore

WISHES = ("suspend", "cancel", "snapshot")
_PACED_SHARE = 0.5  # of a step's time, over which a copy beside it is spread


class Events(Protocol):
    """Where a run reports to; called on rank 0 only."""

    def __call__(self, event: str, **data: Any) -> None: ...


@dataclass
class Wishes:
    """What was asked of this rank from outside; written by another thread, read at step boundaries."""

    suspend: bool = False
    cancel: bool = False
    snapshot: bool = False

    def clear(self) -> None:
        """What was asked is done."""
        self.suspend = self.cancel = self.snapshot = False


@dataclass
class Progress:
    """Where the run is, for the heartbeat: a phase that lasts too long is a hang."""

    phase: str = "starting"
    step: int = 0
    since: float = field(default_factory=time.monotonic)

    def enter(self, phase: str, step: int | None = None) -> None:
        self.phase, self.step, self.since = phase, self.step if step is None else step, time.monotonic()

    def report(self) -> dict[str, Any]:
        return {"phase": self.phase, "step": self.step, "in_phase_s": time.monotonic() - self.since}


class Run:
    """One rank's part of a job, from an engine in memory to an outcome.

    Build it with `train.prepare`, then `run`. Events are those of the contract in `train.group`.
    """

    def __init__(self, spec: TrainSpec, store: WeightStore, engine: Any, train: TokenSet, valid: TokenSet | None,
                 emit: Events, wishes: Wishes, progress: Progress):  # fmt: skip
        self.spec, self.store, self.engine = spec, store, engine
        self.train, self.valid = train, valid
        self.grid = fragments.grid(engine)
        self.rank, self.world_size = self.grid.rank, self.grid.world_size
        self.leash_events = emit
        self.emit = EventLog(spec.run_dir, emit) if self.rank == 0 else lambda event, **data: None
        self.wishes, self.progress = wishes, progress
        self.plan = StepPlan(len(train.packs), spec.batch_size, spec.micro_batch, spec.n_epochs, spec.seed)
        self.step = 0
        self._resumed_from: str | None = None
        self._last_snapshot_s = time.monotonic()
        self._sealing: list[threading.Thread] = []
        self._writing: list[tuple[Writing | Written, Callable[[Written], None]]] = []
        self._room: threading.Thread | None = None
        self._pace_s = 0.0
        self.boundary_s = 0.0  # time.monotonic() at the end of the last step
        self._ahead = Ahead(spec.job_id, self._reserve_snapshot) if self.rank == 0 else None
        self._board = Board(Path(spec.run_dir) / "tb") if self.rank == 0 else None

    def resume_from(self, path: str) -> None:
        """Collective: take the state of a snapshot. Raises SnapshotMismatch."""
        self.progress.enter("resuming")
        store = snapshot.store_of(path, self.store, self.spec)
        self.step = snapshot.read_snapshot(self.engine, self.spec, store, path)
        self._resumed_from = path

    def run(self) -> dict[str, Any]:
        """Train to the end or to a wish; the outcome, as it stands in the final event. Then `close` it."""
        total = self.plan.total_steps
        epoch_ends = self.plan.epoch_end_steps()
        wishes, self.boundary_s = self._agreed(), time.monotonic()
        if wishes["suspend"]:
            parking.give_back(self._restorable)
            return self._suspended(self._resumed_from, 0, 0.0)
        if self.step == 0:
            self._validate()
        while self.step < total:
            wishes = self._one_step(total)
            self.boundary_s = time.monotonic()
            self._finish_writing()
            if self._room is None:
                self._make_room()
            if self.step in epoch_ends:
                self._validate()
                if self.spec.publish == "epoch" and self.step < total:
                    self._begin_publish(snapshot.version_name(self.step), pace_s=self._pace_s)
            if self.step == total:
                break
            if wishes["cancel"]:
                self._finish_writing()
                self._drop_ahead()
                return {"outcome": "cancelled", "step": self.step}
            if wishes["suspend"]:
                self._finish_writing()
                writing = self._begin_snapshot_somewhere(wishes["draft"])
                writing.copied()
                parking.give_back(self._restorable)  # not only when it is committed, which others hold up
                written = self._end_snapshot(writing)
                return self._suspended(written.path, written.bytes, written.seconds)
            if wishes["snapshot"]:
                self._snapshot_if_room(wishes["draft"])
        self._drop_ahead()
        self._publish_result()
        for thread in (*self._sealing, self._room):
            if thread is not None:
                thread.join()
        return {"outcome": "succeeded", "step": self.step}

    def close(self) -> None:
        """Write out what is buffered for TensorBoard: the process may end without any of Python's own clean-up."""
        if self._board is not None:
            self._board.close()

    def _one_step(self, total: int) -> dict[str, Any]:
        started = time.perf_counter()
        spec, step = self.spec, self.step
        packs = self.plan.packs_of_step(step)
        scale = 1.0 / self.train.labels_in(packs)
        rate = learning_rate(step, total, peak=spec.learning_rate, warmup_ratio=spec.warmup_ratio)
        for group in self.engine.optimizer.optimizer.param_groups:
            group["lr"] = rate

        loss = torch.zeros((), dtype=torch.float32, device=self.engine.device)
        micro_batches = self.plan.micro_batches(step, self.grid.data_rank, self.grid.data_size)
        for turn, (number, micro) in enumerate(micro_batches, 1):
            self.progress.enter("step", step)
            self._foresee(step + 1)
            # Dropout depends on the micro-batch, not on the rank that computes it or on what ran before.
            torch.manual_seed(hash((spec.seed, step, number)) & 0x7FFF_FFFF)
            part = self.engine(to_batch(self.train.row(micro), scale, self.engine.device))
            # A tensor of its own: on the engine's very output DeepSpeed 0.19.8 divides by the accumulation steps
            # although told not to (its hook there runs before it notices that this is its own backward).
            self.engine.backward(part * 1, scale_wrt_gas=False)
            loss += part.detach()
            if turn == len(micro_batches):
                for writing, _ in self._writing:
                    writing.copied()  # from here on the state is another
            self._foresee(step + 1)
            self.engine.step()
        self.step += 1
        self._pace_s = _PACED_SHARE * (time.perf_counter() - started)
        return self._agree_and_report(loss, rate, packs, total, started)

    def _agree_and_report(self, loss: torch.Tensor, rate: float, packs: np.ndarray, total: int,
                          started: float) -> dict[str, Any]:  # fmt: skip
        self._foresee(self.step)
        agreed = self._agreed(loss)
        grad_norm = float(self.engine.get_global_grad_norm() or 0.0)
        if not (math.isfinite(agreed["loss"]) and math.isfinite(grad_norm)):
            raise TrainingDiverged(self.step, agreed["loss"], grad_norm)
        if self.rank == 0:
            tokens = self.train.tokens_in(packs)
            metrics = {
                "loss": agreed["loss"], "grad_norm": grad_norm, "learning_rate": rate,
                "tokens_per_s": tokens / (time.perf_counter() - started),
            }  # fmt: skip
            self._board.write("train", self.step, metrics)
            self.emit("metrics", step=self.step, total_steps=total, devices=self.world_size, tokens=tokens,
                      epoch=self.step * self.spec.batch_size / len(self.train.packs), **metrics)  # fmt: skip
        return agreed

    def _foresee(self, step: int) -> None:
        """Rank 0 reserves what the snapshot after `step`, the step under way, will be written into, once it is wished
        for or due."""
        if self._ahead is None:
            return
        every_s = self.spec.snapshot_every_s
        if every_s and time.monotonic() - self._last_snapshot_s >= every_s:
            self.wishes.snapshot = True
        if self.wishes.snapshot or self.wishes.suspend:
            # Where a version comes first, it comes first to what room there is as well.
            version_due = self.spec.publish == "epoch" and step in self.plan.epoch_end_steps()
            if not version_due and step < self.plan.total_steps:
                self._ahead.begin(step)

    def _agreed(self, loss: torch.Tensor | None = None) -> dict[str, Any]:
        """Collective: the loss of all ranks, what any of them was asked for, and as "draft" the number of what rank 0
        has reserved for the snapshot of this step, 0 if nothing."""
        wishes = asdict(self.wishes)
        draft = self._ahead.number(self.step) if self._ahead is not None else 0
        message = torch.tensor([0.0, draft] + [float(wishes[name]) for name in WISHES], device=self.engine.device)
        if loss is not None and self.grid.tensor_rank == 0:  # its group has the same
            message[0] = loss
        comm.all_reduce(message)
        total, draft, *wished = message.tolist()
        found = {name: count > 0 for name, count in zip(WISHES, wished, strict=True)}
        return {"loss": total, "draft": int(draft)} | found

    def _validate(self) -> None:
        if self.valid is None:
            return
        self.progress.enter("validating")
        packs = np.arange(len(self.valid.packs))
        if self.spec.validation_batches:
            packs = packs[: self.spec.validation_batches * self.spec.micro_batch]
        scale = 1.0 / self.valid.labels_in(packs)
        loss = torch.zeros((), dtype=torch.float32, device=self.engine.device)
        self.engine.eval()
        # Every rank runs equally many forwards: under ZeRO-3 each of them is a collective.
        for turn in range(-(-len(packs) // self.grid.data_size)):
            index = turn * self.grid.data_size + self.grid.data_rank
            with torch.no_grad():
                part = self.engine(to_batch(self.valid.row(packs[[index % len(packs)]]), scale, self.engine.device))
            if index < len(packs) and self.grid.tensor_rank == 0:
                loss += part
        self.engine.train()
        comm.all_reduce(loss)
        if self.rank == 0:
            self._board.write("validation", self.step, {"loss": loss.item()})
        self.emit("validation", step=self.step, total_steps=self.plan.total_steps, loss=loss.item())

    def _begin_snapshot(self, store: WeightStore | None = None, draft: int = 0, pace_s: float | None = None) -> Writing:
        """The part of this rank is written when it returns, or with `pace_s` beside the next step."""
        return snapshot.begin_snapshot(self.engine, self.spec, store or self.store, self._layout, self.step, pace_s,
                                       plan=self._plan, draft=self._take_draft(draft))  # fmt: skip

    def _begin_snapshot_somewhere(self, draft: int) -> Writing:
        """In shared memory, or on disk if that is full: the devices are wanted either way."""
        self.progress.enter("snapshot")
        try:
            return self._begin_snapshot(draft=draft)
        except StoreFull as full:
            self.emit("message", level="warning", text=f"the snapshot of step {self.step} goes to disk: {full}")
            return self._begin_snapshot(snapshot.disk_store(self.spec))

    def _end_snapshot(self, writing: Writing) -> Written:
        written = writing.finish()
        self._last_snapshot_s, self.wishes.snapshot = time.monotonic(), False
        self.emit("snapshot", step=self.step, **asdict(written))
        store = snapshot.store_of(written.path, self.store, self.spec)
        if self.rank == 0 and store is not self.store:
            snapshot.forget_older(store, self.spec)
        return written

    def _reserve_snapshot(self, step: int, draft: str) -> Draft:
        return snapshot.reserve_snapshot(self.spec, self.store, self._layout, step, self.world_size, draft)

    def _take_draft(self, number: int) -> Draft | None:
        """What rank 0 has reserved under this number, on every rank; None for 0."""
        if not number:
            return None
        if self._ahead is not None:
            return self._ahead.take()
        return self.store.attach(self.store.draft_path(draft_name(self.spec.job_id, number)), self._layout)

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.drop()

    def _snapshot_if_room(self, draft: int) -> None:
        """A snapshot of this step, copied beside the next."""
        step = self.step

        def tell(written: Written) -> None:
            self.emit("snapshot", step=step, **asdict(written))
            self._make_room()

        try:
            writing = self._begin_snapshot(draft=draft, pace_s=self._pace_s)
            self._writing.append((writing, tell))
            self._last_snapshot_s, self.wishes.snapshot = time.monotonic(), False
        except StoreFull as full:  # raised on every rank; the run itself needs no room
            self._last_snapshot_s, self.wishes.snapshot = time.monotonic(), False
            self.emit("message", level="warning", text=f"no snapshot at step {self.step}: {full}")

    def _finish_writing(self) -> None:
        """What is being written beside training is committed and told. At a step boundary rank 0 waits for nobody:
        every rank has marked its part before its optimizer stepped."""
        while self._writing:
            writing, tell = self._writing.pop(0)
            tell(writing.finish())

    def _make_room(self) -> None:
        """Forget old snapshots and make room for the next, on a thread: the next suspension is then only a copy."""
        if self._room is not None and self._room.is_alive():
            return
        ours = self._plan.ranges()
        assert self._restorable is not None  # looked for now, not while devices are waited for
        version = self._version_layout

        def make() -> None:
            if self.rank == 0:
                snapshot.forget_older(self.store, self.spec)
                if self.spec.publish == "epoch":  # else the version would be cut out of the snapshot's segment
                    make_room(self.store, version, [], stock=True)
            make_room(self.store, self._layout, ours, stock=self.rank == 0)

        self._room = threading.Thread(target=make, name="room", daemon=True)
        self._room.start()

    @cached_property
    def _layout(self) -> Layout:
        return snapshot.snapshot_layout(self.engine)

    @cached_property
    def _plan(self) -> CopyPlan:
        return snapshot.plan_of_written(self.engine, self._layout)

    @cached_property
    def _restorable(self) -> list[torch.UntypedStorage]:
        return parking.restorable(self.engine) if parking.can_park(self.spec) else []

    @cached_property
    def _version_layout(self) -> Layout:
        return Layout.plan(published_tensors(self.engine, self.spec))

    def _publish_result(self) -> None:
        try:
            self._begin_publish(self.spec.output_version or snapshot.version_name(self.step), pace_s=None)
            self._finish_writing()
        except StoreFull:
            # Hours of work must not depend on room in memory: with this snapshot a later start only publishes.
            self.progress.enter("snapshot")
            self._end_snapshot(self._begin_snapshot(snapshot.disk_store(self.spec)))
            raise

    def _begin_publish(self, version: str, *, pace_s: float | None) -> None:
        self.progress.enter("publishing")
        step, epoch = self.step, self.step * self.spec.batch_size / len(self.train.packs)
        meta = {
            "job": self.spec.job_id, "base": self.spec.base_model, "step": self.step, "epoch": epoch,
            "method": self.spec.method, "base_version": self.spec.base_version,
        }  # fmt: skip
        adapter = None
        if self.spec.published_kind == "adapter":
            adapter = {"base": self.spec.base_model, "base_version": self.spec.base_version,
                       "rank": self.spec.lora_rank}  # fmt: skip

        def tell(written: Written) -> None:
            self.emit("published", version=version, adapter=adapter, step=step, epoch=epoch, **asdict(written))
            if self.rank == 0:
                self._seal(version)
            self._make_room()

        writing = begin_publish(self.engine, self.spec, self.store, version=version, meta=meta, pace_s=pace_s)
        self._writing.append((writing, tell))

    def _seal(self, version: str) -> None:
        stored = self.store.find(self.spec.published_kind, self.spec.output_model, version)
        thread = threading.Thread(target=self.store.seal, args=(stored,), name="seal")
        thread.start()
        self._sealing.append(thread)

    def _suspended(self, path: str | None, nbytes: int, seconds: float) -> dict[str, Any]:
        return {"outcome": "suspended", "step": self.step, "snapshot_path": path, "bytes": nbytes,
                "seconds": {"snapshot": seconds}, "parked": parking.can_park(self.spec)}  # fmt: skip
