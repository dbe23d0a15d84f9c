"""/admin/v1/models/{name}/settings: how a model's engines are set up, and every version of that."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, ValidationError

from appliance.controller.access.model_access import stored_model, unknown_model
from appliance.controller.context.audit import name_of, record
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import BadRequest, InvalidValue, NotFound
from appliance.controller.interfaces.principal import Caller
from appliance.models.errors import TemplateRefused
from appliance.models.trial import try_template
from appliance.store.database import Database
from appliance.store.objects import models
from appliance.store.records import model_settings
from appliance.store.rows import ModelRow, VersionRow, columns
from runtime.pydantic_words import words_of_check
from serve.core.model_settings import ModelSettings, with_system_prompt
from weights.format.tool_template import with_tools


class Change(StrictBody):
    """set: settings that change; null removes one, engine_args and sampling change by name. number: take over the
    settings of this version instead. Nothing restarts before vLLM itself has accepted them."""

    set: dict[str, Any] = Field(default_factory=dict)
    number: Annotated[int, Field(ge=0, le=1 << 53)] | None = None


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the routes to the admin router; before those of models, whose names may contain slashes."""
    db = context.db

    def known(name: str) -> tuple[ModelRow, VersionRow]:
        model = models.find(db, name)
        version = models.active(db, model) if model else None
        if model is None or version is None:
            raise unknown_model(name)
        if version.meta.get("adapter"):
            base = version.meta["adapter"]["base"]
            raise InvalidValue(f"{name} is an adapter and is served by the engines of {base}: set {base} up.", "model")
        return model, version

    def view(name: str) -> dict[str, Any]:
        rows = model_settings.history(db, name)
        return {
            "object": "model.settings",
            "model": name,
            "number": rows[0].number if rows else 0,
            "settings": rows[0].settings if rows else {},
            "history": [{**columns(row, "number created_s settings note"), "by": row.by_whom} for row in rows],
        }

    @router.get("/models/{name:path}/settings")
    def show_settings(name: str) -> dict[str, Any]:
        """An adapter has none: a command that shows its deployment shows its base's too."""
        stored_model(db, name)
        return view(name)

    @router.patch("/models/{name:path}/settings")
    async def change(name: str, body: Change, caller: Caller) -> dict[str, Any]:
        model, version = known(name)
        before = _settings(db, name)
        if body.number is not None and body.set:
            raise InvalidValue("Give either 'set' or 'number'.", "number")
        wanted = _parsed(_version(context, name, body.number) if body.number is not None else merged(before, body.set))
        devices = context.sizes.devices(name)
        _check_size(context, model, version, devices, wanted)
        if wanted.chat_template is not None:
            text = with_system_prompt(with_tools(wanted.chat_template), wanted.system_prompt or "")
            try:
                await asyncio.to_thread(try_template, str(text))
            except TemplateRefused as error:
                raise InvalidValue(str(error), "set.chat_template") from error
        refused = await context.settings_check.refused(model, version, devices, wanted)
        if refused:
            raise InvalidValue(f"vLLM does not start {name} with these settings: {refused[:2000]}", "set")
        with db.transaction():
            if _settings(db, name) != before:
                text = f"The settings of {name} changed meanwhile; look at them and try again."
                raise BadRequest(text, param="set", code="conflict")
            if wanted.as_json() != before:
                model_settings.add(db, name, wanted.as_json(), wanted.digest, name_of(context, caller), time.time())
            record(context, caller, "model.settings", name, **wanted.as_json())
        context.scheduler.reset_failures(name)  # what failed with the old settings may work with the new ones
        context.routing.models_changed()  # the gateways' table holds the context
        context.scheduler.nudge(f"settings of {name}", name_of(context, caller))
        return await asyncio.to_thread(view, name)


def _settings(db: Database, name: str) -> dict[str, Any]:
    row = model_settings.current(db, name)
    return row.settings if row is not None else {}


def merged(before: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings after a change; null removes."""
    found = dict(before)
    for name, value in changes.items():
        if name in ("engine_args", "sampling") and isinstance(value, dict):
            value = {k: v for k, v in {**found.get(name, {}), **value}.items() if v is not None} or None
        if value is None:
            found.pop(name, None)
        else:
            found[name] = value
    return found


def _parsed(body: dict[str, Any]) -> ModelSettings:
    try:
        return ModelSettings.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        message = words_of_check(first["msg"])
        raise InvalidValue(f"{where}: {message}", f"set.{where}") from error


def _version(context: ControllerContext, name: str, number: int) -> dict[str, Any]:
    row = model_settings.find(context.db, name, number)
    if row is None and number:
        raise NotFound(f"{name} has no settings {number}.", param="number", code="settings_not_found")
    return row.settings if row is not None else {}


def _check_size(
    context: ControllerContext, model: ModelRow, version: VersionRow, devices: int, wanted: ModelSettings
) -> None:
    size = context.sizes.size(model, version, devices, wanted)
    if size.problem:
        raise InvalidValue(f"{model.id} cannot be served: {size.problem}.", "set")
    if wanted.max_model_len is not None and (size.max_model_len or wanted.max_model_len) < wanted.max_model_len:
        own = size.shortened or f"the model was made for {size.max_model_len:,} tokens"
        raise InvalidValue(f"max_model_len {wanted.max_model_len:,} does not fit: {own}.", "set.max_model_len")
