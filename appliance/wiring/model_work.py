"""Long work on models' bytes for the controller: the library on disk and the store in shared memory, on threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from appliance.controller.errors import OperationFailed
from appliance.controller.ports import ModelStats, Progress, Report, VersionPlace
from appliance.models.errors import ModelError
from appliance.models.library import ModelLibrary, ModelVersion
from appliance.wiring.tier_check import Checked, check
from appliance.wiring.tier_flow import TierFlow
from weights.errors import VersionNotFound, WeightsError
from weights.record import Name
from weights.store import WeightStore


class LibraryOps:
    """Implements `appliance.controller.ports.ModelOps`. `let_go` gives up the box's own leases on a model."""

    def __init__(self, library: ModelLibrary, store: WeightStore, flow: TierFlow, let_go: Callable[[str], None]):
        self._library, self._store, self._flow, self._let_go = library, store, flow, let_go

    async def import_model(self, source: str, *, name: str | None, revision: str | None, report: Report) -> ModelStats:
        made = await _thread(self._library.import_model, source, name=name, revision=revision, report=_reporter(report))
        return _stats(made)

    async def make_starter(self, *, minutes: float | None, report: Report) -> ModelStats:
        return _stats(await _thread(self._library.make_starter, minutes=minutes, report=_reporter(report)))

    async def verify(self, name: str, places: list[VersionPlace], report: Report) -> dict[str, Any]:
        found = await self._check([Name(place.kind, name, place.version) for place in places], report)
        return {"versions": found.whole, "unsealed": found.unsealed, **found.totals()}

    async def verify_tiers(self, report: Report) -> dict[str, Any]:
        found = await self._check(await _thread(self._flow.known), report)
        return {"copies": len(found.whole), "unsealed": found.unsealed, **found.totals()}

    async def _check(self, names: list[Name], report: Report) -> Checked:
        found = await _thread(check, self._flow, names, _reporter(report))
        if found.faults:
            raise OperationFailed("; ".join(found.faults), code="copies_damaged")
        return found

    async def remove(self, name: str, places: list[VersionPlace]) -> None:
        self._let_go(name)
        for place in places:
            await _thread(self._library.remove, name, place.version)
            await _thread(self._forget, name, place.version)
            for kind in ("version", "adapter"):
                self._flow.forget(Name(kind, name, place.version))

    def let_go(self, name: str) -> None:
        self._let_go(name)

    def _forget(self, name: str, version: str) -> None:
        for kind in ("version", "adapter"):
            stored = self._store.find(kind, name, version)
            if stored is not None:
                with contextlib.suppress(VersionNotFound):
                    self._store.remove(stored)


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
        name=made.name,
        version=made.version,
        arch=made.arch,
        params=made.params,
        bytes=made.bytes,
        task=made.task,
        source=made.source,
        disk_path=str(made.path),
        max_model_len=made.max_model_len,
        info={**made.info, "warnings": list(made.warnings)},
    )
