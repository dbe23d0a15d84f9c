"""Which models exist for whom: what a key's owner has made or is shared with, narrowed by the list a key may have.

The gateways ask the same of the table (`gateway.table.Principal`): a request finds the same models there and here.
"""

from __future__ import annotations

from appliance.controller.access.naming import model_of
from appliance.controller.interfaces.errors import NotFound, shown
from appliance.controller.interfaces.principal import ADMIN, Principal
from appliance.store.database import Database
from appliance.store.objects import jobs, models
from appliance.store.records import keys
from appliance.store.rows import KeyRow


def unknown_model(name: str) -> NotFound:
    return NotFound(
        f"The model {shown(name)} does not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
    )


def allowed_models(db: Database, row: KeyRow) -> list[str]:
    """The names on a key's list, and what its owner has made: models of his jobs and their checkpoints."""
    assert row.models is not None
    return sorted({*row.models, *jobs.names_made_by(db, keys.owner_of(db, row.id))})


def usable_models(db: Database, key_id: str | None) -> frozenset[str] | None:
    """The names that a key's list lets it use; None: whatever exists for its owner."""
    row = keys.find(db, key_id) if key_id is not None else None
    return None if row is None or row.models is None else frozenset(allowed_models(db, row))


def viewer_of(db: Database, key_id: str | None) -> str | None:
    """As `Principal.viewer`, of work that goes on after its request: None for the box itself and for an admin's key."""
    if key_id is None:
        return None
    row = keys.find(db, key_id)
    return None if row is not None and ADMIN in row.scopes else keys.owner_of(db, key_id)


def may_use(db: Database, key_id: str | None, name: str) -> bool:
    """Whether work of this key (None: of the box itself) may use a model by this name."""
    return _may(db, key_id, viewer_of(db, key_id), name)


def caller_may_use(db: Database, caller: Principal, name: str) -> bool:
    return _may(db, caller.key_id, caller.viewer, name)


def _may(db: Database, key_id: str | None, viewer: str | None, name: str) -> bool:
    """Every version of a model, and every checkpoint, may be used by whoever may use the model."""
    if not models.is_visible(db, model_of(db, name), viewer):
        return False
    names = usable_models(db, key_id)
    return names is None or name in names or name.partition("@")[0] in names
