"""Runs jobs on nodes other than home: copies what their ranks need to the node, and their results back home.

Only home's copies are permanent. Base weights, data and the snapshot to resume from are copied to the node before its
ranks start. Every snapshot and published version is copied home as soon as a rank reports it complete, and is reported
only then: a node may die at any time, so home must have everything that is recorded about the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from scheduler.core.errors import EffectFailed
from scheduler.ray.node import NodeConfig
from scheduler.ray.nodes import Nodes
from train.plan.spec import TrainSpec
from train.state.cadence import every_s
from weights.format.names import Name, decode_name

log = logging.getLogger(__name__)

_OVER = {"event": "over"}


async def outfit(
    nodes: Nodes, node_config: NodeConfig, spec: TrainSpec, snapshot: Path | None
) -> tuple[TrainSpec, Path | None]:
    """The spec for the job's ranks on this node, and its snapshot's path there, once everything has been copied.

    Raises EffectFailed.
    """
    job_id = spec.job_id

    async def bring(path: str, what: str) -> str:
        return str((await nodes.bring(node_config, Path(path), f"job {job_id} {what}"))[0])

    folder = await nodes.bring_job(node_config.name, Path(spec.run_dir))
    there = replace(
        spec,
        base_path=await bring(spec.base_path, "base"),
        base_adapter=None if spec.base_adapter is None else await bring(spec.base_adapter, "adapter"),
        train_path=str(folder / Path(spec.train_path).name),
        valid_path=None if spec.valid_path is None else str(folder / Path(spec.valid_path).name),
        run_dir=str(folder),
        shm_root=str(node_config.shm_root),
        shm_budget_bytes=node_config.budget_bytes,
    )
    return there, None if snapshot is None else Path(await bring(str(snapshot), "snapshot"))


class ResultTransfer:
    """Forwards events of a job's remote ranks in order, each when what it names has been copied home."""

    def __init__(
        self,
        nodes: Nodes,
        node: str,
        job_id: str,
        on_event: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._nodes, self._node, self._job_id, self._on_event = nodes, node, job_id, on_event
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._missing = ""
        self._clock = clock
        self._not_before_s = 0.0
        self._pending: dict[str, Any] | None = None  # the newest snapshot not yet copied home
        self._transfer = asyncio.create_task(self._run(), name=f"{job_id} result transfer")

    def take(self, event: dict[str, Any]) -> None:
        self._events.put_nowait(event)

    async def over(self, suspended: bool) -> str:
        """The ranks have ended. Returns when everything was forwarded: "", or a sentence about what was not copied.

        Their node then frees what it kept for them. It keeps the folder and snapshots of a suspended job, which starts
        sooner with them if it comes back.
        """
        self._events.put_nowait(_OVER)
        await asyncio.wait({self._transfer})
        if (error := self._transfer.exception()) is not None:
            return f"an event of its ranks could not be taken: {error!r}"
        if not self._missing:
            with contextlib.suppress(EffectFailed):  # the node is gone, and all it kept
                await self._nodes.on(self._node, "forget_job", self._job_id, suspended)
        return self._missing

    def stop(self) -> None:
        self._transfer.cancel()

    async def _run(self) -> None:
        while True:
            event = await self._events.get()
            if event["event"] == "snapshot":
                self._pending = event
                if self._clock() >= self._not_before_s:
                    await self._bring_pending()
            elif event is _OVER:
                return await self._bring_pending()
            elif event["event"] != "published":
                self._on_event(event)
            elif (path := await self._bring(event)) is not None:
                self._on_event({**event, "path": str(path)})

    async def _bring_pending(self) -> None:
        event, self._pending = self._pending, None
        if event is None:
            return
        began_s = self._clock()
        path = await self._bring(event)
        self._not_before_s = self._clock() + every_s(self._clock() - began_s)
        if path is not None:
            self._on_event({**event, "path": str(path)})

    async def _bring(self, event: dict[str, Any]) -> Path | None:
        remote, ids = Path(event["path"]), {"job_id": self._job_id, "node": self._node}
        try:
            path, copied_bytes = await self._nodes.bring_home(self._node, name_at(remote), remote)
        except EffectFailed as error:
            # A newer snapshot will follow, or the job continues from an older one. A result has no second chance.
            log.error("%s of step %s not copied home: %s", event["event"], event.get("step"), error.reason, extra=ids)
            if event["event"] == "published":
                self._missing = f"its version {event['version']} was not copied home: {error.reason}"
            return None
        log.info("%s of step %s copied home, %d bytes", event["event"], event.get("step"), copied_bytes, extra=ids)
        return path


def name_at(path: Path) -> Name:
    """The name of the version at `path` in a store (see weights.format.names.version_path)."""
    model, version = decode_name(path.parent.name), decode_name(path.name)
    assert model is not None and version is not None, path
    return Name(path.parent.parent.name.removesuffix("s"), model, version)
