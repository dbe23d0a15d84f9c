"""Runs all unfinished batches, one task each, and resumes them when the box starts."""

from __future__ import annotations

from functools import partial

from appliance.controller.batches.work import BatchWork
from appliance.controller.context.context import ControllerContext
from appliance.store.objects import batches
from runtime.background_tasks import RunningTasks


class BatchRunner:
    """`start` begins with the stored batches; `begin` adds a new one; call `poke` after a cancellation."""

    def __init__(self, context: ControllerContext):
        self._context = context
        self._works: dict[str, BatchWork] = {}
        self.tasks = RunningTasks()

    def start(self) -> None:
        for row in batches.list_unfinished(self._context.db):
            self.begin(row.id)

    def begin(self, batch_id: str) -> None:
        self._works[batch_id] = BatchWork(self._context, batch_id)
        task = self._context.background.keep(f"batch: {batch_id}", partial(self._run, batch_id))
        self.tasks.add(task).add_done_callback(lambda _: self._works.pop(batch_id, None))

    async def _run(self, batch_id: str) -> None:
        """The batch, or the rest of it if even its failure could not be written (a full disk)."""
        work = self._works[batch_id]
        if work.begun:
            row = batches.find(self._context.db, batch_id, viewer=None)
            if row is None or row.finished:
                return
            work = self._works[batch_id] = BatchWork(self._context, batch_id)
        await work.run()

    def poke(self, batch_id: str) -> None:
        if (work := self._works.get(batch_id)) is not None:
            work.wake.set()

    def progress(self, batch_id: str) -> tuple[int, int] | None:
        """(completed, failed) now; None for a batch that is not running."""
        work = self._works.get(batch_id)
        return (work.answers.completed, work.answers.failed) if work and work.opened else None

    def waits_for(self, batch_id: str) -> str | None:
        """Why it makes no progress now; None if it does."""
        work = self._works.get(batch_id)
        if work is None or not work.opened:
            return None
        return work.no_room or self._context.asking.why(work.asker.key_id, work.model) or None
