"""The files of a batch: turns its answers into files when it ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

from appliance.controller.context.context import ControllerContext
from appliance.controller.files import storage
from appliance.store.ids import new_id
from appliance.store.rows import BatchRow, FileRow


def linked(context: ControllerContext, path: Path, filename: str, row: BatchRow) -> FileRow:
    """A hard link in `files/` to the bytes: until the rows are written, a crash loses nothing and leaves nothing."""
    file_id, now_s = new_id("file-"), time.time()
    os.link(path, context.files_dir / file_id)
    return FileRow(
        id=file_id,
        filename=filename,
        purpose="batch_output",
        bytes=path.stat().st_size,
        sha256=storage.sha256_of(path),
        status="processed",
        created_s=now_s,
        key_id=row.key_id,
        owner=row.owner,
        expires_s=None if row.output_keep_s is None else now_s + row.output_keep_s,
    )


def remove_bytes(folder: Path, batch_id: str) -> None:
    for kind in ("output", "error"):
        (folder / f"{batch_id}.{kind}.jsonl").unlink(missing_ok=True)
