"""Models, their versions and shares. A model can be called once one of its versions is active."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from appliance.store.database import Database, RowNotFound
from appliance.store.rows import (
    CANARIES,
    DEPLOYMENTS,
    MODEL_SETTINGS,
    MODELS,
    VERSIONS,
    CanaryRow,
    DeploymentRow,
    ModelRow,
    ModelSettingsRow,
    VersionRow,
)

_VISIBLE = (
    "SELECT id FROM models WHERE (models.owner = ?1 OR EXISTS (SELECT 1 FROM model_shares"
    " WHERE model_shares.model = models.id AND model_shares.owner IN (?1, '*')))"
)

EVERYBODY = "*"
VERSION_MARK, CHECKPOINT_MARK = "@", ":ckpt-"
"""What a public name has between a model and its version (`MODEL@VERSION`) or its checkpoint (`MODEL:ckpt-step-N`)."""
find, update, list_all, page = MODELS.find, MODELS.update, MODELS.list_all, MODELS.page
insert_version, find_version, update_version = VERSIONS.insert, VERSIONS.find, VERSIONS.update
delete, delete_version = MODELS.delete, VERSIONS.delete


def insert(db: Database, row: ModelRow) -> None:
    """Insert a model. Until that is changed, everybody sees an imported model, and only its owner a fine-tuned one."""
    with db.transaction():
        MODELS.insert(db, row)
        if row.kind == "base":
            share(db, row.id, EVERYBODY)


def share(db: Database, name: str, owner: str) -> None:
    """Share a model with an owner or EVERYBODY. Idempotent."""
    db.execute("INSERT OR IGNORE INTO model_shares VALUES (?, ?, ?)", [name, owner, time.time()])


def unshare(db: Database, name: str, owner: str) -> None:
    db.execute("DELETE FROM model_shares WHERE model = ? AND owner = ?", [name, owner])


def shared_with(db: Database, name: str) -> list[str]:
    return db.column("SELECT owner FROM model_shares WHERE model = ? ORDER BY owner", [name])


def is_visible(db: Database, name: str, viewer: str | None) -> bool:
    """Return whether `viewer` sees a model and its versions; None (an admin or the box itself) sees all models."""
    return viewer is None or bool(db.execute(f"{_VISIBLE} AND models.id = ?2", [viewer, name]).fetchone())


def callable_names(db: Database, viewer: str | None) -> list[str]:
    """Return names that `viewer` may call (None, an admin: all): models, then checkpoints, each oldest first."""
    visible, parameters = ("SELECT id FROM models", []) if viewer is None else (_VISIBLE, [viewer])
    named = f"SELECT id FROM models WHERE active_version IS NOT NULL AND id IN ({visible}) ORDER BY seq"
    checkpoints = f"SELECT checkpoint FROM versions WHERE checkpoint IS NOT NULL AND model IN ({visible}) ORDER BY seq"
    return db.column(named, parameters) + db.column(checkpoints, parameters)


def audiences(db: Database) -> dict[str, list[str] | None]:
    """Return {model: owners who see it, None if everybody does}. Admins see all models anyway."""
    audiences = defaultdict[str, set[str]](set)
    for name, owner in db.execute("SELECT id, owner FROM models UNION ALL SELECT model, owner FROM model_shares"):
        audiences[name].add(owner)
    return {name: None if EVERYBODY in owners else sorted(owners - {""}) for name, owners in audiences.items()}


def without_chat_template(db: Database) -> set[tuple[str, str]]:
    """Return (model, version) of versions that were imported without a chat template."""
    rows = db.execute("SELECT model, version FROM versions WHERE json_extract(meta, '$.chat_template') = 0")
    return {(model, version) for model, version in rows}


def activate(db: Database, name: str, version: str) -> None:
    """Make `version` the active one. Raises RowNotFound if the model has no such version."""
    with db.transaction():
        found = find_version(db, name, version)
        if found is None:
            raise RowNotFound("versions", f"{name}@{version}")
        update(db, name, active_version=version, bytes=found.bytes)
        if found.held_back:
            update_version(db, name, version, held_back=0)


def serve(db: Database, name: str, version: str) -> None:
    """Activate a version, and deploy its model unless it is deployed. Raises RowNotFound."""
    activate(db, name, version)
    if DEPLOYMENTS.find(db, name) is None:
        DEPLOYMENTS.insert(db, DeploymentRow(name, time.time()))


def active(db: Database, row: ModelRow) -> VersionRow | None:
    """Return the model's active version; None if it has none."""
    return find_version(db, row.id, row.active_version) if row.active_version else None


