"""LoRA adapters: versions that are served on the engines of another model, their base.

`versions.meta["adapter"]` says so: {"base": the base's model, "base_version", "rank"}.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.store.database import Database

_FIELDS = """v.model, v.version, json_extract(v.meta, '$.adapter.base') AS base,
    json_extract(v.meta, '$.adapter.base_version') AS base_version,
    (SELECT b.active_version FROM models b WHERE b.id = json_extract(v.meta, '$.adapter.base')) AS base_active"""
_IS_ADAPTER = "json_extract(v.meta, '$.adapter.base') IS NOT NULL"


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """A version of `model` that is an adapter, with a public `name` it can be called by.

    base_active: the version that the base itself answers with now; None if it has none.
    """

    name: str
    model: str
    version: str
    base: str
    base_version: str
    base_active: str | None = None

    @property
    def engine_name(self) -> str:
        """Its name in engines, another for each version, so that no cache takes one for another."""
        return f"{self.model}@{self.version}"

    @property
    def host(self) -> str:
        """The name whose engines serve it: the base's, or the base version's own once the base has moved on."""
        return self.base if self.base_active == self.base_version else f"{self.base}@{self.base_version}"


def list_callable(db: Database) -> list[AdapterRow]:
    """Adapters by every name they can be called by: models with an active adapter version, checkpoints, canaries."""
    return db.all(
        AdapterRow,
        f"SELECT m.id AS name, {_FIELDS} FROM models m "
        f"JOIN versions v ON v.model = m.id AND v.version = m.active_version WHERE {_IS_ADAPTER} "
        f"UNION ALL SELECT v.checkpoint, {_FIELDS} FROM versions v WHERE v.checkpoint IS NOT NULL AND {_IS_ADAPTER} "
        f"UNION ALL SELECT n.model || '@' || n.version AS name, {_FIELDS} FROM canaries n "
        f"JOIN versions v ON v.model = n.model AND v.version = n.version WHERE n.state = 'running' AND {_IS_ADAPTER}",
    )


def list_on(db: Database, base: str) -> list[AdapterRow]:
    """Every adapter version of a version of `base`, whether it can be called or not."""
    return db.all(
        AdapterRow,
        f"SELECT v.model AS name, {_FIELDS} FROM versions v WHERE json_extract(v.meta, '$.adapter.base') = ? "
        "ORDER BY v.seq",
        [base],
    )
