"""Whether the folder of a model that is on the box may be opened: by its settings, and by trials of what it runs.

What `weights.checkpoint.folder` looks at takes milliseconds and is looked at each time. Trials take seconds: what they
came to is kept by the checksum of the files that were tried, so models of jobs share it with their base, and a version
that came onto the box before there was a trial is tried once, before it is opened for the first time.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from appliance.models.errors import TrialEnded
from appliance.models.folder_trial import RULES, checksum_of_tried, try_folder
from appliance.store.database import Database
from appliance.store.objects import folder_trials
from appliance.store.objects.folder_trials import FolderTrial
from weights.checkpoint.errors import CheckpointRefused, OpeningRefused
from weights.checkpoint.folder import may_open
from weights.format.errors import VersionNotFound
from weights.memory.locks import DirectoryLock


class Opening:
    """Belongs to the loop that owns `db`."""

    def __init__(self, db: Database):
        self._db = db
        self._trying: dict[str, asyncio.Task[FolderTrial]] = {}

    async def check(self, directory: Path, model: str, *, again: bool = False) -> None:
        """Returns if engines and ranks may open `directory`, a version of `model`. It is tried first if nobody did by
        these rules, or `again`. Raises OpeningRefused, TrialEnded, VersionNotFound."""
        lock = await asyncio.to_thread(DirectoryLock.try_shared, directory)
        if lock is None:
            raise VersionNotFound(f"{directory} is gone or being removed")
        try:
            contents = await asyncio.to_thread(_looked_at, directory, model)
            trial = None if again else self._kept(contents)
            if trial is None:
                trial = await self._tried(directory, contents)
        finally:
            lock.close()
        if trial.reason:
            raise OpeningRefused(model, trial.refused_file, trial.reason)

    async def passed(self, directory: Path) -> None:
        """An import has just tried the files in `directory` and refused none."""
        folder_trials.keep(self._db, await asyncio.to_thread(checksum_of_tried, directory), FolderTrial(RULES, "", ""))

    def _kept(self, contents: str) -> FolderTrial | None:
        trial = folder_trials.find(self._db, contents)
        return trial if trial is not None and trial.rules == RULES else None

    async def _tried(self, directory: Path, contents: str) -> FolderTrial:
        if contents not in self._trying:
            task = self._trying[contents] = asyncio.create_task(self._try(directory, contents))
            task.add_done_callback(lambda _: self._trying.pop(contents, None))
        return await asyncio.shield(self._trying[contents])

    async def _try(self, directory: Path, contents: str) -> FolderTrial:
        try:
            await asyncio.to_thread(try_folder, directory)
            trial = FolderTrial(RULES, "", "")
        except TrialEnded:
            raise
        except CheckpointRefused as error:
            trial = FolderTrial(RULES, error.file, error.reason)
        folder_trials.keep(self._db, contents, trial)
        return trial


def _looked_at(directory: Path, model: str) -> str:
    may_open(directory, model)
    return checksum_of_tried(directory)