def list_versions(db: Database, model: str) -> list[VersionRow]:
    """List the model's versions, oldest first."""
    return VERSIONS.list_all(db, "model = ?", model)


def versions_made_by(db: Database, job_id: str) -> list[VersionRow]:
    """List the job's versions, oldest first. A model may have tens of thousands of versions by all its jobs."""
    return VERSIONS.list_all(db, "job_id = ?", job_id)


def find_checkpoint(db: Database, name: str) -> VersionRow | None:
    return VERSIONS.first(db, "checkpoint = ?", name)


def checkpoint_names(db: Database) -> list[tuple[str, str, str]]:
    """Return (name, model, version) of all checkpoints, oldest first. Each scheduler tick calls this."""
    rows = db.execute("SELECT checkpoint, model, version FROM versions WHERE checkpoint IS NOT NULL ORDER BY seq")
    return [(name, model, version) for name, model, version in rows]


def version_before(db: Database, model: str, version: str) -> VersionRow | None:
    """Return the last earlier version that was not held back: the target of a rollback that names no version."""
    position = "SELECT seq FROM versions WHERE model = ?1 AND version = ?2"
    return VERSIONS.first(db, f"model = ?1 AND NOT held_back AND seq < ({position})", model, version, last=True)


def find_canary(db: Database, model: str) -> CanaryRow | None:
    """Return the model's running canary; None if it has none or the canary has ended."""
    return CANARIES.first(db, "model = ? AND state = 'running'", model)


def running_canaries(db: Database) -> list[CanaryRow]:
    return CANARIES.list_all(db, "state = 'running'")


_FIELDS = """v.model, v.version, json_extract(v.meta, '$.adapter.base') AS base,
    json_extract(v.meta, '$.adapter.base_version') AS base_version,
    (SELECT b.active_version FROM models b WHERE b.id = json_extract(v.meta, '$.adapter.base')) AS base_active"""
_IS_ADAPTER = "json_extract(v.meta, '$.adapter.base') IS NOT NULL"


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """A version of `model` that is an adapter, with a public `name` for requests.

    base_active: the base model's active version now; None if it has none.
    """

    name: str
    model: str
    version: str
    base: str
    base_version: str
    base_active: str | None = None

    @property
    def engine_name(self) -> str:
        """The adapter's name in engines, unique to its version so that no cache mixes versions up."""
        return f"{self.model}@{self.version}"

    @property
    def host(self) -> str:
        """The model whose engines serve the adapter: the base, or its version by name once another one is active."""
        return self.base if self.base_active == self.base_version else f"{self.base}@{self.base_version}"


def callable_adapters(db: Database) -> list[AdapterRow]:
    """List adapters under every callable name: of models with an active adapter version, checkpoints, canaries."""
    return db.all(
        AdapterRow,
        f"SELECT m.id AS name, {_FIELDS} FROM models m "
        f"JOIN versions v ON v.model = m.id AND v.version = m.active_version WHERE {_IS_ADAPTER} "
        f"UNION ALL SELECT v.checkpoint, {_FIELDS} FROM versions v WHERE v.checkpoint IS NOT NULL AND {_IS_ADAPTER} "
        f"UNION ALL SELECT n.model || '@' || n.version AS name, {_FIELDS} FROM canaries n "
        f"JOIN versions v ON v.model = n.model AND v.version = n.version WHERE n.state = 'running' AND {_IS_ADAPTER}",
    )


def adapters_on(db: Database, base: str) -> list[AdapterRow]:
    """List all adapters trained on any version of `base`, callable or not."""
    return db.all(
        AdapterRow,
        f"SELECT v.model AS name, {_FIELDS} FROM versions v WHERE json_extract(v.meta, '$.adapter.base') = ? "
        "ORDER BY v.seq",
        [base],
    )


def add_settings(
    db: Database, model: str, settings: dict[str, Any], digest: str, by_whom: str, now_s: float, note: str = ""
) -> ModelSettingsRow:
    """Store new settings of a model and put them in force."""
    with db.transaction():
        last = current_settings(db, model)
        row = ModelSettingsRow(model, 1 if last is None else last.number + 1, now_s, digest, by_whom, settings, note)
        MODEL_SETTINGS.insert(db, row)
    return row


def current_settings(db: Database, model: str) -> ModelSettingsRow | None:
    return MODEL_SETTINGS.first(db, "model = ?", model)


def settings_in_force(db: Database) -> dict[str, ModelSettingsRow]:
    """Return the settings in force of each model."""
    newest = "SELECT model, max(number) FROM model_settings GROUP BY model"  # by an index: each tick calls this
    return {row.model: row for row in MODEL_SETTINGS.list_all(db, f"(model, number) IN ({newest})")}
