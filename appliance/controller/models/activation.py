"""Makes another version of a model the active one: in the store, and then in every replica of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import SwapFailed
from appliance.store.errors import RowNotFound
from appliance.store.objects import models
from appliance.store.rows import ModelRow


class Activations:
    """One change of a model's version at a time: whoever calls `switch` holds the model's `lock` from before reading
    its row. A job that publishes and an import activate without it: theirs is the newest version, and the replicas
    follow. So a failed change takes back its own version only."""

    def __init__(self, context: ControllerContext):
        self._context = context
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # names come and go

    def lock(self, model: str) -> asyncio.Lock:
        return self._locks.setdefault(model, asyncio.Lock())

    async def switch(
        self, row: ModelRow, version: str, why: str, undone: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """The swap's measurements. undone: what the store has to forget with a version that is taken back, in one
        transaction. Raises SwapFailed: the store has the version of `row` again, and its replicas keep it or go back to
        it; unless that version, or the model, was deleted meanwhile."""
        undone = undone or (lambda: None)
        models.activate(self._context.db, row.id, version)
        self._context.scheduler.nudge(why)
        try:
            return await self._context.scheduler.converge_model(row.id)
        except SwapFailed:
            try:
                with self._context.db.transaction():
                    undone()
                    back = models.reactivate(self._context.db, row.id, failed=version, previous=row.active_version)
            except RowNotFound as error:
                undone()
                raise SwapFailed(row.id, version, "the version it would go back to was deleted meanwhile") from error
            if back:
                self._context.scheduler.nudge(f"{row.id} stays at {row.active_version}")
            raise
