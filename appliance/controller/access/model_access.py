"""Decides which models exist for a key: what its owner made or is shared with, narrowed by the key's list if any.

The gateways apply the same rule to the table (`gateway.table.Principal`): a request finds the same models in both.
"""

from __future__ import annotations

from appliance.controller.access.naming import CHALLENGER, Resolved, model_of, resolve
from appliance.controller.interfaces.errors import BadRequest, Forbidden, NotFound, shown
from appliance.controller.interfaces.principal import ADMIN, INFERENCE, Principal, allow
from appliance.store.database import Database
from appliance.store.ids import new_id
from appliance.store.objects import jobs, models
from appliance.store.records import keys, model_settings
from appliance.store.rows import JobRow, KeyRow, ModelRow

_NAMED = 20
"""Versions of a model that an error names."""


def unknown_model(name: str, param: str = "model") -> NotFound:
    return NotFound(
        f"The model {shown(name)} does not exist or you do not have access to it.",
        param=param,
        code="model_not_found",
    )


def absent_model(name: str) -> NotFound:
    """For callers who see every model, or who are to be told where to look."""
    return NotFound(
        f"The model {shown(name)} does not exist on this box; `appliance model list` shows those that do.",
        param="model",
        code="model_not_found",
    )


def no_version(db: Database, model: str, version: str) -> NotFound:
    """For callers who may see the model."""
    have = models.names_of_versions(db, model, _NAMED + 1)
    more = " and older ones" if len(have) > _NAMED else ""
    return NotFound(
        f"{model} has no version {shown(version)}; it has {', '.join(have[:_NAMED])}{more}.",
        param="version",
        code="version_not_found",
    )


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


def base_for(db: Database, caller: Principal, name: str) -> Resolved:
    """What a job of this caller's would train. Raises NotFound."""
    base = resolve(db, name) if caller_may_use(db, caller, name) else None
    if base is None:
        raise absent_model(name)
    return base


def stored_model(db: Database, name: str) -> ModelRow:
    """Raises NotFound."""
    row = models.find(db, name)
    if row is None:
        raise absent_model(name)
    return row


def allowed_models(db: Database, row: KeyRow) -> list[str]:
    """The names on a key's list, plus what its owner made: models of the owner's jobs and their checkpoints."""
    assert row.models is not None
    return sorted({*row.models, *jobs.names_made_by(db, keys.owner_of(db, row.id))})


def usable_models(db: Database, key_id: str | None) -> frozenset[str] | None:
    """The names that a key's list allows; None: everything that exists for its owner."""
    row = keys.find(db, key_id) if key_id is not None else None
    return None if row is None or row.models is None else frozenset(allowed_models(db, row))


def viewer_of(db: Database, key_id: str | None) -> str | None:
    """Like `Principal.viewer`, for work that outlives its request: None for the box itself and for an admin's key."""
    if key_id is None:
        return None
    row = keys.find(db, key_id)
    return None if row is not None and ADMIN in row.scopes else keys.owner_of(db, key_id)


def may_use(db: Database, key_id: str | None, name: str) -> bool:
    """Whether work of this key (None: the box itself) may use a model by this name."""
    return _may(db, key_id, viewer_of(db, key_id), name)


def caller_may_use(db: Database, caller: Principal, name: str) -> bool:
    return _may(db, caller.key_id, caller.viewer, name)


def check_may_ask(db: Database, caller: Principal, name: str, *, chats: bool = True, param: str = "model") -> None:
    """A caller who makes the box ask a model needs the scope of inference, whatever the route. chats: it is asked for a
    chat completion. param: of the request, that names the model. Raises Forbidden, NotFound for a model that the caller
    may not use, and BadRequest for one that does not chat."""
    if not caller.may(INFERENCE):
        raise Forbidden(INFERENCE)
    if not caller_may_use(db, caller, name) or not _has_version(db, name):
        model, _, version = name.partition("@")
        if version == CHALLENGER and caller_may_use(db, caller, model):
            raise NotFound(
                f"No version of the model {shown(model)} is its challenger now: none is its canary.",
                param=param,
                code="model_not_found",
            )
        raise unknown_model(name, param)
    if chats and (why := why_no_chat(db, name)):
        raise BadRequest(f"{why}.", param=param, code="model_not_supported")


def caller_of(db: Database, key_id: str | None) -> Principal:
    """The principal of work that outlives its request: this key, or the box itself. The work itself checks whether the
    key still lives."""
    if key_id is None:
        return Principal(None, frozenset({ADMIN}), new_id("req_"), "")
    row = keys.find(db, key_id)
    return Principal(key_id, frozenset(row.scopes if row else ()), new_id("req_"), keys.owner_of(db, key_id))


def why_not_asked(db: Database, key_id: str | None, name: str, *, chats: bool = True) -> str:
    """`check_may_ask` for work that outlives its request: why this key may not ask the model, "" if it may."""
    row = keys.find(db, key_id) if key_id is not None else None
    if row is not None and not allow(row.scopes, INFERENCE):
        return f"the key that asks needs the scope: {INFERENCE}"
    if not may_use(db, key_id, name) or not _has_version(db, name):
        return f"the model {name!r} does not exist or you do not have access to it"
    return why_no_chat(db, name) if chats else ""


def why_no_chat(db: Database, name: str) -> str:
    """Why this model takes no conversation, in the gateways' words (`gateway.core.errors.no_chat_template`), before an
    engine is started for it; "" if it does, or if it is unknown whether it has a template."""
    found = resolve(db, name)
    if found is None:
        return ""
    model, version = found.model.id, found.version
    if adapter := version.meta.get("adapter"):  # its base's engine answers
        model = adapter["base"]
        base = models.find_version(db, model, adapter["base_version"])
        version = base or version
    if version.meta.get("chat_template", True) or model_settings.has_chat_template(db, model):
        return ""
    return (
        f"The model `{name}` has no chat template, so it knows no conversations: ask it with /v1/completions, or give "
        "it one with `appliance model deploy MODEL --chat-template FILE`"
    )


def base_of(db: Database, job: JobRow) -> Resolved | None:
    """What a job trains; None once it was deleted, or the job's key may not use it any more (the sharing has ended).

    Asked at each step of a job: it may wait for weeks between its creation and its run.
    """
    return resolve(db, job.model) if may_use(db, job.key_id, job.model) else None


def _has_version(db: Database, name: str) -> bool:
    """False if a name contains a version that does not exist."""
    return "@" not in name or models.find(db, name) is not None or resolve(db, name) is not None


def _may(db: Database, key_id: str | None, viewer: str | None, name: str) -> bool:
    """Access to a model includes all its versions and checkpoints. Nobody has access to a version that does not exist;
    otherwise questions of an admin's key waited for an engine of it."""
    model = model_of(db, name)
    if not models.is_visible(db, model, viewer) or models.find(db, model) is None:
        return False
    row = keys.find(db, key_id) if key_id is not None else None
    if row is None or row.models is None:
        return True
    # This does not use `usable_models`, which makes the whole list: a request checks this for each model that its
    # graders ask.
    names, owner = {name, name.partition("@")[0]}, keys.owner_of(db, row.id)
    return not names.isdisjoint(row.models) or any(jobs.has_made(db, owner, one) for one in names)
