"""Bytes in the data directory that no row names: kept aside at the start, and brought back once a row names them.

A database that was moved away, or restored from an older backup, does not know all that people have sent. So a start
deletes only what a crash left half written or half deleted, and what a row says has ended. Everything else without a
row goes to `quarantine/DAY/FOLDER/`, beside the folder that it was in, and only a person deletes it there.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from appliance.controller.context.context import ControllerContext
from appliance.controller.files.form import INCOMING_PREFIX
from appliance.controller.files.storage import LEAVING_PREFIX
from appliance.paths import QUARANTINE
from appliance.store.objects import batches, files, uploads

log = logging.getLogger(__name__)


def sweep(context: ControllerContext) -> None:
    """Call at start, before anything is written."""
    db, aside = context.db, Quarantine(context.files_dir.parent)
    known, pending = files.ids(db), uploads.pending_ids(db)
    unfinished = {row.id for row in batches.list_unfinished(db)}
    for mark in list(context.files_dir.glob(f"{LEAVING_PREFIX}*")):
        if (name := mark.name.removeprefix(LEAVING_PREFIX)) not in known:
            (context.files_dir / name).unlink(missing_ok=True)
        mark.unlink()
    aside.sort(context.files_dir, known.__contains__)
    aside.sort(context.uploads_dir, pending.__contains__, lambda name: uploads.find(db, name, viewer=None) is not None)
    for upload_id in pending:
        aside.sort(context.uploads_dir / upload_id, uploads.sizes(db, upload_id).__contains__)
    aside.sort(
        context.batches_dir,
        lambda name: _batch_of(name) in unfinished,
        lambda name: batches.find(db, _batch_of(name), viewer=None) is not None,
    )
    if aside.moved:
        log.warning(
            "%d files or uploads are in no row of the database and were moved to %s: `appliance doctor` has what to do",
            aside.moved,
            aside.today,
        )


def _batch_of(name: str) -> str:
    return name.partition(".")[0]


def _nothing(name: str) -> bool:
    return False


class Quarantine:
    """Moves things of the data directory aside and back; `moved`: how many it moved aside."""

    def __init__(self, data_dir: Path):
        self._data_dir, self.moved = data_dir, 0
        self.today = data_dir / QUARANTINE / time.strftime("%Y-%m-%d", time.gmtime())

    def take(self, path: Path) -> None:
        """Where that fails (a full disk, a folder on another file system) it stays, for the next start."""
        try:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
                return
            target = self.today / path.relative_to(self._data_dir)
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if target.exists():  # it was brought back today, and no row names it once more
                target = target.with_name(f"{target.name}.{time.time_ns()}")
            path.rename(target)
            self.moved += 1
        except OSError as error:
            log.warning("no row names %s, and it could not be moved to %s: %s", path, self.today, error)

    def give_back(self, folder: Path, is_named: Callable[[str], bool]) -> None:
        """Move what was in `folder` back there, if a row names it and nothing is in its place."""
        for path in (self._data_dir / QUARANTINE).glob(f"*/{folder.relative_to(self._data_dir)}/*"):
            if is_named(path.name) and not (folder / path.name).exists():
                path.rename(folder / path.name)
                log.info("%s is named by a row again, and is back in %s", path.name, folder)

    def sort(self, folder: Path, is_named: Callable[[str], bool], has_ended: Callable[[str], bool] = _nothing) -> None:
        """Bring back and keep what a row names, delete what was half written or has ended, take the rest aside."""
        if not folder.is_dir():
            return
        self.give_back(folder, is_named)
        for entry in list(folder.iterdir()):
            name = entry.name
            if name.startswith(INCOMING_PREFIX) or (not is_named(name) and has_ended(name)):
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            elif not is_named(name):
                self.take(entry)
