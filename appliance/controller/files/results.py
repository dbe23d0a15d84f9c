"""Files that the box itself makes for an owner (purpose "fine-tune-results"): written on a thread, kept on the loop."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from appliance.controller.files.form import INCOMING_PREFIX
from appliance.store.database import Database
from appliance.store.ids import new_id
from appliance.store.objects import files
from appliance.store.rows import FileRow

PURPOSE = "fine-tune-results"


@dataclass(frozen=True)
class Result:
    """Bytes that are written and synced, but not a file yet: `forget`, or the next start, deletes what nobody keeps.
    sha256: in hex."""

    id: str
    incoming: Path
    size: int
    sha256: str

    def forget(self) -> None:
        self.incoming.unlink(missing_ok=True)


def write(files_dir: Path, content: bytes) -> Result:
    """Raises OSError where the disk is full."""
    file_id = new_id("file-")
    made = Result(file_id, files_dir / f"{INCOMING_PREFIX}{file_id}", len(content), hashlib.sha256(content).hexdigest())
    try:
        with os.fdopen(os.open(made.incoming, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
    except BaseException:
        made.forget()
        raise
    return made


def keep(db: Database, files_dir: Path, made: Result, filename: str, *, owner: str) -> str:
    """Makes a file of it, within the caller's transaction; returns its id."""
    os.rename(made.incoming, files_dir / made.id)
    files.insert(
        db,
        FileRow(
            id=made.id,
            filename=filename,
            purpose=PURPOSE,
            bytes=made.size,
            sha256=made.sha256,
            status="processed",
            created_s=time.time(),
            owner=owner,
        ),
    )
    return made.id
