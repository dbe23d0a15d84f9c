"""Long-running operations on model files for the controller: library on disk, store in shared memory, on threads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from appliance.controller.interfaces.errors import OperationFailed
from appliance.models.errors import ModelError
from appliance.models.library import ModelLibrary, Report
from appliance.store.rows import VersionRow
from appliance.tiers.flow import TierFlow
from appliance.tiers.tiers import Checked, Tiers, name_of
from weights.checkpoint.folder import may_open
from weights.format.errors import VersionLeased, VersionNotFound, WeightsError
from weights.format.names import Name
from weights.memory.lease import unpin
from weights.memory.store import WeightStore

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

READERS_LEAVE_S = 30.0  # for an engine that is unloading an adapter, or a copy to a tier


class LibraryOps:
    """All raise OperationFailed for errors that a user can act on; `report` is called from any thread. Rows in the
    store are the callers' responsibility.

    let_go: gives up the box's own leases on a model. elsewhere: has other nodes remove their copies of what is
    deleted."""

    def __init__(
        self,
        library: ModelLibrary,
        store: WeightStore,
        tiers: Tiers,
        flow: TierFlow,
        let_go: Callable[[str], None],
        elsewhere: Callable[[list[Name]], Awaitable[None]] | None = None,
    ):
        self.library, self._store, self._tiers, self._flow, self.let_go = library, store, tiers, flow, let_go
        self._elsewhere = elsewhere

    async def run(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run a method of `library` on a thread."""
        return await _thread(work, *arguments, **named)

    async def verify(self, rows: Sequence[VersionRow], report: Report) -> dict[str, Any]:
        """Compare bytes with checksums in every tier; returns {"versions": [{"version", "path", "tensors", "bytes"}],
        "unsealed": copies without checksums yet, "tensors", "bytes"}. Raises OperationFailed naming the file of
        every damaged copy."""
        found = await self._check([name_of(row) for row in rows], report)
        await _thread(_check_may_open, rows)
        return {"versions": found.whole, "unsealed": found.unsealed, **found.totals()}

    async def verify_tiers(self, report: Report) -> dict[str, Any]:
        """The same for all versions, adapters and snapshots; returns {"copies", "unsealed", "tensors", "bytes"}."""
        found = await self._check(await _thread(self._tiers.known), report)
        return {"copies": len(found.whole), "unsealed": found.unsealed, **found.totals()}

    async def _check(self, names: list[Name], report: Report) -> Checked:
        found = await _thread(self._tiers.check, names, report)
        if found.faults:
            raise OperationFailed("; ".join(found.faults), code="copies_damaged")
        return found

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


def _check_may_open(rows: Sequence[VersionRow]) -> None:
    for row in rows:
        for folder in {path for path in (row.disk_path, row.shm_path) if path and Path(path).is_dir()}:
            with suppress(VersionNotFound):  # it has left shared memory
                may_open(Path(folder), row.model)


async def _thread(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    try:
        return await asyncio.to_thread(work, *arguments, **named)
    except (ModelError, WeightsError, OSError) as error:
        # For programs, the error's own name: CheckpointRefused -> checkpoint_refused.
        code = "".join("_" + c.lower() if c.isupper() else c for c in type(error).__name__).lstrip("_")
        raise OperationFailed(str(error), code=code) from error
