"""Files that the box itself makes for an owner (purpose "fine-tune-results")."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from appliance.controller.files.form import INCOMING_PREFIX
from appliance.store.database import Database
from appliance.store.ids import new_id
from appliance.store.objects import files
from appliance.store.rows import FileRow

PURPOSE = "fine-tune-results"


def make(db: Database, files_dir: Path, content: bytes, filename: str, *, owner: str) -> str:
    """Write and sync it, and insert its row; returns its id. Raises OSError where the disk is full. The next start
    deletes what a crash leaves half written."""
    file_id = new_id("file-")
    incoming = files_dir / f"{INCOMING_PREFIX}{file_id}"
    try:
        with os.fdopen(os.open(incoming, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        with db.transaction():  # bytes without a row would stay for good
            files.insert(
                db,
                FileRow(
                    id=file_id,
                    filename=filename,
                    purpose=PURPOSE,
                    bytes=len(content),
                    sha256=hashlib.sha256(content).hexdigest(),
                    status="processed",
                    created_s=time.time(),
                    owner=owner,
                ),
            )
            os.rename(incoming, files_dir / file_id)
    finally:
        incoming.unlink(missing_ok=True)
    return file_id
