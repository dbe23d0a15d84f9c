"""Removes models in training that nobody samples from any more: adapters in shared memory under a private name, which
ranks write for every step (train.rollouts.policy) and engines of their base keep loaded."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from appliance.controller.interfaces.errors import OperationFailed
from weights.format.errors import VersionLeased, VersionNotFound
from weights.format.names import policy_of, step_of
from weights.memory.store import StoredVersion, WeightStore

log = logging.getLogger(__name__)

Unload = Callable[[list[str]], Awaitable[None]]
"""`Scheduler.unload_adapters`."""


class Policies:
    """is_unfinished: whether a job may still train."""

    def __init__(self, store: WeightStore, is_unfinished: Callable[[str], bool]):
        self._store, self._is_unfinished = store, is_unfinished
        self._newest: dict[str, str] = {}  # job -> version
        self._sampled: Counter[tuple[str, str]] = Counter()  # questions that are being answered, by job and version

    @contextmanager
    def sampled(self, job_id: str, version: str) -> Iterator[None]:
        """The job samples from this version now; the version is kept within this context, even if a newer one comes."""
        self._newest[job_id] = version
        self._sampled[job_id, version] += 1
        try:
            yield
        finally:
            self._sampled -= Counter([(job_id, version)])

    async def tidy(self, unload: Unload) -> None:
        """Remove versions older than the newest of their job, and all of a job that no longer trains. A version in use
        is removed next time."""
        self._newest = {job: version for job, version in self._newest.items() if self._is_unfinished(job)}
        for stored in await asyncio.to_thread(self._store.list, "adapter"):
            job_id = policy_of(stored.model)
            if job_id is not None and not self._is_wanted(job_id, stored):
                await self._remove(stored, unload)

    def _is_wanted(self, job_id: str, stored: StoredVersion) -> bool:
        # Ranks write a version before they sample from it: a newer one than the newest sampled is wanted.
        newest = self._newest.get(job_id, "")
        sampled = stored.version == newest or (job_id, stored.version) in self._sampled
        return self._is_unfinished(job_id) and (sampled or _step(stored.version) >= _step(newest))

    async def _remove(self, stored: StoredVersion, unload: Unload) -> None:
        try:
            await unload([f"{stored.model}@{stored.version}"])
            await asyncio.to_thread(self._store.remove, stored)
        except (OperationFailed, VersionLeased) as error:
            log.info("the model in training %s %s stays for now: %s", stored.model, stored.version, error)
        except VersionNotFound:
            return  # its ranks removed it


def _step(version: str) -> int:
    """The step in a version's name; -1 if it has none."""
    return step_of(version.partition(".")[0])
