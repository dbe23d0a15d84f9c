"""/v1/models: base models, fine-tuned ones, and their checkpoints and versions by name
(https://platform.openai.com/docs/api-reference/models); and their files, to download."""

from __future__ import annotations

import logging
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header
from fastapi.responses import StreamingResponse
from pydantic import Field
from starlette.background import BackgroundTask

from appliance.controller.access.model_access import (
    OwnerName,
    Resolved,
    caller_may_use,
    known_model,
    resolve,
    unknown_model,
    usable_model,
)
from appliance.controller.context.context import ControllerContext, ModelStates, record
from appliance.controller.http.routers import Status, StrictBody, audited, make_router, needs
from appliance.controller.interfaces.errors import ApiError, BadRequest, Conflict, Forbidden, InvalidValue, shown
from appliance.controller.interfaces.principal import ADMIN, FINE_TUNING, INFERENCE, READ, Caller, Principal
from appliance.controller.jobs.events import pause_jobs_without_model
from appliance.controller.models.lifecycle import remove
from appliance.store import keys, models
from appliance.store.database import Database
from appliance.store.rows import ModelRow, columns
from appliance.tiers.tiers import name_of
from weights.format.errors import WeightsError
from weights.format.manifest import Manifest, checksum
from weights.format.names import MANIFEST_FILE
from weights.memory.lease import take_lease

log = logging.getLogger("appliance.controller")


def routes(context: ControllerContext) -> APIRouter:
    router = make_router("/v1/models", FINE_TUNING)
    db = context.db

    @router.get("")
    @needs(INFERENCE, FINE_TUNING, READ)
    def list_models(caller: Caller, now: Status) -> dict[str, Any]:
        states, data = ModelStates(db, now), []
        for name in models.callable_names(db, caller.viewer):
            if caller_may_use(db, caller, name) and (item := resolve(db, name)) is not None:
                data.append(_view(context, item, caller, states))
        return {"object": "list", "data": data}

    @router.get("/{name:path}/archive")
    @needs(FINE_TUNING)
    def download(
        name: str,
        caller: Caller,
        base: bool = False,
        range_header: Annotated[str | None, Header(alias="range")] = None,
        if_range: Annotated[str | None, Header()] = None,
    ) -> StreamingResponse:
        """Send all files of a version as one tar file: to the model's owner; base models to all who may use them.
        `Range` resumes an interrupted download. base: download the base version of this adapter instead."""
        resolved = usable_model(db, caller, name)
        if base:
            if (adapter := resolved.version.meta.get("adapter")) is None:
                raise InvalidValue(f"{shown(name)} is not an adapter.", "base")
            resolved = usable_model(db, caller, f"{adapter['base']}@{adapter['base_version']}")
        if resolved.model.kind != "base":
            _refuse_unless_own(resolved.model, caller, "download")
        try:
            folder, done = Path(resolved.version.disk_path or ""), None
            if not resolved.version.disk_path or not folder.is_dir():
                lease = take_lease(context.tiers.bring_in(name_of(resolved.version)))
                folder, done = lease.path, BackgroundTask(lease.release)
            return _archive(folder, name, range_header, if_range, done)
        except (LookupError, WeightsError, OSError) as error:  # not shown: its text may contain paths of the box
            log.warning("%s cannot be downloaded: %s", name, error)
            text = f"The files of {shown(name)} cannot be read now; ask again later."
            raise Conflict(text, "model", "model_not_ready") from error

    @router.get("/{name:path}")
    @needs(INFERENCE, FINE_TUNING, READ)
    def retrieve(name: str, caller: Caller, now: Status) -> dict[str, Any]:
        return _view(context, usable_model(db, caller, name), caller, ModelStates(db, now))

    @router.delete("/{name:path}")
    @audited("model.delete")
    async def delete(name: str, caller: Caller) -> dict[str, Any]:
        if not caller_may_use(db, caller, name):
            raise unknown_model(name)
        model, version = models.find(db, name), None
        if model is None:  # the name means one version
            resolved = known_model(db, name)
            model, version = resolved.model, resolved.version
        if model.kind == "base" and not caller.is_admin:
            raise Forbidden(ADMIN)
        _refuse_unless_own(model, caller, "delete")
        await remove(context, name, model, version, caller)
        return {"id": name, "object": "model", "deleted": True}

    # A POST, because names contain slashes: a GET or DELETE of "a/share" refers to the model of that name.
    @router.post("/{name:path}/share")
    async def share(name: str, body: Share, caller: Caller) -> dict[str, Any]:
        """Share a model with other owners, with all its versions and checkpoints, or stop sharing it, which pauses
        their jobs that train it. Those owners keep what the jobs have made. For an operator, "without_key" lists given
        owners who have no key."""
        resolved = usable_model(db, caller, name)
        model, change = resolved.model, models.unshare if body.stop else models.share
        if name != model.id:
            raise InvalidValue(f"{shown(name)} is a version of {model.id}; a model is shared as a whole.", "model")
        _refuse_unless_own(model, caller, "share")
        if not body.owners and not body.everybody:
            raise BadRequest("Give 'owners', or 'everybody': true.", "owners", "missing_required_parameter")
        with db.transaction():
            for owner in [*body.owners, *([models.EVERYBODY] if body.everybody else [])]:
                change(db, model.id, owner)
            paused = pause_jobs_without_model(db) if body.stop else []
            action, detail = "model.unshare" if body.stop else "model.share", {"jobs": paused} if paused else {}
            record(context, caller, action, model.id, **columns(body, "owners everybody"), **detail)
        context.routing.models_changed()
        if paused:
            context.scheduler.nudge(f"the sharing of {model.id} ended")
        without = {"without_key": keys.without_key(db, body.owners)} if caller.is_admin else {}
        return {"id": model.id, "object": "model", **_audience(db, model), **without}

    return router


