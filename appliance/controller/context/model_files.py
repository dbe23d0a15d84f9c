"""Long-running operations on model files for the controller: library on disk, store in shared memory, on threads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from appliance.controller.interfaces.errors import OperationFailed
from appliance.controller.interfaces.records import (
    AdapterBase,
    AdapterFound,
    ModelStats,
    Progress,
    Report,
    VersionPaths,
)
from appliance.models.errors import ModelError
from appliance.models.library import ModelLibrary, ModelVersion
from appliance.store.rows import columns
from appliance.tiers.flow import TierFlow
from appliance.tiers.tiers import Checked, Tiers
from weights.checkpoint.errors import CheckpointRefused
from weights.checkpoint.folder import may_open
from weights.format.errors import VersionLeased, VersionNotFound, WeightsError
from weights.memory.lease import unpin
from weights.memory.store import WeightStore
from weights.tiers.record import Name

log = logging.getLogger(__name__)

KINDS_OF_MODELS = ("version", "adapter")
READERS_LEAVE_S = 30.0  # for an engine that is unloading an adapter, or a copy to a tier


class LibraryOps:
    """All raise OperationFailed for errors that a user can act on; `report` may be called from any thread. Rows in the
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
        self._library, self._store, self._tiers, self._flow, self.let_go = library, store, tiers, flow, let_go
        self._elsewhere = elsewhere

    async def import_model(self, source: str, *, name: str | None, revision: str | None, report: Report) -> ModelStats:
        """Import a checkpoint directory or hub repository `source`, checked, as a new version. `name` None: derive it
        from the source."""
        made = await _thread(self._library.import_model, source, name=name, revision=revision, report=_reporter(report))
        return _stats(made)

    async def find_adapter(self, source: str, *, name: str | None, revision: str | None) -> AdapterFound | None:
        """What the directory or hub repository `source` says of itself if it is a LoRA adapter's; None for everything
        else."""
        found = await _thread(self._library.find_adapter, source, name=name, revision=revision)
        return None if found is None else AdapterFound(*found)

    async def import_adapter(
        self, source: str, *, found: AdapterFound, base: AdapterBase, report: Report
    ) -> ModelStats:
        """Import the adapter that `find_adapter` found as a new version of its name, checked against the base that it
        is to be served on."""
        made = await _thread(
            self._library.import_adapter,
            source,
            name=found.name,
            revision=found.revision,
            base=base.model,
            base_version=base.version,
            base_path=Path(base.path),
            rank_limit=base.rank_limit,
            report=_reporter(report),
        )
        return _stats(made)

    async def verify(self, name: str, paths: list[VersionPaths], report: Report) -> dict[str, Any]:
        """Compare bytes with checksums in every tier; returns {"versions": [{"version", "path", "tensors", "bytes"}],
        "unsealed": copies without checksums yet, "tensors", "bytes"}. Raises OperationFailed naming the file of
        every damaged copy."""
        found = await self._check([Name(one.kind, name, one.version) for one in paths], report)
        for folder in dict.fromkeys(path for one in paths for path in (one.disk_path, one.shm_path) if path):
            if Path(folder).is_dir():
                await self._may_open(Path(folder), name)
        return {"versions": found.whole, "unsealed": found.unsealed, **found.totals()}

    async def _may_open(self, folder: Path, name: str) -> None:
        try:
            await _thread(may_open, folder, name)
        except VersionNotFound:
            return  # it has left shared memory
        except CheckpointRefused as error:
            raise OperationFailed(str(error), code=_code(error)) from error

    async def verify_tiers(self, report: Report) -> dict[str, Any]:
        """The same for all versions, adapters and snapshots; returns {"copies", "unsealed", "tensors", "bytes"}."""
        found = await self._check(await _thread(self._tiers.known), report)
        return {"copies": len(found.whole), "unsealed": found.unsealed, **found.totals()}

    async def _check(self, names: list[Name], report: Report) -> Checked:
        found = await _thread(self._tiers.check, names, _reporter(report))
        if found.faults:
            raise OperationFailed("; ".join(found.faults), code="copies_damaged")
        return found

    async def remove(self, name: str, paths: list[VersionPaths]) -> None:
        """Delete the bytes of these versions. Idempotent."""
        self.let_go(name)
        everywhere = [Name(kind, name, one.version) for one in paths for kind in KINDS_OF_MODELS]
        for path in paths:
            names = [Name(kind, name, path.version) for kind in KINDS_OF_MODELS]
            await _thread(self._library.remove, name, path.version)
            for one in names:
                await self._forget(one)
                self._flow.forget(one)
        if self._elsewhere is not None:
            await self._elsewhere(everywhere)

    async def _forget(self, name: Name) -> None:
        """Remove it from shared memory once nobody reads it. If readers stay, eviction removes it later."""
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


async def _thread(work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    try:
        return await asyncio.to_thread(work, *arguments, **named)
    except (ModelError, WeightsError, OSError) as error:
        raise OperationFailed(str(error), code=_code(error)) from error


def _code(error: Exception) -> str:
    """CheckpointRefused -> checkpoint_refused: the error's own name, for programs."""
    return "".join("_" + c.lower() if c.isupper() else c for c in type(error).__name__).lstrip("_")


def _reporter(report: Report) -> Callable[[float, float | None, str, str], None]:
    return lambda done, total, unit, message: report(Progress(done, total, unit, message))


def _stats(made: ModelVersion) -> ModelStats:
    return ModelStats(
        **columns(made, "name version arch params bytes task source max_model_len"),
        disk_path=str(made.path),
        info={**made.info, "warnings": list(made.warnings)},
        adapter_rank=made.info.get("adapter", {}).get("rank"),
    )
