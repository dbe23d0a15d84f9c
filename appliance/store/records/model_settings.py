"""How a model's engines are set up: every version of its settings; the highest number is in force."""

from __future__ import annotations

from typing import Any

from appliance.store.database import Database
from appliance.store.rows import ModelSettingsRow

MOST_KEPT = 50


def add(
    db: Database, model: str, settings: dict[str, Any], digest: str, by_whom: str, now_s: float
) -> ModelSettingsRow:
    """Put new settings in force; the oldest of more than MOST_KEPT go."""
    with db.transaction():
        last = current(db, model)
        row = ModelSettingsRow(model, 1 if last is None else last.number + 1, now_s, digest, by_whom, settings)
        db.insert("model_settings", row, name=f"{model} {row.number}")
        db.execute("DELETE FROM model_settings WHERE model = ? AND number <= ?", [model, row.number - MOST_KEPT])
    return row


def current(db: Database, model: str) -> ModelSettingsRow | None:
    return db.one(
        ModelSettingsRow, "SELECT * FROM model_settings WHERE model = ? ORDER BY number DESC LIMIT 1", [model]
    )


def digests(db: Database) -> dict[str, str]:
    """Of the settings in force, by model."""
    return {row.model: row.digest for row in _in_force(db)}


def has_chat_template(db: Database, model: str) -> bool:
    """Whether the model's settings in force have a chat template of their own."""
    row = current(db, model)
    return row is not None and bool(row.settings.get("chat_template"))


def with_chat_template(db: Database) -> set[str]:
    """Models whose settings in force have a chat template of their own."""
    return {row.model for row in _in_force(db) if row.settings.get("chat_template")}


def _in_force(db: Database) -> list[ModelSettingsRow]:
    newest = "SELECT model, max(number) FROM model_settings GROUP BY model"
    return db.all(ModelSettingsRow, f"SELECT * FROM model_settings WHERE (model, number) IN ({newest})", [])


def find(db: Database, model: str, number: int) -> ModelSettingsRow | None:
    return db.one(ModelSettingsRow, "SELECT * FROM model_settings WHERE model = ? AND number = ?", [model, number])


def history(db: Database, model: str) -> list[ModelSettingsRow]:
    """Newest first."""
    return db.all(ModelSettingsRow, "SELECT * FROM model_settings WHERE model = ? ORDER BY number DESC", [model])
