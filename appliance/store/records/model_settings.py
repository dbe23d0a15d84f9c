"""How a model's engines are set up: every version of its settings; the highest number is in force."""

from __future__ import annotations

from typing import Any

from appliance.store.database import Database
from appliance.store.rows import MODEL_SETTINGS, ModelSettingsRow

MOST_KEPT = 50
_NEWEST = "SELECT model, max(number) FROM model_settings GROUP BY model"
find = MODEL_SETTINGS.find


def add(
    db: Database, model: str, settings: dict[str, Any], digest: str, by_whom: str, now_s: float, note: str = ""
) -> ModelSettingsRow:
    """Put new settings in force; the oldest of more than MOST_KEPT go."""
    with db.transaction():
        last = current(db, model)
        row = ModelSettingsRow(model, 1 if last is None else last.number + 1, now_s, digest, by_whom, settings, note)
        MODEL_SETTINGS.insert(db, row)
        db.execute("DELETE FROM model_settings WHERE model = ? AND number <= ?", [model, row.number - MOST_KEPT])
    return row


def current(db: Database, model: str) -> ModelSettingsRow | None:
    return MODEL_SETTINGS.first(db, "model = ?", model)


def digests(db: Database) -> dict[str, str]:
    """Digests of the settings in force, by model; from an index alone: each round of the scheduler asks."""
    newest = "SELECT model, digest, max(number) FROM model_settings GROUP BY model"
    return {model: digest for model, digest, _ in db.execute(newest)}


def notes(db: Database) -> dict[str, str]:
    """Why the box itself put the settings in force that are, by model."""
    return dict(
        db.execute(f"SELECT model, note FROM model_settings WHERE note != '' AND (model, number) IN ({_NEWEST})")
    )


def with_chat_template(db: Database) -> set[str]:
    """Models whose settings in force have a chat template of their own."""
    given = f"(model, number) IN ({_NEWEST}) AND coalesce(settings ->> '$.chat_template', '') != ''"
    return set(db.column(f"SELECT model FROM model_settings WHERE {given}"))


def history(db: Database, model: str) -> list[ModelSettingsRow]:
    """Newest first."""
    return MODEL_SETTINGS.list_all(db, "model = ?", model)
