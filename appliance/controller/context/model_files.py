"""Long-running operations on model files for the controller: library on disk, store in shared memory, on threads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import ParamSpec, TypeVar

from appliance.controller.interfaces.errors import OperationFailed
from appliance.models.errors import ModelError
from appliance.models.library import ModelLibrary
from appliance.store.rows import VersionRow
from appliance.tiers.tiers import TierFlow, name_of
from weights.format.errors import VersionLeased, VersionNotFound, WeightsError
from weights.format.names import Name
from weights.memory.lease import unpin
from weights.memory.store import WeightStore

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

READERS_LEAVE_S = 30.0  # for an engine that is unloading an adapter, or a copy to a tier


class LibraryOps:
    """All raise OperationFailed for errors that a user can act on. Rows in the store are the callers'
    responsibility.

    let_go: gives up the box's own leases on a model. elsewhere: has other nodes remove their copies of what is
    deleted."""

    def __init__(
        self,
        library: ModelLibrary,
        store: WeightStore,
        flow: TierFlow,
        let_go: Callable[[str], None],
        elsewhere: Callable[[list[Name]], Awaitable[None]] | None = None,
    ):
        self.library, self._store, self._flow, self.let_go = library, store, flow, let_go
        self._elsewhere = elsewhere

    async def run(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run a method of `library` on a thread."""
        return await _thread(work, *arguments, **named)

    async def remove(self, model: str, rows: Sequence[VersionRow]) -> None:
        """Delete the bytes of these versions. Idempotent."""
        self.let_go(model)
        names = [name_of(row) for row in rows]
        for name in names:
            await _thread(self.library.remove, name.model, name.version)
            await self._forget(name)
            self._flow.forget(name)
        if self._elsewhere is not None:
            await self._elsewhere(names)

    async def _forget(self, name: Name) -> None:
        """Remove it from shared memory once it has no readers. If readers stay, eviction removes it later."""
        until_s = time.monotonic() + READERS_LEAVE_S
        while (stored := await _thread(self._store.find, *name)) is not None:
            try:
                await asyncio.to_thread(self._store.remove, stored)
            except VersionNotFound:
                return
            except VersionLeased as error:
                if time.monotonic() > until_s:
                    log.warning("%s was deleted, but %s", name, error)
                    await _thread(unpin, stored)
                    return
                await asyncio.sleep(0.05)


async def _thread(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    try:
        return await asyncio.to_thread(work, *arguments, **named)
    except (ModelError, WeightsError, OSError) as error:
        # For programs, the error's own name: CheckpointRefused -> checkpoint_refused.
        code = "".join("_" + c.lower() if c.isupper() else c for c in type(error).__name__).lstrip("_")
        raise OperationFailed(str(error), code=code) from error
