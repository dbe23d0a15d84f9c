"""The steps on a run's data: checked, and prepared to new files, by train.data_checks in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from appliance.controller.context.context import ControllerContext
from appliance.controller.files import multipart, storage
from appliance.controller.interfaces.principal import Principal
from appliance.controller.pipelines.spec import Check, Prepare
from appliance.store.ids import new_id
from appliance.store.rows import FileRow
from train.data_checks.options import CheckOptions, PrepareOptions
from train.data_checks.process import check_apart, prepare_apart


@dataclass(frozen=True, slots=True)
class Checked:
    """counts: by check, what was found. beyond: what there is more of than may be, in words."""

    counts: dict[str, int]
    beyond: list[str]


@dataclass(frozen=True, slots=True)
class MadeFile:
    """path: where its bytes are until its row is there."""

    kind: Literal["prepared", "validation"]
    row: FileRow
    path: Path


@dataclass(frozen=True, slots=True)
class Prepared:
    """dropped: examples that were left out, by check."""

    files: list[MadeFile]
    dropped: dict[str, int]


async def checked(context: ControllerContext, file: FileRow, asked: Check, owner: str) -> Checked:
    """Raises BadOption, CheckFailed."""
    options = _options(context, asked, leave_out=tuple(asked.leave_out))
    report = await context.file_work.run(owner, check_apart, [context.files_dir / file.id], options)
    beyond = []
    for name, most in asked.at_most.items():
        found = report["checks"].get(name)
        if found is not None and found["share"] > most:
            told = f"{found['count']} of {report['examples']} examples ({found['share']:.2%})"
            beyond.append(f"{name.replace('_', ' ')}: {told}, at most {most:.2%}")
    return Checked({name: int(found["count"]) for name, found in report["checks"].items()}, beyond)


@asynccontextmanager
async def prepared(
    context: ControllerContext, file: FileRow, asked: Prepare, run_id: str, caller: Principal
) -> AsyncIterator[Prepared]:
    """The new files; what was not renamed within goes. Raises BadOption, CheckFailed, OSError."""
    wishes = PrepareOptions(tuple(asked.drop), asked.mask, asked.split, (), asked.order, asked.seed)
    kinds: list[Literal["prepared", "validation"]] = ["prepared"]
    if asked.split is not None:
        kinds.append("validation")
    ids = [new_id("file-") for _ in kinds]
    paths = [context.files_dir / f"{multipart.INCOMING_PREFIX}{one}" for one in ids]
    try:
        lineage = await context.file_work.run(
            caller.owner,
            prepare_apart,
            [context.files_dir / file.id],
            _options(context, asked),
            wishes,
            paths[0],
            paths[1] if len(paths) > 1 else None,
        )
        made = []
        for kind, file_id, path in zip(kinds, ids, paths, strict=True):
            row = await storage.described(
                context,
                file_id,
                path,
                filename=f"{run_id}.{kind}.jsonl",
                size=path.stat().st_size,
                sha256=await context.file_work.run(caller.owner, storage.sha256_of, path),
                purpose="fine-tune",
                keep_s=None,
                caller=caller,
            )
            made.append(MadeFile(kind, row, path))
        yield Prepared(made, {name: int(count) for name, count in lineage["dropped"].items()})
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _options(context: ControllerContext, asked: Check | Prepare, leave_out: tuple[str, ...] = ()) -> CheckOptions:
    """Raises BadOption."""
    against = None if asked.against is None else context.files_dir / asked.against
    like = {} if asked.like is None else {"like": asked.like}
    return CheckOptions(max_tokens=asked.max_tokens, against=against, leave_out=leave_out, **like)
