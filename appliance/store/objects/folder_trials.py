"""What trials of models' templates and tokenizers came to, by the checksum of their files."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.store.database import Database


@dataclass(frozen=True, slots=True)
class FolderTrial:
    """refused_file, reason: "" where nothing was refused."""

    rules: int
    refused_file: str
    reason: str


def find(db: Database, contents: str) -> FolderTrial | None:
    row = db.execute("SELECT rules, refused_file, reason FROM folder_trials WHERE contents = ?", [contents]).fetchone()
    return None if row is None else FolderTrial(*row)


def keep(db: Database, contents: str, trial: FolderTrial) -> None:
    """Replaces what an earlier trial of the same files came to."""
    db.execute(
        "INSERT OR REPLACE INTO folder_trials VALUES (?, ?, ?, ?)",
        [contents, trial.rules, trial.refused_file, trial.reason],
    )