class Share(StrictBody):
    """owners: names of keys' owners. everybody: all keys, including future keys. stop: end the sharing."""

    owners: Annotated[list[OwnerName], Field(max_length=100)] = Field(default_factory=list)
    everybody: bool = False
    stop: bool = False


def _audience(db: Database, model: ModelRow) -> dict[str, Any]:
    shares = models.shared_with(db, model.id)
    return {
        "owner": model.owner or None,
        "shared_with_everybody": models.EVERYBODY in shares,
        "shared_with": [owner for owner in shares if owner != models.EVERYBODY],
    }


def _view(context: ControllerContext, resolved: Resolved, caller: Principal, states: ModelStates) -> dict[str, Any]:
    """Return OpenAI's object, plus the box's fields: context in tokens, state, and the reason if it does not serve; for
    its owner and admins also the owner and the owners it is shared with."""
    made_s = (resolved.model if resolved.name == resolved.model.id else resolved.version).created_s
    own = caller.viewer in (None, resolved.model.owner)
    return {
        "id": resolved.name,
        "object": "model",
        "created": int(made_s),
        "owned_by": resolved.model.owned_by,
        "max_model_len": context.sizes.size(resolved.model, resolved.version).max_model_len,
        "state": states.word(resolved.name),
        "state_details": states.message(resolved.name),
        **(_audience(context.db, resolved.model) if own else {}),
    }


def _refuse_unless_own(model: ModelRow, caller: Principal, verb: str) -> None:
    """Raise ApiError for another owner's model, which the caller may see but not change."""
    if caller.viewer not in (None, model.owner):
        why = f"{shown(model.id)} is another's model, shared with you; its owner or an operator can {verb} it."
        raise ApiError(403, why, "model", "insufficient_permissions")


# --- the archive of a version: a tar file that is stored nowhere, whole or the part that a Range header names

_CHUNK_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
Part = bytes | tuple[Path, int]
"""A part of the tar file: a header or padding, or a file with its size."""


def _archive(
    folder: Path, name: str, range_header: str | None, if_range: str | None, done: BackgroundTask | None
) -> StreamingResponse:
    """Answer with the archive of a version directory, its manifest first, or with a part of it (RFC 9110, 14.2).

    range_header: None or an unknown form: the full archive. done: runs after the last byte, or when the client leaves.
    Raises ApiError 416, IntegrityError, OSError.
    """
    manifest, parts = Manifest.read(folder), list[Part]()
    own_bytes = (folder / MANIFEST_FILE).read_bytes()
    sizes = {file: record.nbytes for file, record in sorted(manifest.files.items())}
    for file, size in {MANIFEST_FILE: len(own_bytes), **sizes}.items():
        header = tarfile.TarInfo(file)
        header.size, header.mtime = size, int(manifest.created_s)
        parts += [header.tobuf(tarfile.GNU_FORMAT), (folder / file, size), bytes(-size % tarfile.BLOCKSIZE)]
    parts.append(bytes(2 * tarfile.BLOCKSIZE))
    total, tag = sum(map(_part_bytes, parts)), f'"{checksum(own_bytes).replace(":", "-")}"'
    start, end, status = 0, total, 200
    headers = {"etag": tag, "accept-ranges": "bytes", "x-content-type-options": "nosniff"}
    headers["content-disposition"] = f'attachment; filename="{re.sub(r"[^A-Za-z0-9._-]", "-", name)}.tar"'
    if (match := _RANGE.fullmatch(range_header or "")) and if_range in (None, tag):
        start, end = int(match[1]), min(total, int(match[2]) + 1 if match[2] else total)
        if start >= end:
            message = f"The archive has {total} bytes and none at {range_header}."
            raise ApiError(416, message, code="range_not_satisfiable", param="range")
        status, headers["content-range"] = 206, f"bytes {start}-{end - 1}/{total}"
    headers["content-length"] = str(end - start)
    return StreamingResponse(_read(parts, start, end), status, headers, "application/x-tar", done)


def _part_bytes(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part[1]


def _read(parts: Sequence[Part], start: int, end: int) -> Iterator[bytes]:
    """Yield the archive's bytes from `start` up to `end`, exclusive."""
    at = 0
    for part in parts:
        first, last, at = max(0, start - at), min(_part_bytes(part), end - at), at + _part_bytes(part)
        if first >= last:
            continue
        if isinstance(part, bytes):
            yield part[first:last]
            continue
        with open(part[0], "rb", buffering=0) as file:
            file.seek(first)
            while first < last and (data := file.read(min(_CHUNK_BYTES, last - first))):
                first += len(data)
                yield data
        if first < last:
            raise OSError(f"{part[0]} is shorter than its manifest says")
