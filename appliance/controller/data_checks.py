"""Checks of what is in training data: POST /v1/files/{id}/check, ours alongside OpenAI's.

A request waits for its answer, as an upload does; the work is done in a process of its own, `train.data_checks`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, StringConstraints

from appliance.controller.access.model_access import usable_model
from appliance.controller.context.context import ControllerContext
from appliance.controller.files.storage import FILES
from appliance.controller.http.routers import StrictBody, unaudited
from appliance.controller.interfaces.errors import BadRequest
from appliance.controller.interfaces.principal import Caller, Principal
from appliance.controller.jobs import settings
from train.data_checks.process import CheckFailed, report_apart
from train.methods.methods import METHODS

Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class CheckRequest(StrictBody):
    """against: id of a validation file. max_tokens: default: the model's context."""

    model: Name | None = None
    method: Literal[tuple(METHODS)] | None = None  # type: ignore[valid-type]
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    against: Name | None = None


def routes(context: ControllerContext) -> APIRouter:
    router, db = FILES.router(), context.db

    @router.post("/{file_id}/check")
    @unaudited  # reads a file
    async def check(file_id: str, body: CheckRequest, caller: Caller) -> dict[str, Any]:
        row = FILES.known(db, file_id, caller)
        options = _options(context, body, caller)
        try:
            async with context.file_threads:
                report = await report_apart(context.files_dir / row.id, row.id, **options)
        except CheckFailed as error:
            # Without the box's own paths.
            message = f"{error}.".replace(f"{context.files_dir}/", "")
            raise BadRequest(message, code="invalid_training_file") from error
        return report

    return router


def _options(context: ControllerContext, body: CheckRequest, caller: Principal) -> dict[str, Any]:
    """Raises BadRequest, NotFound."""
    options: dict[str, Any] = {"max_tokens": body.max_tokens, "method": body.method}
    if body.model is not None:
        base = usable_model(context.db, caller, body.model)
        directory = settings.tokenizer_of(context, base)
        if directory is None:
            why = f"The tokenizer of {base.name} is not on this box's disk now; ask again once the model is."
            raise BadRequest(why, "model", "model_not_ready")
        options |= {"model": str(directory), "max_tokens": body.max_tokens or base.model.max_model_len}
    if body.against is not None:
        options["against"] = str(context.files_dir / FILES.known(context.db, body.against, caller, "against").id)
    return options
