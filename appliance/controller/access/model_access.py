"""Decides which models exist for a key: what its owner made or is shared with, narrowed by the key's list if any.

The gateways apply the same rule to the table (`gateway.table.Principal`): a request finds the same models in both.
"""

from __future__ import annotations

from appliance.controller.access.naming import Resolved, model_of, resolve
from appliance.controller.interfaces.errors import ApiError, Forbidden, NotFound, shown
from appliance.controller.interfaces.principal import ADMIN, INFERENCE, Principal
from appliance.store.database import Database
from appliance.store.ids import new_id
from appliance.store.objects import jobs, models
from appliance.store.records import keys
from appliance.store.rows import JobRow, ModelRow, VersionRow


def unknown_model(name: str, param: str = "model") -> NotFound:
    message = f"The model {shown(name)} does not exist or you do not have access to it; `appliance model list` shows"
    return NotFound(f"{message} yours.", param, "model_not_found")


def stored_version(db: Database, model: str, version: str) -> VersionRow:
    """For callers who may see the model. Raises NotFound."""
    if (row := models.find_version(db, model, version)) is not None:
        return row
    message = f"{model} has no version {shown(version)}; `appliance model show {model}` lists them."
    raise NotFound(message, "version", "version_not_found")


def known_model(db: Database, name: str) -> Resolved:
    """Raises NotFound."""
    if (found := resolve(db, name)) is None:
        raise unknown_model(name)
    return found


def usable_model(db: Database, caller: Principal, name: str) -> Resolved:
    """One that the caller's key may not use counts as absent. Raises NotFound."""
    if not caller_may_use(db, caller, name):
        raise unknown_model(name)
    return known_model(db, name)


def stored_model(db: Database, name: str) -> ModelRow:
    """Raises NotFound."""
    if (row := models.find(db, name)) is None:
        raise unknown_model(name)
    return row


def caller_of(db: Database, key_id: str | None) -> Principal:
    """The principal of work that outlives its request: this key, or the box itself. The work itself checks whether the
    key still lives."""
    if key_id is None:
        return Principal(None, frozenset({ADMIN}), new_id("req_"), "")
    row = keys.find(db, key_id)
    return Principal(key_id, frozenset(row.scopes if row else ()), new_id("req_"), keys.owner_of(db, key_id))


def may_use(db: Database, key_id: str | None, name: str) -> bool:
    """Whether work of this key (None: the box itself) may use a model by this name."""
    return caller_may_use(db, caller_of(db, key_id), name)


def caller_may_use(db: Database, caller: Principal, name: str) -> bool:
    """Access to a model includes all its versions and checkpoints."""
    model = model_of(db, name)
    if not models.is_visible(db, model, caller.viewer) or models.find(db, model) is None:
        return False
    row = keys.find(db, caller.key_id) if caller.key_id is not None else None
    if row is None or row.models is None:
        return True
    # What the owner's jobs made, and their checkpoints, are on every list.
    names, owner = {name, name.partition("@")[0]}, keys.owner_of(db, row.id)
    return not names.isdisjoint(row.models) or any(jobs.has_made(db, owner, one) for one in names)


def check_may_ask(db: Database, caller: Principal, name: str, param: str = "model") -> None:
    """A caller who makes the box ask a model needs the scope of inference, whatever the route. param: of the request,
    that names the model. Raises Forbidden, and NotFound for a model that the caller may not use."""
    if not caller.may(INFERENCE):
        raise Forbidden(INFERENCE)
    lacks_version = "@" in name and models.find(db, name) is None and resolve(db, name) is None
    if lacks_version or not caller_may_use(db, caller, name):
        raise unknown_model(name, param)


def why_not_asked(db: Database, key_id: str | None, name: str) -> str:
    """Why this key may not ask the model, for work that outlives its request; "" if it may."""
    try:
        check_may_ask(db, caller_of(db, key_id), name)
    except ApiError as error:
        return error.message
    return ""


def base_of(db: Database, job: JobRow) -> Resolved | None:
    """What a job trains; None once it was deleted, or the job's key may not use it any more (the sharing has ended).

    Asked at each step of a job: it may wait for weeks between its creation and its run.
    """
    return resolve(db, job.model) if may_use(db, job.key_id, job.model) else None
