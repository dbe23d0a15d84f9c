"""Files as rows and bytes: looked up for a caller, described, made by the box itself, deleted."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from anyio import to_thread
from pydantic import Field

from appliance.controller.context.context import ControllerContext
from appliance.controller.http.resource import Resource, object_of
from appliance.controller.http.routers import StrictBody
from appliance.controller.interfaces.principal import FINE_TUNING
from appliance.store.database import Database
from appliance.store.ids import new_id
from appliance.store.objects import files
from appliance.store.rows import BATCHES, UPLOADS, FileRow
from runtime.replace_file import replace_file
from train.data.check import DataReport
from train.data_checks.process import check_apart
from train.data_checks.process import checked as check_here
from train.methods.method import Method

Purpose = Literal["assistants", "batch", "evals", "fine-tune", "vision", "user_data"]
INCOMING_PREFIX = ".incoming-"
_BATCH_KEEP_S = 30 * 86400
_CAUSES_SHOWN = 3
APART_FROM_BYTES = 1 << 20
"""A smaller file is checked sooner than a process starts."""


FILES = Resource(
    "file",
    "/v1/files",
    (FINE_TUNING,),
    files.find,
    missing="No such File object: {}",
    param="id",
    fields=("filename", "purpose", "bytes"),
)


class ExpiresAfter(StrictBody):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


def remove(context: ControllerContext, row: FileRow) -> None:
    """The bytes go before the row does: after a crash in between, the row leads here again."""
    with context.db.transaction():
        files.delete(context.db, row.id)
        (context.files_dir / row.id).unlink(missing_ok=True)


def sweep(context: ControllerContext) -> None:
    """Call at start, before anything is written: delete what a crash left half written, and what is left of uploads
    and batches that have ended. Other bytes that no row names stay: the database that knows them may come back."""
    for half in context.uploads_dir.glob(f"*/{INCOMING_PREFIX}*"):
        half.unlink()
    for half in context.files_dir.glob(f"{INCOMING_PREFIX}*"):
        half.unlink()
    for folder in list(context.uploads_dir.iterdir()):
        upload = UPLOADS.find(context.db, folder.name)
        if upload is not None and upload.status != "pending":
            shutil.rmtree(folder)
    for answers in list(context.batches_dir.iterdir()):
        batch = BATCHES.find(context.db, answers.name.partition(".")[0])
        if batch is not None and batch.finished:
            answers.unlink()


@contextlib.contextmanager
def growing(files_dir: Path, *file_ids: str) -> Iterator[list[Path]]:
    """Yield paths for the bytes of new files with these ids. Bytes that are not kept within are deleted, and so are
    those kept by a transaction that fails: without a row they would have no owner until the next start."""
    paths = [files_dir / f"{INCOMING_PREFIX}{file_id}" for file_id in file_ids]
    try:
        yield paths
    except BaseException:
        for file_id in file_ids:
            (files_dir / file_id).unlink(missing_ok=True)
        raise
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def keep(context: ControllerContext, row: FileRow, path: Path) -> None:
    """Move the bytes of a new file in place, and write its row. Call in a transaction, within `growing`."""
    os.rename(path, context.files_dir / row.id)
    files.insert(context.db, row)


def row_of(
    path: Path,
    filename: str,
    purpose: str,
    sha256: str,
    owner: str,
    key_id: str | None = None,
    keep_s: float | None = None,
    file_id: str = "",
) -> FileRow:
    """A new file with the complete bytes at `path`. keep_s: seconds until it is deleted; None: never."""
    now_s = time.time()
    return FileRow(
        id=file_id or new_id("file-"),
        filename=filename,
        purpose=purpose,
        bytes=path.stat().st_size,
        sha256=sha256,
        status="processed",
        created_s=now_s,
        key_id=key_id,
        owner=owner,
        expires_s=None if keep_s is None else now_s + keep_s,
    )


def make_result(db: Database, files_dir: Path, content: bytes, filename: str, owner: str) -> str:
    """Write and sync a file of the box's own for an owner (purpose "fine-tune-results"), with its row; returns its id.
    Raises OSError where the disk is full."""
    file_id, sha256 = new_id("file-"), hashlib.sha256(content).hexdigest()
    with growing(files_dir, file_id) as (incoming,):
        replace_file(incoming, content, durable=True)
        with db.transaction():
            files.insert(db, row_of(incoming, filename, "fine-tune-results", sha256, owner, file_id=file_id))
            os.rename(incoming, files_dir / file_id)
    return file_id


def sha256_of(path: Path) -> str:
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


async def checked(
    context: ControllerContext,
    path: Path,
    chat_path: Path | None = None,
    method: Method | None = None,
    tokenizer: Path | None = None,
    cut_at: int | None = None,
) -> DataReport:
    """Check a training file, in a process of its own if it is large or its tokens are counted. One of a shape that the
    method does not take has an error in its first line. Raises OSError.

    Args:
        chat_path: where to write it in the method's format.
        method: of the job that names it; None before one does.
        tokenizer: the directory of a model whose tokens are counted.
        cut_at: the number of tokens within which the method must have something left of an example.
    """
    name = method.name if method else None
    how = {"chat_path": chat_path, "method": name, "tokenizer": tokenizer, "cut_at": cut_at}
    if tokenizer is None and path.stat().st_size < APART_FROM_BYTES:
        return await to_thread.run_sync(partial(check_here, path, **how), limiter=context.file_threads)
    async with context.file_threads:
        return await check_apart(path, **how)


async def described(context: ControllerContext, path: Path, row: FileRow) -> FileRow:
    """The row of a complete upload at `path`. Training data is checked line by line, on a thread or in a process."""
    if row.purpose == "batch" and row.expires_s is None:
        return replace(row, expires_s=row.created_s + _BATCH_KEEP_S)
    if row.purpose != "fine-tune":
        return row
    report = await checked(context, path)
    # Without the tokens of each example, before they are copied one by one: a row stays small, and whoever plans a job
    # counts again, with the model's tokenizer.
    stored = asdict(replace(report, example_tokens=[]))
    del stored["example_tokens"]
    return replace(
        row,
        status="processed" if report.ok else "error",
        status_details=summary(report, f"/v1/files/{row.id}/errors"),
        report=stored,
    )


def summary(report: DataReport, errors_url: str = "") -> str | None:
    """For `status_details`: the first bad lines with their reasons, or the warnings and notes; None if there are none.
    errors_url: where all of them are, as `errors_object` lists them."""
    if not report.ok:
        # Many lines often have one cause: it is said once, with its first line.
        first = {reason: line for line, reason in reversed(report.errors)}
        shown = sorted(first, key=first.__getitem__)[:_CAUSES_SHOWN]
        lines = "; ".join(f"line {first[reason]}: {reason}" for reason in shown)
        where = f"; GET {errors_url} has all of them" if errors_url and report.n_errors > len(shown) else ""
        return f"{report.n_errors} bad example(s): {lines}{where}"
    return "; ".join([*report.warnings, *report.notes]) or None


def errors_object(errors: list[tuple[int, str]], total: int) -> dict[str, Any]:
    """A file's errors by line, as far as they are kept. total: their number, kept or not."""
    data = [{"object": "file.error", "line": line, "reason": reason} for line, reason in errors]
    return {"object": "list", "data": data, "total": total, "has_more": len(data) < total}


def file_object(row: FileRow) -> dict[str, Any]:
    return object_of(row, "file", "bytes filename purpose status status_details")
