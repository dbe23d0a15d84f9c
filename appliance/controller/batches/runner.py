"""Runs all unfinished batches: resumes them when the box starts, and orders their access to engines.

One task per batch, all on the controller's loop. Batches send lines while the engines have room (`ports.BatchEngines`),
several owners taking turns, and each owner's oldest batch at the same engines goes first, by whatever names the batches
address them.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from appliance.controller.batches import share
from appliance.controller.batches.metering import Metering
from appliance.controller.batches.work import BatchWork
from appliance.controller.context.context import ControllerContext
from appliance.store.objects import batches
from runtime.background_tasks import RunningTasks


class BatchRunner:
    """`start` begins with the stored batches; `begin` adds a new one; call `poke` after a cancellation. tasks: one for
    each unfinished batch."""

    def __init__(self, context: ControllerContext, metering: Metering):
        self._context = context
        self.metering = metering
        self._works: dict[str, BatchWork] = {}
        self._sent = 0
        self._last_sent: dict[str, int] = {}  # by owner
        self.tasks = RunningTasks()

    def start(self) -> None:
        for row in batches.list_unfinished(self._context.db):
            self.begin(row.id)

    def begin(self, batch_id: str) -> None:
        self._works[batch_id] = BatchWork(self._context, batch_id, self)
        task = self._context.background.keep(f"batch: {batch_id}", partial(self._run, batch_id))
        self.tasks.add(task).add_done_callback(lambda _: self._ended(batch_id))

    async def _run(self, batch_id: str) -> None:
        """The batch, or the rest of it if even its failure could not be written (a full disk)."""
        work = self._works[batch_id]
        if work.begun:
            row = batches.find(self._context.db, batch_id, viewer=None)
            if row is None or row.finished:
                return
            work = self._works[batch_id] = BatchWork(self._context, batch_id, self)
        await work.run()

    def poke(self, batch_id: str) -> None:
        if (work := self._works.get(batch_id)) is not None:
            work.wake.set()

    def progress(self, batch_id: str) -> tuple[int, int] | None:
        """(completed, failed) now; None for a batch that is not running."""
        work = self._works.get(batch_id)
        return (work.answers.completed, work.answers.failed) if work and work.opened else None

    def waits_for(self, batch_id: str) -> str | None:
        """Why none of its remaining lines is at an engine; None if one is, or none remain."""
        work = self._works.get(batch_id)
        if work is None or not work.left or work.flying:
            return None
        if work.stopped_by:
            return work.stopped_by
        if self.is_behind(work):
            return "an older batch at the same engines goes first"
        return self._context.batch_engines.room(work.model).why or None

    def room(self, asking: BatchWork) -> int:
        """Lines that this batch may start now: what the engines have left, owners taking turns; each owner's oldest
        batch goes first."""
        if self.is_behind(asking):
            return 0
        same = [work for work in self._works.values() if work.host == asking.host]
        flying: Counter[str] = Counter()
        wanting: Counter[str] = Counter()
        for work in same:
            flying[work.owner] += len(work.flying)
            if work.left and not work.stopped_by and work.owner not in wanting:
                wanting[work.owner] = len(work.left)
        wanting[asking.owner] = len(asking.left)
        lines = self._context.batch_engines.room(asking.model).lines
        return share.slots(lines, wanting, flying, self._last_sent)[asking.owner]

    def sent(self, work: BatchWork) -> None:
        """A line of this batch went to an engine."""
        self._sent += 1
        self._last_sent[work.owner] = self._sent

    def returned(self, work: BatchWork) -> None:
        """A line came back, and its batch stores it: it may be another owner's turn. Only the one batch of each owner
        that may send is woken: to wake all, 160 of five owners, took the loop 50 ms per line."""
        work.wake.set()
        self._wake_first(work.host)

    def gives_way(self, work: BatchWork) -> None:
        """It sends no more for now; another batch of its owner may."""
        self._wake_first(work.host)

    def is_behind(self, asking: BatchWork) -> bool:
        """Whether an older batch of its owner at its engines has lines left that its own key does not hold back."""
        for work in self._works.values():
            if work is asking:
                return False
            if (work.host, work.owner) == (asking.host, asking.owner) and work.left and not work.stopped_by:
                return True
        return False

    def _wake_first(self, host: str | None = None) -> None:
        """Wakes the first batch of each owner. host: None for the engines of each."""
        found: dict[tuple[str, str], BatchWork] = {}
        for work in self._works.values():
            if host in (None, work.host) and work.left and not work.stopped_by:
                found.setdefault((work.owner, work.host), work)
        for work in found.values():
            work.wake.set()

    def tell_wants(self) -> None:
        self._context.batch_engines.wants(
            list(dict.fromkeys(work.model for work in self._works.values() if work.left or work.flying))
        )

    def _ended(self, batch_id: str) -> None:
        self._works.pop(batch_id, None)
        live = {work.owner for work in self._works.values()}
        self._last_sent = {owner: number for owner, number in self._last_sent.items() if owner in live}
        self.tell_wants()
        self._wake_first()
