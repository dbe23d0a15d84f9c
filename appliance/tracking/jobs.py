"""Reads jobs and their figures from the box's database, in short looks beside the controller."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

EVENTS_AT_ONCE = 500


@dataclass(frozen=True)
class Job:
    """integrations: as in the request. params: hyperparameters, model, method, seed, files with their SHA-256. phase:
    succeeded, failed or cancelled once `finished_s` is set. version: the last one published of `output_model`."""

    id: str
    name: str
    output_model: str
    phase: str
    started: bool
    finished_s: float | None
    error: str
    version: str | None
    integrations: list[dict[str, Any]]
    params: dict[str, str]


@dataclass(frozen=True)
class Point:
    """Figures of a step. seq: number of its event; at_s: Unix seconds; values: by name (`train/loss`), all finite."""

    seq: int
    step: int
    kind: Literal["train", "validation"]
    at_s: float
    values: dict[str, float]


class Jobs:
    """Each look opens the database again, so that it may be called from any thread. Raises sqlite3.Error."""

    def __init__(self, database: Path):
        self._database = database

    def newest(self) -> int:
        """The number of the newest job; 0 without any."""
        return self._rows("SELECT coalesce(max(seq), 0) AS seq FROM jobs")[0]["seq"]

    def unfinished(self) -> list[str]:
        return [row["id"] for row in self._rows("SELECT id FROM jobs WHERE finished_s IS NULL ORDER BY seq")]

    def made_since(self, number: int) -> list[str]:
        return [row["id"] for row in self._rows("SELECT id FROM jobs WHERE seq > ? ORDER BY seq", [number])]

    def find(self, job_id: str) -> Job | None:
        for row in self._rows("SELECT * FROM jobs WHERE id = ?", [job_id]):
            published = self._rows(
                "SELECT version FROM checkpoints WHERE job_id = ? ORDER BY seq DESC LIMIT 1", [job_id]
            )
            params = _flat(json.loads(row["resolved"] or "{}"))
            params |= {name: str(row[name]) for name in ("model", "method", "seed")}
            for name in ("training_file", "validation_file"):
                for file in self._rows("SELECT id, sha256 FROM files WHERE id = ?", [row[name]]):
                    params |= {name: file["id"], f"{name}_sha256": file["sha256"]}
            return Job(
                id=row["id"],
                name=row["suffix"] or row["id"],
                output_model=row["output_model"],
                phase=row["phase"],
                started=row["started_s"] is not None,
                finished_s=row["finished_s"],
                error=str(json.loads(row["error"] or "{}").get("message", "")),
                version=published[0]["version"] if published else None,
                integrations=json.loads(row["integrations"] or "[]"),
                params=params,
            )
        return None

    def points(self, job_id: str, after: int) -> list[Point]:
        """At most EVENTS_AT_ONCE, in order, of events behind `after`."""
        query = "SELECT seq, data, created_s FROM job_events WHERE job_id = ? AND seq > ? AND type = 'metrics' "
        rows = self._rows(query + "ORDER BY seq LIMIT ?", [job_id, after, EVENTS_AT_ONCE])
        return [_point(row["seq"], row["created_s"], json.loads(row["data"])) for row in rows]

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        with closing(sqlite3.connect(f"{self._database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            return connection.execute(query, values).fetchall()


def _point(seq: int, at_s: float, data: dict[str, Any]) -> Point:
    """The names are those of TensorBoard's files, which have a validation of the whole file once."""
    kind: Literal["train", "validation"] = "train" if "train_loss" in data else "validation"
    prefix = "train_" if kind == "train" else "valid_"
    values = {
        f"{kind}/{name.removeprefix(prefix)}": float(value)
        for name, value in data.items()
        if name not in ("step", "total_steps") and not name.startswith("full_")
        if type(value) in (int, float) and math.isfinite(value)
    }
    return Point(seq, int(data["step"]), kind, at_s, values)


def _flat(table: dict[str, Any], before: str = "") -> dict[str, str]:
    """{"options": {"beta": 0.1}} is {"options.beta": "0.1"}."""
    flat: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{name}.")
        elif value is not None:
            flat[f"{before}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return flat
